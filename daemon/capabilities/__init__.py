"""Tokens: a tenant lets others use a lease, and an operator lets tenants acquire and renew.

Only the node has the keys, so it mints and verifies all tokens. `authority.CapabilityAuthority` issues and validates
them. Its callers supply clocks, leases, nonces and randomness. Only `keys` does I/O, for the key file. Only `tokens`
imports the Biscuit library, so a daemon without the library starts and offers no tokens.
"""
