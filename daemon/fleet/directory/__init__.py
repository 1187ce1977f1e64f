"""A directory of a fleet: a process without a state of its own that tells tenants which nodes to ask for a lease.

A directory watches the nodes' records and the claims of names in etcd. Its view may be seconds old. Nothing rests on
the view: each node decides by itself, and a name's claim is decided by etcd. Two to five directories serve a fleet.
"""
