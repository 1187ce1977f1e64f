"""Parts of `gpulease bench` that run on the daemon's side: the driver called directly, without a lease."""
