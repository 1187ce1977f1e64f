"""Actions that the web page may request: revoke a lease, drain the node, clear a fence.

The web process has no rights of its own. It forwards each request with the operator's token that came with it, and the
broker checks the token. An attacker who takes over the web process without having the token can change nothing.
"""

import hashlib
import hmac
import time
from collections.abc import Callable
from typing import Final, NamedTuple, Protocol, assert_never

from gpulease.daemon.broker.handlers.admin_requests import drain_event, shown_reason
from gpulease.daemon.broker.reports import drain_status
from gpulease.daemon.broker.runtime import OnResult, Result, Runtime
from gpulease.daemon.leases.events import (
    DrainSet,
    Event,
    FenceClearRequested,
    RequestDenied,
    RevokeDone,
    RevokeRequested,
    SlicesCleared,
)
from gpulease.daemon.log.catalogue import LogEvent
from gpulease.daemon.log.writer import log_event
from gpulease.daemon.web.http_settings import MAX_TOKEN_BYTES
from gpulease.daemon.web.web_messages import (
    ActionOutcome,
    ActionRefused,
    ChangeDrain,
    ClearFences,
    DrainChanged,
    FencesCleared,
    FromWeb,
    LeaseRevokedReply,
    RevokeLease,
    WebRefusal,
)
from gpulease.protocol.counts import counted
from gpulease.protocol.failures import Failure
from gpulease.protocol.opcodes import Opcode, Status

BY_PAGE: Final = "web page"
"""Name in logs for a person who acts through the web page. It has a space, which a tenant's name can't have."""

MAX_WRONG_TOKENS: Final = 10
"""Maximum number of wrong tokens that are checked in a row. An honest web process forwards none."""

WRONG_TOKEN_S: Final = 6.0
"""Time until one more token is checked. Stops a compromised web process from guessing, and from keeping the broker's
loop busy with hashing."""

MAX_PENDING: Final = 16
"""Maximum number of actions without an outcome yet. Stops even a holder of the token from filling the broker's
memory."""

Answer = Callable[[ActionOutcome], None]


class WebActions(Protocol):
    """Performs the actions. Each calls `on_outcome` once with its result."""

    def revoke(self, lease_id: int, reason: str, on_outcome: OnResult) -> None: ...

    def drain(self, within_ms: int | None, card_uuid: str, on_outcome: OnResult) -> None:
        """Drain a card, or the node for "", or end that drain for None."""

    def clear_fences(self, card_uuid: str, on_outcome: OnResult) -> None:
        """Make a card's fenced memory grantable again."""

    def refused(self, operation: str, lease_id: int, message: str) -> None:
        """Log an action that was refused. `lease_id` is 0 for an action that concerns no lease."""


class WebActionRunner:
    """Performs the actions on the lease table, and logs the web page as their origin."""

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime

    def revoke(self, lease_id: int, reason: str, on_outcome: OnResult) -> None:
        self._post(lambda number: RevokeRequested(number, lease_id, shown_reason(reason)), on_outcome)

    def drain(self, within_ms: int | None, card_uuid: str, on_outcome: OnResult) -> None:
        self._post(lambda number: drain_event(number, within_ms, card_uuid or None), on_outcome)

    def clear_fences(self, card_uuid: str, on_outcome: OnResult) -> None:
        self._post(lambda number: FenceClearRequested(number, card_uuid), on_outcome)

    def refused(self, operation: str, lease_id: int, message: str) -> None:
        self._runtime.note_refusal(operation, BY_PAGE, lease_id, Failure(Status.DENIED, message))

    def _post(self, event_for: Callable[[int], Event], on_outcome: OnResult) -> None:
        # Log and record the action under the page's name: its user has the token, and is not a tenant.
        number = self._runtime.expect(on_outcome)
        self._runtime.history.note_requester(number, BY_PAGE)
        self._runtime.post(event_for(number))


class WebActionHandler:
    """Serves the messages that the web process forwards.

    Args:
        token_digest: The SHA-256 of the operator's token. Without a token, b"", no action is performed.
    """

    def __init__(self, actions: WebActions, token_digest: bytes, clock: Callable[[], float] = time.monotonic) -> None:
        self._actions = actions
        self._token_digest = token_digest
        self._guesses = GuessLimiter(clock)
        self._pending = 0

    def set_token(self, token_digest: bytes) -> None:
        self._token_digest = token_digest

    def handle(self, message: FromWeb, answer: Answer) -> None:
        """Serve one request of the web process. Calls `answer` once with its outcome.

        Raises the action's errors; the caller must then answer.
        """
        number, action = message.request, self._action_of(message)
        # Check the bound on guesses before the token: while the bound applies, not even a right token is checked.
        if not self._guesses.may_check():
            text = "The web page received too many wrong tokens. Wait a minute."
            answer(ActionRefused(number, WebRefusal.TOO_MANY, text))
        elif not self._is_operators(message.token):
            self._guesses.count_wrong()
            reason = "the token sent by the web page is not the operator's"
            self._actions.refused(action.operation, action.lease_id, reason)
            answer(ActionRefused(number, WebRefusal.WRONG_TOKEN, "This is not the operator's token."))
        elif self._pending >= MAX_PENDING:
            text = f"{counted(self._pending, 'request is', 'requests are')} in progress, the maximum. Wait a moment."
            answer(ActionRefused(number, WebRefusal.TOO_MANY, text))
        else:
            self._perform(action, number, answer)

    def _action_of(self, message: FromWeb) -> "_Action":
        actions = self._actions
        match message:
            case RevokeLease():
                lease_id, reason = int(message.lease_id, 16), message.reason
                return _Action(Opcode.LEASE_REVOKE.name, lease_id, lambda done: actions.revoke(lease_id, reason, done))
            case ChangeDrain():
                within_ms, card = message.within_ms, message.card
                operation = Opcode.DRAIN_CANCEL if within_ms is None else Opcode.DRAIN
                name = Opcode.CARD_DRAIN.name if card else operation.name
                return _Action(name, 0, lambda done: actions.drain(within_ms, card, done))
            case ClearFences():
                card = message.card
                return _Action(Opcode.FENCE_CLEAR.name, 0, lambda done: actions.clear_fences(card, done))
            case _:
                assert_never(message)

    def _perform(self, action: "_Action", number: int, answer: Answer) -> None:
        is_over = False

        def end() -> bool:
            """Count the action as over. Returns False if it was over before."""
            nonlocal is_over
            was_over, is_over = is_over, True
            # Count down only once, whether the outcome came, the beginning failed, or both.
            self._pending -= not was_over
            return not was_over

        def on_outcome(outcome: Result) -> None:
            if not end():
                return
            try:
                reply = _answer_of(number, outcome)
            except Exception:
                # The page waits for an answer, and nothing else sends one.
                log_event(LogEvent.DAEMON_FAULT, is_fault=True, doing="answering the web page")
                text = "The outcome of this request is unknown; the daemon's log has details."
                reply = ActionRefused(number, WebRefusal.FAILED, text)
            answer(reply)

        # Count it before the action begins, because its outcome may come before `begin` returns.
        self._pending += 1
        try:
            action.begin(on_outcome)
        except BaseException:
            end()
            raise

    def _is_operators(self, token: bytes) -> bool:
        # Without a token in the settings, no action is possible at all.
        if not self._token_digest or len(token) > MAX_TOKEN_BYTES:
            return False
        # Hash the token and compare in constant time, so that the time of a refusal shows nothing about the token.
        return hmac.compare_digest(hashlib.sha256(token).digest(), self._token_digest)


class GuessLimiter:
    """Limits how many wrong tokens are checked: MAX_WRONG_TOKENS, and one more every WRONG_TOKEN_S."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        # At the start, MAX_WRONG_TOKENS guesses are free.
        self._free_s = clock() - MAX_WRONG_TOKENS * WRONG_TOKEN_S

    def may_check(self) -> bool:
        """Return whether a token is checked now, whether it is right or wrong."""
        return self._clock() - self._free_s >= WRONG_TOKEN_S

    def count_wrong(self) -> None:
        # A token bucket, stored as the time at which it was empty: each wrong token takes out one unit, and time
        # refills it.
        self._free_s = max(self._free_s, self._clock() - MAX_WRONG_TOKENS * WRONG_TOKEN_S) + WRONG_TOKEN_S


class _Action(NamedTuple):
    """An action: its name in logs, its lease (0 for none), and the function that begins it."""

    operation: str
    lease_id: int
    begin: Callable[[OnResult], None]


def _answer_of(number: int, outcome: Result) -> ActionOutcome:
    match outcome:
        case RevokeDone():
            return LeaseRevokedReply(number, outcome.outcome)
        case DrainSet():
            status = drain_status(outcome)
            return DrainChanged(number, status.left_ms, status.leases)
        case SlicesCleared():
            return FencesCleared(number, outcome.count)
        case RequestDenied():
            return ActionRefused(number, WebRefusal.DENIED, f"{outcome.denial.message} {outcome.denial.hint}")
    raise TypeError(f"{outcome!r} must be the outcome of an action")
