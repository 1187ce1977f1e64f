"""A fleet of nodes on etcd: names that are served once, epochs, and who is in the fleet.

etcd holds the truth. The fleet process of each node (`gpulease.daemon.fleet`) speaks to it; broker, workers and tenants
never do. `rules` decides, from events and the time; `etcd` carries transactions there and answers back; `directory`
tells tenants which nodes to ask.
"""
