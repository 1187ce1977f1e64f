"""A fleet of nodes on etcd: names that at most one node serves, epochs, and the fleet's membership.

The state is in etcd. Only the fleet process of each node (`gpulease.daemon.fleet`) connects to it; broker, workers and
tenants never do. `rules` decides, from events and the time; `etcd` is the client; `directory` answers tenants with the
nodes to ask.
"""
