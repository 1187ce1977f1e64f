"""A fleet of nodes on etcd: membership, names that at most one node serves, and quotas.

The fleet's state is in etcd, to which only each node's fleet process and the directories connect. `rules` has the
decisions as pure functions, `etcd` the client, and `directory` the process that tells tenants which nodes have room.
"""
