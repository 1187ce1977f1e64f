"""What an operator can demand a token for."""

from enum import Enum


class Demand(Enum):
    """What needs a token, also of a lease's own tenant; operators need none."""

    ALLOC = "alloc"
    RENEW = "renew"
    ATTACH = "attach"
