"""A fleet of nodes on etcd: names that at most one node serves, epochs, and the fleet's membership.

etcd holds the truth. The fleet process of each node (`gpulease.daemon.fleet`) talks to it; broker, workers and tenants
never do. `rules` decides, from events and the time; `etcd` carries transactions there and answers back; `directory`
answers tenants with the nodes to ask.
"""
