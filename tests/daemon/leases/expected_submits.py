"""Expected state of submits, stored separately from the table's own state."""

from typing import TYPE_CHECKING

from gpulease.daemon.leases.events import (
    RefuseSubmit,
    SessionOpened,
    SpawnSubmit,
    SubmitEnded,
    SubmitFenced,
    SubmitFound,
    SubmitReady,
)
from gpulease.daemon.leases.model import FIRST_SUBMIT_ID, LeaseSnapshot, LeaseState

if TYPE_CHECKING:
    from .simulated import Shell

AnySubmitEffect = SpawnSubmit | RefuseSubmit | SubmitFenced | SubmitEnded | SubmitReady


class ExpectedSubmits:
    """Leases of all submits, the submits reported ready, and whether an operator just cleared their fences."""

    def __init__(self) -> None:
        self.leases: dict[int, int] = {}
        self.running: set[int] = set()
        self.is_cleared = False
        # Submits that run in place of a session, and leases for which a session was opened.
        self.in_place: set[int] = set()
        self.opened: set[int] = set()
        # The submit's lease, by the id that was drawn for what is left of the submit.
        self.left: dict[int, int] = {}

    def saw(self, effect: AnySubmitEffect, shell: "Shell") -> None:
        """Check that a submit runs only while its lease is active, and is forgotten only once its memory is free."""
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
            if effect.submit_id in self.in_place and lease is not None and not is_fence:
                self._give_session_place_back(lease, shell)
            assert is_fence or self.is_cleared or effect.submit_id not in shell.unproved, "bytes were forgotten"

    def restore(self, number: int, shell: "Shell") -> None:
        """Report a submit that a restarted daemon finds."""
        is_running = number in shell.alive & self.running
        uuid, held_bytes = shell.unproved[number]
        size_bytes = held_bytes - next(card.overhead_bytes for card in shell.cards if card.uuid == uuid)
        shell.send(SubmitFound(number, self.leases[number], uuid, is_running, 1000, size_bytes))

    def renumber(self, number: int, shell: "Shell") -> int:
        """Draw an id for what is left of a submit if its lease is unknown or fenced."""
        if number < FIRST_SUBMIT_ID:
            return number
        drawn = number - FIRST_SUBMIT_ID + (1 << 64)
        self.left[drawn] = self.leases[number]
        self.on_rename(number, drawn, shell)
        return drawn

    def on_rename(self, from_id: int, to_id: int, shell: "Shell") -> None:
        shell.unproved[to_id] = shell.unproved.pop(from_id)
        if from_id in shell.alive:
            shell.alive.remove(from_id)
            shell.alive.add(to_id)

    def open_session(self, lease_id: int, shell: "Shell") -> None:
        """Attach a client if the table permits it. After that no submit may use the session's memory."""
        shell.send(SessionOpened(lease_id))
        lease = shell.table.get(lease_id)
        if lease is None or lease.state is not LeaseState.ACTIVE:
            return
        if shell.table.submits.in_place_of_session(lease_id) is None:
            beside = [number for number in self.in_place & shell.unproved.keys() if self.leases[number] == lease_id]
            assert not beside, "a session was opened in memory that a submit has"
            self.opened.add(lease_id)

    def _take_session_place(self, effect: SpawnSubmit, shell: "Shell", overhead_bytes: int) -> int:
        assert effect.lease_id not in self.opened, "a submit was put where a session's memory is"
        self.in_place.add(effect.submit_id)
        shell.hold_on(effect.lease_id, effect.card_uuid, overhead_bytes)
        return overhead_bytes

    def _give_session_place_back(self, lease: LeaseSnapshot, shell: "Shell") -> None:
        overhead_bytes = next(card.overhead_bytes for card in shell.cards if card.uuid == lease.card_uuid)
        if lease.lease_id in shell.unproved:
            shell.hold_on(lease.lease_id, lease.card_uuid, lease.size_bytes + overhead_bytes)

    def _start(self, effect: SpawnSubmit, shell: "Shell") -> None:
        lease = shell.table.get(effect.lease_id)
        beside = [number for number in shell.unproved if self.leases.get(number) == effect.lease_id]
        assert not beside, "two submits of a lease at a time"
        assert lease is not None
        own_bytes = shell.unproved[effect.lease_id][1]
        overhead_bytes = next(card.overhead_bytes for card in shell.cards if card.uuid == effect.card_uuid)
        if not shell.spawned[effect.lease_id].terms.submit_bytes:
            own_bytes = self._take_session_place(effect, shell, overhead_bytes)
            sizes = (lease.size_bytes, lease.size_bytes - overhead_bytes)
            assert effect.size_bytes in sizes, "not the lease's own bytes, less a context at most"
        else:
            assert own_bytes + effect.size_bytes == lease.size_bytes + overhead_bytes, "not the lease's own bytes"
            # One of an earlier daemon may have had the id.
            self.in_place.discard(effect.submit_id)
        self.leases[effect.submit_id] = effect.lease_id
        # A submit of an earlier daemon may have had this id. Nothing is stored about submits that are gone.
        shell.deadlines.pop(effect.submit_id, None)
        assert effect.is_warm == (effect.submit_id in shell.unproved), "a context is there, or it is not"
        shell.hold_on(effect.submit_id, effect.card_uuid, effect.size_bytes + overhead_bytes)
        if effect.submit_id in self.in_place and effect.size_bytes == lease.size_bytes:
            shell.check_room(next(card for card in shell.cards if card.uuid == effect.card_uuid))
        if not effect.is_warm:
            shell.alive.add(effect.submit_id)
        shell.jobs.append(effect)
