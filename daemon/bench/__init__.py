"""Parts of `gpulease bench` that run on the daemon's side: driver calls without a lease, and the lease table alone."""
