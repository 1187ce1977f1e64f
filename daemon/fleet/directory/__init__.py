"""A fleet's directory: a stateless process that tells tenants which nodes have room for a lease.

A directory watches the nodes' records and the claims of names in etcd. Its view may be seconds old. It is only advice:
each node decides which leases it admits, and etcd decides which node gets a name. Two to five directories serve a
fleet.
"""
