"""`gpulease verify`: what leases promise, proved on this host."""
