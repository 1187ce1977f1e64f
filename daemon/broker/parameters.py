"""What a request says in its options and parameters, checked."""

from typing import Final

from gpulease.daemon.broker.refusal import Refusal
from gpulease.protocol.capabilities import AttachOption
from gpulease.protocol.failures import Failure
from gpulease.protocol.opcodes import (
    EXCLUSIVITY_TAG,
    MAX_KERNEL_TAG,
    ORPHAN_TAG,
    SUBMIT_TAG,
    WAITING_TAG,
    Exclusivity,
    Status,
    Waiting,
)
from gpulease.protocol.primitives import LeaseParameter, Tlv

MAX_KERNEL_BYTES: Final = 4
"""Of the parameter's u32."""

SUBMIT_BYTES: Final = 8
"""Of the parameter's u64."""

ORPHAN_BYTES: Final = 4
"""Of the parameter's u32."""

_CLASSES: Final = {int(member): member for member in Exclusivity}


def token_of(options: tuple[Tlv, ...]) -> bytes | None:
    """The token among ATTACH's or GPU_SUBMIT's options, None if there is none. Raises Refusal if there are several."""
    values = [option.value for option in options if option.type == AttachOption.TOKEN]
    if len(values) > 1:
        raise Refusal(Failure(Status.INVALID_REQUEST, "one token at most is carried"))
    return values[0] if values else None


def exclusivity_of(parameters: tuple[LeaseParameter, ...]) -> Exclusivity:
    """The exclusivity class among a request's lease parameters, SESSION_EXCLUSIVE if there is none.

    Raises Refusal for classes that are unknown (4-254) or never valid (255), or if it is given twice.
    """
    values = [parameter.value for parameter in parameters if parameter.tag == EXCLUSIVITY_TAG]
    if not values:
        return Exclusivity.SESSION_EXCLUSIVE
    if len(values) > 1 or len(values[0]) != 1:
        raise Refusal(Failure(Status.INVALID_REQUEST, "the exclusivity class is one byte, given once"))
    number = values[0][0]
    if number == 255:
        raise Refusal(Failure(Status.INVALID_REQUEST, "exclusivity class 255 is never valid"))
    if number not in _CLASSES:
        raise Refusal(
            Failure(Status.UNSUPPORTED, f"exclusivity class {number} is not known here", hint="Use 0, 1 or 2.")
        )
    return _CLASSES[number]


def max_kernel_ms_of(parameters: tuple[LeaseParameter, ...]) -> int:
    """How long one kernel may run, 0 for no bound but the lease's own. Raises Refusal if it makes no sense."""
    values = [parameter.value for parameter in parameters if parameter.tag == MAX_KERNEL_TAG]
    if not values:
        return 0
    if len(values) > 1 or len(values[0]) != MAX_KERNEL_BYTES or not any(values[0]):
        raise Refusal(
            Failure(Status.INVALID_REQUEST, "a kernel's longest time is a u32 of milliseconds, at least 1, given once")
        )
    return int.from_bytes(values[0], "big")


def submit_bytes_of(parameters: tuple[LeaseParameter, ...]) -> int:
    """How much of the lease is for submits, 0 if nothing is. Raises Refusal if it makes no sense."""
    values = [parameter.value for parameter in parameters if parameter.tag == SUBMIT_TAG]
    if not values:
        return 0
    if len(values) > 1 or len(values[0]) != SUBMIT_BYTES or not any(values[0]):
        raise Refusal(
            Failure(Status.INVALID_REQUEST, "what is kept for submits is a u64 of bytes, at least 1, given once")
        )
    return int.from_bytes(values[0], "big")


def orphan_ms_of(parameters: tuple[LeaseParameter, ...]) -> int | None:
    """How long the lease may be without a connection, 0 for as long as it lasts; None if its tenant does not say.

    Raises Refusal if it makes no sense.
    """
    values = [parameter.value for parameter in parameters if parameter.tag == ORPHAN_TAG]
    if not values:
        return None
    if len(values) > 1 or len(values[0]) != ORPHAN_BYTES:
        why = "how long a lease may be without a connection is a u32 of milliseconds, given once"
        raise Refusal(Failure(Status.INVALID_REQUEST, why))
    return int.from_bytes(values[0], "big")


def waiting_of(parameters: tuple[LeaseParameter, ...]) -> Waiting | None:
    """How the session's ends wait, None if the tenant leaves it to the daemon. Raises Refusal if it makes no sense."""
    values = [parameter.value for parameter in parameters if parameter.tag == WAITING_TAG]
    if not values:
        return None
    if len(values) > 1 or len(values[0]) != 1:
        raise Refusal(Failure(Status.INVALID_REQUEST, "the way of waiting is one byte, given once"))
    try:
        return Waiting(values[0][0])
    except ValueError:
        known = ", ".join(f"{item.value} ({item.name.lower()})" for item in Waiting)
        failure = Failure(Status.UNSUPPORTED, f"way of waiting {values[0][0]} is not known here", hint=f"Use {known}.")
        raise Refusal(failure) from None
