"""Integrations of cluster schedulers. The memory of a job or pod is a lease, which is proved free at its end."""
