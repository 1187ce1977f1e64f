"""Which subscriptions a connection has: both peers count them by what was asked and what was answered."""

from typing import Any

from gpulease.protocol.messages import LeaseUnsubscribe
from gpulease.protocol.opcodes import Opcode


class Subscriptions:
    """Of one connection. One begins with the reply to its LEASE_SUBSCRIBE and ends with that to LEASE_UNSUBSCRIBE."""

    def __init__(self) -> None:
        self._last: dict[int, int] = {}
        self._ending: dict[int, int] = {}

    def __len__(self) -> int:
        return len(self._last)

    def __contains__(self, number: int) -> bool:
        return number in self._last

    def asked(self, request_id: int, body: Any) -> None:
        """A request was sent that has a reply."""
        if type(body) is LeaseUnsubscribe:
            self._ending[request_id] = body.subscription

    def answered(self, op: Opcode, request_id: int, *, succeeded: bool) -> None:
        """Its reply was sent."""
        if op is Opcode.LEASE_SUBSCRIBE and succeeded:
            self._last[request_id] = 0
        elif op is Opcode.LEASE_UNSUBSCRIBE:
            ended = self._ending.pop(request_id, 0)
            if succeeded:
                self._last.pop(ended, None)

    def is_next(self, subscription: int, sequence: int) -> bool:
        """Whether an event with that number may come now; it is noted then."""
        if not self._last.get(subscription, sequence) < sequence:
            return False
        self._last[subscription] = sequence
        return True
