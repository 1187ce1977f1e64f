"""Schedulers of clusters: what they grant, the daemon leases, and proves free before they grant it again."""
