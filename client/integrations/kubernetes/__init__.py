"""Kubernetes' Dynamic Resource Allocation: a prepared ResourceClaim is a lease."""
