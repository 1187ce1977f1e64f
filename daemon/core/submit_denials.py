"""Why a submit was refused."""

from gpulease.daemon.core.denials import Denial, DenialReason, invalid


def has_session(lease_id: int) -> Denial:
    """The lease was acquired without memory for submits beside its session."""
    return invalid(
        f"Lease {lease_id:032x} keeps no memory for submits: its session was opened, and has all of it.",
        "Submit on a lease whose session is never opened, or keep memory for both: GpuBuilder().submits(bytes).",
    )


def no_context(lease_id: int) -> Denial:
    """Neither the card nor the lease has room for a second context."""
    return Denial(
        DenialReason.BUSY,
        f"A submit on lease {lease_id:032x} needs a context of its own, and the card has no room for one now.",
        "Try again, or have it kept when you acquire the lease: GpuBuilder().submits(bytes).",
    )


def no_time(timeout_ms: int) -> Denial:
    """No kernel ends in that time."""
    return invalid(f"A submit can't take {timeout_ms} ms.", "Give it at least 1 ms.")


def busy(lease_id: int) -> Denial:
    """As many submits of the lease are under way as may be."""
    return Denial(
        DenialReason.BUSY,
        f"Lease {lease_id:032x} has a submit under way, and another one waits for it: it does one at a time.",
        "Wait for their answers.",
    )


def stuck(lease_id: int) -> Denial:
    """The memory of an earlier submit could not be proved free. Not FENCED: that says that a lease is over."""
    return Denial(
        DenialReason.CAPACITY_EXCEEDED,
        f"Lease {lease_id:032x} takes no submit any more: the memory of an earlier one could not be proved free.",
        "Acquire a new lease; an operator must clear the fence.",
    )


def not_started(lease_id: int, reason: str) -> Denial:
    """Its worker has no context."""
    return Denial(
        DenialReason.SESSION_FAILED,
        f"A submit on lease {lease_id:032x} could not start: {reason.rstrip('.')}.",
        "Nothing was run: try again; if it happens again, tell the operator.",
    )


def waited_in_vain(lease_id: int, waited_s: int) -> Denial:
    """The one before it went on."""
    return Denial(
        DenialReason.BUSY,
        f"A submit on lease {lease_id:032x} waited {waited_s} s for the one before it, which goes on.",
        "Nothing was run: try again.",
    )
