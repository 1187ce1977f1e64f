"""`gpulease verify`: what leases promise, proved on this host's card, with a daemon of its own."""
