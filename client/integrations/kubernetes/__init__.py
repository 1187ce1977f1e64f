"""A driver for Kubernetes' Dynamic Resource Allocation, in which a prepared ResourceClaim holds leases."""
