"""Tokens by which a lease's tenant lets others use it, and operators let tenants acquire and renew.

The node mints and verifies; nobody else has the keys. No I/O here but in `key_file`; the clocks, the leases and the
randomness are given to `CapabilityAuthority`.
"""

from gpulease.daemon.capabilities.authority import CapabilityAuthority, LeaseFacts
from gpulease.daemon.capabilities.claims import (
    MAX_TOKEN_TTL_S,
    CapabilityDenied,
    CapabilityRequest,
    Check,
    Claims,
    Grant,
    audience_of,
)
from gpulease.daemon.capabilities.keys import KeyRing

__all__ = [
    "MAX_TOKEN_TTL_S",
    "CapabilityAuthority",
    "CapabilityDenied",
    "CapabilityRequest",
    "Check",
    "Claims",
    "Grant",
    "KeyRing",
    "LeaseFacts",
    "audience_of",
]
