"""Cluster schedulers: the daemon leases the memory that they grant, and proves it free before they grant it again."""
