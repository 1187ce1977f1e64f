"""What the web page may have done: a lease revoked, for whoever has the operator's token.

The web process has no right of its own to anything. It passes on what it was asked together with the token that came
with it, and the token is looked at here: whoever takes that process over, and has not the token, revokes nothing.
"""

import hashlib
import hmac
import re
import time
from collections.abc import Callable, Mapping
from typing import Any, Final, Protocol

from gpulease.daemon.broker.revoking_desk import told_reason
from gpulease.daemon.broker.runtime import Runtime
from gpulease.daemon.core import Denied, Outcome, RevokeDone, RevokeRequested
from gpulease.daemon.web.revoking import MAX_REASON_CHARS, Refused
from gpulease.daemon.web.settings import MAX_TOKEN_BYTES
from gpulease.protocol.opcodes import Opcode, Status

BY_PAGE: Final = "web page"
"""Who asked, in logs. It has a space, which no tenant's name can have."""

MAX_WRONG_TOKENS: Final = 10
"""That are looked at in a row. The web process lets none through, so only one that was taken over sends any."""

WRONG_TOKEN_S: Final = 6.0
"""Until one more is looked at. Stops it from guessing, and from keeping the broker's loop busy with hashing."""

MAX_REVOKING: Final = 16
"""Revocations by the page whose outcome is not known yet. Stops one with a token, too, from filling the broker."""

MAX_NUMBER: Final = (1 << 32) - 1
"""Of a request, as the web process counts them."""

_LEASE_ID: Final = re.compile("[0-9a-f]{32}")

Answer = Callable[[dict[str, Any]], None]


class Acts(Protocol):
    """What is done, and what is told of what was not."""

    def revoke(self, lease_id: int, reason: str, on_outcome: Callable[[Outcome], None]) -> None:
        """End a lease; told is what came of it."""

    def refused(self, lease_id: int, message: str) -> None:
        """Somebody was not let do so."""


class PageActs:
    """On the lease table, and in the logs."""

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime

    def revoke(self, lease_id: int, reason: str, on_outcome: Callable[[Outcome], None]) -> None:
        """As above."""
        number = self._runtime.expect(on_outcome)
        self._runtime.recorder.asked_by(number, BY_PAGE)
        self._runtime.post(RevokeRequested(number, lease_id, told_reason(reason)))

    def refused(self, lease_id: int, message: str) -> None:
        """As above."""
        self._runtime.recorder.refused(Opcode.LEASE_REVOKE.name, BY_PAGE, lease_id, message)
        self._runtime.metrics.refused(Opcode.LEASE_REVOKE.name, Status.DENIED)


class Guesses:
    """How many wrong tokens are looked at: MAX_WRONG_TOKENS, and one more every WRONG_TOKEN_S."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._free_s = clock() - MAX_WRONG_TOKENS * WRONG_TOKEN_S

    def may_look(self) -> bool:
        """Whether a token is looked at now, be it right or wrong."""
        return self._clock() - self._free_s >= WRONG_TOKEN_S

    def was_wrong(self) -> None:
        """One of them is used up."""
        self._free_s = max(self._free_s, self._clock() - MAX_WRONG_TOKENS * WRONG_TOKEN_S) + WRONG_TOKEN_S


class PageDesk:
    """Takes what the web process passes on.

    Args:
        token_digest: The SHA-256 of the operator's token; b"" if there is none, and nothing is done then.
    """

    def __init__(self, acts: Acts, token_digest: bytes, clock: Callable[[], float] = time.monotonic) -> None:
        self._acts = acts
        self._token_digest = token_digest
        self._guesses = Guesses(clock)
        self._revoking = 0

    def take_token(self, token_digest: bytes) -> None:
        """Another token counts from now on."""
        self._token_digest = token_digest

    def take(self, message: Mapping[Any, Any], answer: Answer) -> None:
        """Serve one message; what is none of those that an honest process sends is not answered."""
        match message:
            case {
                "op": "revoke",
                "number": int(number),
                "lease_id": str(lease_id),
                "reason": str(reason),
                "token": bytes(token),
            } if 0 <= number <= MAX_NUMBER and _LEASE_ID.fullmatch(lease_id) and len(reason) <= MAX_REASON_CHARS:
                self._revoke(number, int(lease_id, 16), reason, token, answer)

    def _revoke(self, number: int, lease_id: int, reason: str, token: bytes, answer: Answer) -> None:
        def refuse(why: Refused, message: str) -> None:
            answer({"op": "refused", "number": number, "why": why.value, "message": message})

        if not self._guesses.may_look():
            refuse(Refused.TOO_MANY, "Too many wrong tokens have come by the web page: wait a minute.")
            return
        if not self._is_operators(token):
            self._guesses.was_wrong()
            self._acts.refused(lease_id, "what came by the web page is not the operator's token")
            refuse(Refused.WRONG_TOKEN, "This is not the operator's token.")
            return
        if self._revoking >= MAX_REVOKING:
            refuse(Refused.TOO_MANY, f"{self._revoking} revocations are under way, the most: wait a moment.")
            return
        self._revoking += 1

        def on_outcome(outcome: Outcome) -> None:
            self._revoking -= 1
            if isinstance(outcome, RevokeDone):
                answer({"op": "revoked", "number": number, "outcome": int(outcome.outcome)})
            elif isinstance(outcome, Denied):
                refuse(Refused.DENIED, f"{outcome.denial.message} {outcome.denial.hint}")

        self._acts.revoke(lease_id, reason, on_outcome)

    def _is_operators(self, token: bytes) -> bool:
        if not self._token_digest or len(token) > MAX_TOKEN_BYTES:
            return False
        return hmac.compare_digest(hashlib.sha256(token).digest(), self._token_digest)
