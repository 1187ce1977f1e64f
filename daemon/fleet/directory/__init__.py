"""A fleet's directory: a stateless process that names the nodes that tenants may ask for a lease.

A directory watches the nodes' records and the claims of names in etcd. Its view may be seconds old. Correctness does
not depend on it: each node decides its own admissions, and etcd decides who gets a name. Two to five directories serve
a fleet.
"""
