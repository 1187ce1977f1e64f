"""The daemon: a broker that grants leases, and one worker process for each of them."""
