"""Ends before their time: LEASE_REVOKE, CAPABILITY_REVOKE, FENCE_CLEAR and the drain, of one control connection.

What the web page may have done, for whoever has the operator's token: a lease revoked, a drain, a fence cleared.

The web process has no right of its own to anything. It passes on what it was asked together with the token that came
with it, and the token is looked at here: whoever takes that process over, and has not the token, changes nothing.
"""

import hashlib
import hmac
import re
import time
from collections.abc import Callable, Mapping
from typing import Any, Final, NamedTuple, Protocol

from gpulease.daemon.broker.caller import Caller
from gpulease.daemon.broker.handlers.query_requests import status_of
from gpulease.daemon.broker.runtime import Runtime
from gpulease.daemon.leases import (
    Denied,
    DrainCancelled,
    DrainRequested,
    DrainSet,
    Event,
    FenceCleared,
    FenceClearRequested,
    Outcome,
    RevokeDone,
    RevokeRequested,
)
from gpulease.daemon.record.audit.records import clean_text
from gpulease.daemon.web.broker_link import MAX_REASON_CHARS, Refused
from gpulease.daemon.web.settings import MAX_TOKEN_BYTES
from gpulease.protocol import messages
from gpulease.protocol.connection import Request
from gpulease.protocol.failures import Failure
from gpulease.protocol.opcodes import Opcode, Status


def told_reason(text: str) -> str:
    """What a tenant is told of why, of what an operator wrote: nothing that a terminal obeys, "" for what is blank."""
    return clean_text(text.strip())


class AdminHandler:
    """Takes these requests, most of which are operators'; each raises Refusal for what is not the caller's to end."""

    def __init__(self, caller: Caller) -> None:
        self._caller = caller
        self._runtime = caller.runtime
        self._peer = caller.peer
        self._tokens = caller.tokens

    def lease_revoke(self, request: Request, body: messages.LeaseRevoke) -> None:
        """LEASE_REVOKE."""
        if not self._tokens.may_revoke(body.lease_id):
            self._caller.need_operator("LEASE_REVOKE")

        def on_outcome(outcome: Outcome) -> None:
            if isinstance(outcome, RevokeDone):
                self._caller.answer(request, messages.LeaseRevoked(int(outcome.outcome)))
            else:
                self._caller.answer_denied(request, outcome)

        number = self._caller.expect(on_outcome)
        self._runtime.post(RevokeRequested(number, body.lease_id, told_reason(body.reason)))

    def capability_revoke(self, request: Request, body: messages.CapabilityRevoke) -> None:
        """CAPABILITY_REVOKE."""
        lease_id, nonce = self._tokens.to_revoke(body)
        lease, submit = self._runtime.table.get(lease_id), self._runtime.table.submits.of(lease_id)
        numbers = (lease_id,) if submit is None else (lease_id, submit.submit_id)
        pages = [self._runtime.workers.page(number) for number in numbers]

        def on_done(is_kept: bool) -> None:
            why = "the token has ended, but that can't be written down now: a restart of the daemon may forget it"
            failure = Failure(Status.BUSY, why, hint="Ask again, or renew the lease, which ends all of its tokens.")
            self._caller.answer(request, messages.Empty() if is_kept else failure)

        self._tokens.revoke(lease_id, nonce, pages, self._runtime.journal, on_done)
        tenant = self._peer.tenant if lease is None else lease.tenant
        self._runtime.recorder.token_revoked(tenant, self._peer.tenant, lease_id, nonce)

    def fence_clear(self, request: Request, body: messages.FenceClear) -> None:
        """FENCE_CLEAR."""
        self._caller.need_operator("FENCE_CLEAR")

        def on_outcome(outcome: Outcome) -> None:
            if isinstance(outcome, FenceCleared):
                self._caller.answer(request, messages.FenceCleared(outcome.count))
            else:
                self._caller.answer_denied(request, outcome)

        number = self._caller.expect(on_outcome)
        self._runtime.post(FenceClearRequested(number, body.device))

    def drain(self, request: Request, event_for: Callable[[int], Event]) -> None:
        """DRAIN and DRAIN_CANCEL, each with the event that it is."""
        self._caller.need_operator(request.op.name)

        def on_outcome(outcome: Outcome) -> None:
            if isinstance(outcome, DrainSet):
                self._caller.answer(request, status_of(outcome))
            else:
                self._caller.answer_denied(request, outcome)

        number = self._caller.expect(on_outcome)
        self._runtime.post(event_for(number))


BY_PAGE: Final = "web page"
"""Who asked, in logs. It has a space, which no tenant's name can have."""

MAX_WRONG_TOKENS: Final = 10
"""That are looked at in a row. The web process lets none through, so only one that was taken over sends any."""

WRONG_TOKEN_S: Final = 6.0
"""Until one more is looked at. Stops it from guessing, and from keeping the broker's loop busy with hashing."""

MAX_ACTING: Final = 16
"""WebActions by the page whose outcome is not known yet. Stops one with a token, too, from filling the broker."""

MAX_WITHIN_MS: Final = (1 << 32) - 1
"""Of a drain: what the protocol's DRAIN can say."""

MAX_NUMBER: Final = (1 << 32) - 1
"""Of a request, as the web process counts them."""

_LEASE_ID: Final = re.compile("[0-9a-f]{32}")
_CARD: Final = re.compile("[A-Za-z0-9-]{1,64}")

Answer = Callable[[dict[str, Any]], None]
OnOutcome = Callable[[Outcome], None]


class WebActions(Protocol):
    """What is done, and what is told of what was not."""

    def revoke(self, lease_id: int, reason: str, on_outcome: OnOutcome) -> None:
        """End a lease; told is what came of it."""

    def drain(self, within_ms: int | None, on_outcome: OnOutcome) -> None:
        """Drain the node, or end the drain for None; told is what came of it."""

    def clear_fences(self, card_uuid: str, on_outcome: OnOutcome) -> None:
        """Grant a card's fenced memory again; told is what came of it."""

    def refused(self, operation: str, lease_id: int, message: str) -> None:
        """Somebody was not let do so; `lease_id` is 0 for what is about no lease."""


class WebActionRunner:
    """On the lease table, and in the logs."""

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime

    def revoke(self, lease_id: int, reason: str, on_outcome: OnOutcome) -> None:
        """As above."""
        self._post(lambda number: RevokeRequested(number, lease_id, told_reason(reason)), on_outcome)

    def drain(self, within_ms: int | None, on_outcome: OnOutcome) -> None:
        """As above."""
        if within_ms is None:
            self._post(DrainCancelled, on_outcome)
        else:
            self._post(lambda number: DrainRequested(number, within_ms), on_outcome)

    def clear_fences(self, card_uuid: str, on_outcome: OnOutcome) -> None:
        """As above."""
        self._post(lambda number: FenceClearRequested(number, card_uuid), on_outcome)

    def refused(self, operation: str, lease_id: int, message: str) -> None:
        """As above."""
        self._runtime.recorder.refused(operation, BY_PAGE, lease_id, message)
        self._runtime.metrics.refused(operation, Status.DENIED)

    def _post(self, event_for: Callable[[int], Event], on_outcome: OnOutcome) -> None:
        number = self._runtime.expect(on_outcome)
        self._runtime.history.asked_by(number, BY_PAGE)
        self._runtime.post(event_for(number))


class TokenGuesses:
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


class WebActionHandler:
    """Takes what the web process passes on.

    Args:
        token_digest: The SHA-256 of the operator's token; b"" if there is none, and nothing is done then.
    """

    def __init__(self, acts: WebActions, token_digest: bytes, clock: Callable[[], float] = time.monotonic) -> None:
        self._acts = acts
        self._token_digest = token_digest
        self._guesses = TokenGuesses(clock)
        self._acting = 0

    def take_token(self, token_digest: bytes) -> None:
        """Another token counts from now on."""
        self._token_digest = token_digest

    def take(self, message: Mapping[Any, Any], answer: Answer) -> None:
        """Serve one message; what is none of those that an honest process sends is not answered."""
        match message:
            case {"number": int(number), "token": bytes(token)} if 0 <= number <= MAX_NUMBER:
                act = self._act_of(message)
                if act is not None:
                    self._do(act, number, token, answer)

    def _act_of(self, message: Mapping[Any, Any]) -> "_Act | None":
        """What an honest process would ask for so, None if none would."""
        acts = self._acts
        match message:
            case {"op": "revoke", "lease_id": str(text), "reason": str(reason)} if (
                _LEASE_ID.fullmatch(text) and len(reason) <= MAX_REASON_CHARS
            ):
                lease_id = int(text, 16)
                return _Act(Opcode.LEASE_REVOKE.name, lease_id, lambda done: acts.revoke(lease_id, reason, done))
            case {"op": "drain", "within_ms": None}:
                return _Act(Opcode.DRAIN_CANCEL.name, 0, lambda done: acts.drain(None, done))
            case {"op": "drain", "within_ms": int(within_ms)} if 0 <= within_ms <= MAX_WITHIN_MS:
                return _Act(Opcode.DRAIN.name, 0, lambda done: acts.drain(within_ms, done))
            case {"op": "clear_fences", "card": str(card)} if _CARD.fullmatch(card):
                return _Act(Opcode.FENCE_CLEAR.name, 0, lambda done: acts.clear_fences(card, done))
        return None

    def _do(self, act: "_Act", number: int, token: bytes, answer: Answer) -> None:
        def refuse(why: Refused, message: str) -> None:
            answer({"op": "refused", "number": number, "why": why.value, "message": message})

        if not self._guesses.may_look():
            refuse(Refused.TOO_MANY, "Too many wrong tokens have come by the web page: wait a minute.")
            return
        if not self._is_operators(token):
            self._guesses.was_wrong()
            self._acts.refused(act.operation, act.lease_id, "what came by the web page is not the operator's token")
            refuse(Refused.WRONG_TOKEN, "This is not the operator's token.")
            return
        if self._acting >= MAX_ACTING:
            refuse(Refused.TOO_MANY, f"{self._acting} requests are under way, the most: wait a moment.")
            return
        self._acting += 1

        def on_outcome(outcome: Outcome) -> None:
            self._acting -= 1
            if isinstance(outcome, Denied):
                refuse(Refused.DENIED, f"{outcome.denial.message} {outcome.denial.hint}")
            elif (told := _told(outcome)) is not None:
                answer(told | {"number": number})

        act.begin(on_outcome)

    def _is_operators(self, token: bytes) -> bool:
        if not self._token_digest or len(token) > MAX_TOKEN_BYTES:
            return False
        return hmac.compare_digest(hashlib.sha256(token).digest(), self._token_digest)


class _Act(NamedTuple):
    """Something to be done: its name in logs, the lease that it is about or 0, and what begins it."""

    operation: str
    lease_id: int
    begin: Callable[[OnOutcome], None]


def _told(outcome: Outcome) -> dict[str, Any] | None:
    """An outcome as the web process is told it."""
    match outcome:
        case RevokeDone():
            return {"op": "revoked", "outcome": int(outcome.outcome)}
        case DrainSet():
            status = status_of(outcome)
            return {"op": "drain_set", "left_ms": status.left_ms, "leases": status.leases}
        case FenceCleared():
            return {"op": "fences_cleared", "count": outcome.count}
    return None
