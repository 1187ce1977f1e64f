"""The broker: the daemon's main process, which leases cards to tenants and talks to everybody.

`service` starts it, `control_connection` and `handlers` serve peers, `runtime` executes what the lease table decides.
"""
