"""Losses of a whole engine: which errors say so, who is suspected of them, and when the next engine is asked for. Pure.

An error that is not of a known kind is taken for a loss, too. A fault of the context is somebody's: those who had rows
in the steps under way are computed again one by one, and a request that ends an engine alone is not tried again.
"""

from collections.abc import Callable, Iterable
from typing import Final

from gpulease.client.errors import (
    Denied,
    Disconnected,
    Drained,
    Fenced,
    GpuSessionFailed,
    LeaseExpired,
    LeaseFreed,
    NotFound,
    Revoked,
    SyncFailed,
    Unsupported,
    Untrusted,
)
from gpulease.client.serve.decode.decode_errors import ModelRejected

LEASE_ENDS: Final = (LeaseExpired, Revoked, Fenced, Drained, Disconnected, LeaseFreed, NotFound)
"""Errors that say that the lease is over: nothing that was computed is the cause."""

CONTEXT_FAULTS: Final = (GpuSessionFailed, SyncFailed)
"""Errors that say that the context is lost: something that was computed may be the cause."""

FINAL_REFUSALS: Final = (ModelRejected, Denied, Unsupported, Untrusted)
"""Errors of an engine's opening that the same attempt will meet again at one daemon."""

FINAL_FLEET_REFUSALS: Final = (ModelRejected,)
"""Such errors of a fleet: another node may grant, and a lost node's bytes of a quota are counted until it is fenced."""

FIRST_PAUSE_S: Final = 0.1
"""Pause in seconds behind the first attempt to open an engine; it doubles with each that follows."""

MAX_PAUSE_S: Final = 5.0
"""Longest pause in seconds between two attempts, so that a daemon that is back is used soon."""

GIVE_UP_S: Final = 300.0
"""Seconds for which an engine is asked for: requests must not wait for ever on a node that is gone."""

MAX_LOSSES_IN_A_ROW: Final = 5
"""Engines lost without a step between: more are a fault of ours or of the card, and would load models for ever."""


def is_known(error: BaseException) -> bool:
    """Return whether an error is of a kind that says that the engine is lost."""
    return isinstance(error, LEASE_ENDS + CONTEXT_FAULTS)


def is_fault(error: BaseException) -> bool:
    """Return whether what was computed may be the cause of a loss."""
    return not isinstance(error, LEASE_ENDS)


def pause_s(attempt: int) -> float:
    """Return the pause in seconds behind an attempt, counted from 0."""
    return min(MAX_PAUSE_S, FIRST_PAUSE_S * 2.0 ** min(attempt, 16))


class Suspects:
    """Requests that may have ended an engine, by their callers' ids, each of them to be computed alone once.

    Attributes:
        current: The one that is computed alone now; "" if there is none.
        tokens: How many tokens it had emitted before.
    """

    def __init__(self) -> None:
        self.current = ""
        self.tokens = 0
        self._queue: dict[str, None] = {}

    def __bool__(self) -> bool:
        return bool(self.current or self._queue)

    def add(self, request_ids: Iterable[str]) -> None:
        """Suspect those that had rows under way as an engine was lost."""
        self._queue.update(dict.fromkeys(request_ids))

    def put_off(self) -> None:
        """Let the one that is computed alone wait for another turn: its tenant was suspended."""
        self.add([self.current])
        self.current = ""

    def has_next(self, is_ready: Callable[[str], bool]) -> bool:
        """Return whether one that is ready waits for its turn."""
        return any(map(is_ready, self._queue))

    def next(self, is_ready: Callable[[str], bool] = bool) -> str:
        """Go on with the next one that is ready, and return it; "" if there is none. The others keep their places."""
        self.current = next(filter(is_ready, self._queue), "")
        self._queue.pop(self.current, None)
        return self.current
