"""Tokens by which a lease's tenant lets others use it, and operators let tenants acquire and renew.

The node mints and verifies; nobody else has the keys. `authority.CapabilityAuthority` issues and validates; the clocks,
the leases, the nonces and the randomness are given to it. No I/O here but in `key_file`, and one module, `tokens`, that
knows the Biscuit library, so that a daemon without it starts and offers no tokens.
"""
