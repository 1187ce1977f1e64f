"""What is known of submits, kept apart from the table's own books."""

from typing import TYPE_CHECKING

from gpulease.daemon.core import (
    FIRST_SUBMIT_ID,
    LeaseState,
    RefuseSubmit,
    SpawnSubmit,
    SubmitEnded,
    SubmitFenced,
    SubmitReady,
)

if TYPE_CHECKING:
    from .simulated import Shell

AnySubmitEffect = SpawnSubmit | RefuseSubmit | SubmitFenced | SubmitEnded | SubmitReady


class SubmitBooks:
    """Whose submits there were, which were told of, and whether an operator has just vouched for what is fenced."""

    def __init__(self) -> None:
        self.leases: dict[int, int] = {}
        self.running: set[int] = set()
        self.is_cleared = False

    def saw(self, effect: AnySubmitEffect, shell: "Shell") -> None:
        """A submit goes on only while its lease is active, and is forgotten only once its bytes are proved back."""
        lease = shell.table.get(self.leases.get(effect.submit_id, 0))
        if isinstance(effect, SpawnSubmit):
            self._start(effect, shell)
        elif isinstance(effect, SubmitReady):
            assert effect.submit_id in shell.alive, "a submit was told of without a worker"
            assert lease is not None
            assert lease.state is LeaseState.ACTIVE
            self.running.add(effect.submit_id)
        elif isinstance(effect, RefuseSubmit):
            self.running.discard(effect.submit_id)
        elif isinstance(effect, SubmitEnded):
            is_fence = lease is not None and lease.state is LeaseState.FENCED
            assert is_fence or self.is_cleared or effect.submit_id not in shell.unproved, "bytes were forgotten"

    def renumber(self, number: int, shell: "Shell") -> int:
        """What is left of a submit whose lease is not known, or is fenced, is known as nobody's lease."""
        if number < FIRST_SUBMIT_ID:
            return number
        as_lease = number - FIRST_SUBMIT_ID + (1 << 64)
        shell.unproved[as_lease] = shell.unproved.pop(number)
        if number in shell.alive:
            shell.alive.remove(number)
            shell.alive.add(as_lease)
        return as_lease

    def _start(self, effect: SpawnSubmit, shell: "Shell") -> None:
        lease = shell.table.get(effect.lease_id)
        beside = [number for number in shell.unproved if self.leases.get(number) == effect.lease_id]
        assert not beside, "two submits of a lease at a time"
        assert lease is not None
        own_bytes = shell.unproved[effect.lease_id][1]
        overhead_bytes = next(card.overhead_bytes for card in shell.cards if card.uuid == effect.card_uuid)
        assert own_bytes + effect.size_bytes == lease.size_bytes + overhead_bytes, "not the lease's own bytes"
        self.leases[effect.submit_id] = effect.lease_id
        # An earlier daemon's may have had the number: nothing is kept of those that are gone.
        shell.deadlines.pop(effect.submit_id, None)
        assert effect.is_warm == (effect.submit_id in shell.unproved), "a context is there, or it is not"
        shell.hold_on(effect.submit_id, effect.card_uuid, effect.size_bytes + overhead_bytes)
        if not effect.is_warm:
            shell.alive.add(effect.submit_id)
        shell.jobs.append(effect)
