"""Tokens: a tenant lets others use a lease, and an operator lets tenants acquire and renew.

The node mints and verifies tokens; nobody else has the keys. `authority.CapabilityAuthority` issues and validates them.
Its callers give it clocks, leases, nonces and randomness. Only `keys` does I/O, for the key file. Only `tokens` imports
the Biscuit library, so a daemon without the library starts and offers no tokens.
"""
