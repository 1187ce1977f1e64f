"""Sessions' regions and slices as their workers have them, stored separately from the table's own state."""

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from gpulease.daemon.leases.events import (
    Effect,
    EndRegion,
    LeaseEnded,
    OpenRegion,
    ProveRegion,
    RegionEnded,
    RegionGranted,
    RegionOpened,
    RegionProved,
    RegionRefused,
    RegionReleased,
    RegionStuck,
    Resized,
    ResizeSlice,
    SetRegion,
    SliceResized,
)
from gpulease.daemon.leases.model import LeaseState
from gpulease.protocol.session_words import RegionWord

if TYPE_CHECKING:
    from .simulated import Shell

Order = OpenRegion | EndRegion | ResizeSlice
ENDED = (RegionWord.REVOKED, RegionWord.EXPIRED, RegionWord.FREED)


@dataclass
class Mapped:
    """A region that a worker has.

    It has the region's bytes, the bytes that stay reserved at its address, and whether its memory was taken away.
    """

    lease_id: int
    size_bytes: int
    kept_bytes: int = 0
    is_taken: bool = False
    is_shown: bool = False

    @property
    def held_bytes(self) -> int:
        return self.kept_bytes if self.is_taken else self.size_bytes


@dataclass
class ExpectedRegions:
    """The workers' regions, and what the pages and the replies reported about each.

    Attributes:
        mapped: Regions that a worker has, or still reserves addresses for.
        orders: Orders that a worker has not executed yet, in order. A worker that hangs is absent.
        words: The last word of each region.
        slots: The region that was last in a slot of a lease.
        numbers: By lease: every number that was ever assigned.
        leases: By region: its lease.
        told: Regions with a grant that was sent.
        slices: Each worker's slice.
        before_growth: Leases' bytes on their cards before the growth that the last event ordered.
        proofs: Proofs that were requested, by region or lease.
    """

    mapped: dict[int, Mapped] = field(default_factory=dict)
    orders: dict[int, list[Order]] = field(default_factory=dict)
    words: dict[int, RegionWord] = field(default_factory=dict)
    slots: dict[tuple[int, int], int] = field(default_factory=dict)
    numbers: dict[tuple[int, int], int] = field(default_factory=dict)
    leases: dict[int, int] = field(default_factory=dict)
    told: set[int] = field(default_factory=set)
    slices: dict[int, int] = field(default_factory=dict)
    before_growth: dict[int, tuple[str, int]] = field(default_factory=dict)
    proofs: dict[int, ProveRegion] = field(default_factory=dict)
    hung: set[int] = field(default_factory=set)

    def saw(self, effect: Effect, shell: "Shell") -> None:
        """Check an effect against what the workers have, and record it."""
        match effect:
            case OpenRegion():
                self._open(effect, shell)
            case SetRegion(_, region_id, _, _, word, deadline_ns):
                before = self.words.get(region_id)
                is_forgotten = shell.disk.is_being_read
                assert before not in ENDED or word is before or is_forgotten, "an ended region's word was changed"
                assert word in ENDED or deadline_ns > shell.now_ns or is_forgotten, "a region goes on past its time"
                self.words[region_id] = word
            case EndRegion(lease_id, region_id):
                assert self.words[region_id] in ENDED, "memory is taken away before the word says so"
                self._order(lease_id, effect)
            case ProveRegion(_, region_id):
                assert effect.allowed_bytes >= 0
                self.proofs[region_id] = effect
            case ResizeSlice(lease_id):
                self._resize(effect, shell)
                self._order(lease_id, effect)
            case RegionGranted(lease=lease):
                assert self.mapped[lease.lease_id].held_bytes == lease.size_bytes, "a region was granted unmapped"
                assert lease.parent_id in shell.alive, "a region was granted without a worker"
                self.told.add(lease.lease_id)
            case Resized(lease=lease):
                session_bytes = lease.size_bytes - shell.spawned[lease.lease_id].terms.submit_bytes
                assert self.slices[lease.lease_id] == session_bytes, "another size than the worker's was told"
                uuid, held_bytes = shell.unproved[lease.lease_id]
                overhead_bytes = next(card.overhead_bytes for card in shell.cards if card.uuid == uuid)
                assert held_bytes == session_bytes + overhead_bytes, "a size was told before it was proved"
            case LeaseEnded(lease=lease) if lease.parent_id and lease.state is LeaseState.TORNDOWN:
                self._returned(lease.lease_id, lease.parent_id, shell)

    def _open(self, order: OpenRegion, shell: "Shell") -> None:
        assert order.lease_id in shell.alive, "a region was opened without a worker"
        assert self.numbers.get((order.lease_id, order.number)) is None, "a number was given out again"
        last = self.slots.get((order.lease_id, order.slot), 0)
        lease = shell.table.get(last)
        assert lease is None or lease.state is LeaseState.TORNDOWN, "a slot was given out that is not returned"
        self.numbers[order.lease_id, order.number] = order.region_id
        self.slots[order.lease_id, order.slot] = order.region_id
        self.leases[order.region_id] = order.lease_id
        shell.submits.opened.add(order.lease_id)
        self._order(order.lease_id, order)

    def _returned(self, region_id: int, lease_id: int, shell: "Shell") -> None:
        region = self.mapped.get(region_id)
        if region is None or lease_id not in shell.unproved:
            return
        assert region.is_taken, "a region was returned that the worker still has"

    def _resize(self, order: ResizeSlice, shell: "Shell") -> None:
        lease = shell.table.get(order.lease_id)
        assert lease is not None
        uuid, held_bytes = shell.unproved[order.lease_id]
        overhead_bytes = next(card.overhead_bytes for card in shell.cards if card.uuid == uuid)
        if order.size_bytes + overhead_bytes > held_bytes:
            if order.after_record:
                self.before_growth[order.lease_id] = uuid, held_bytes
            shell.hold_on(order.lease_id, uuid, order.size_bytes + overhead_bytes)
            shell.check_room(next(card for card in shell.cards if card.uuid == uuid))
            shell.tenants.check_growth(order.lease_id, lease.tenant, order.size_bytes, shell.unproved)

    def _order(self, lease_id: int, order: Order) -> None:
        if lease_id not in self.hung:
            self.orders.setdefault(lease_id, []).append(order)

    # --- the workers ---

    def held_by(self, lease_id: int) -> int:
        return sum(region.held_bytes for region in self.mapped.values() if region.lease_id == lease_id)

    def carry_out(self, lease_id: int, luck: int, shell: "Shell") -> None:
        """Let a worker execute its next order, and reply."""
        orders = self.orders.get(lease_id)
        if not orders:
            return
        order = orders.pop(0)
        if not orders:
            del self.orders[lease_id]
        if lease_id not in shell.alive:
            return
        match order:
            case OpenRegion(_, region_id, _, _, size_bytes):
                has_room = self.held_by(lease_id) + size_bytes <= self.slices[lease_id]
                if luck % 8 and has_room:
                    self.mapped[region_id] = Mapped(lease_id, size_bytes)
                    shell.send(RegionOpened(region_id, region_id << 20))
                else:
                    shell.send(RegionRefused(region_id, "There is no room."))
            case EndRegion(_, region_id):
                self._end(region_id, luck, shell)
            case ResizeSlice(_, size_bytes):
                if luck % 8 and self.held_by(lease_id) <= size_bytes:
                    self.slices[lease_id] = size_bytes
                shell.send(SliceResized(lease_id, self.slices[lease_id], ""))

    def _end(self, region_id: int, luck: int, shell: "Shell") -> None:
        region = self.mapped.get(region_id)
        if region is None:
            shell.send(RegionRefused(region_id, "The session knows nothing of the region."))
        elif luck % 16 == 8:
            shell.send(RegionStuck(region_id, "a kernel did not end"))
        else:
            if not region.is_taken:
                region.is_taken, region.is_shown = True, bool(luck % 3)
                region.kept_bytes = region.size_bytes // (16 if region_id % 2 else 4)
            shell.send(
                RegionEnded(region_id, region.size_bytes - region.kept_bytes, region.kept_bytes, region.is_shown)
            )

    def release(self, region_id: int, shell: "Shell") -> None:
        """Let the session release an ended region's address."""
        region = self.mapped.get(region_id)
        if region is not None and region.is_taken and region.lease_id in shell.alive:
            del self.mapped[region_id]
            shell.send(RegionReleased(region_id))

    def poll(self, number: int, shell: "Shell") -> None:
        """Check the card's memory for a region, or for a lease that was resized."""
        proof = self.proofs.pop(number)
        if number != proof.lease_id:
            shell.send(RegionProved(number))
            return
        uuid, held_bytes = shell.unproved.get(number, ("", 0))
        overhead_bytes = next((card.overhead_bytes for card in shell.cards if card.uuid == uuid), 0)
        if not uuid or number not in shell.alive or self.slices[number] + overhead_bytes > proof.allowed_bytes:
            return
        lease = shell.table.get(number)
        if lease is not None and lease.state is LeaseState.ACTIVE:
            # For a restored lease they are equal. It may have held more, without a row that says so.
            assert proof.allowed_bytes <= held_bytes
            shell.hold_on(number, uuid, proof.allowed_bytes)
        shell.send(RegionProved(number))

    def hang(self, lease_id: int) -> None:
        self.hung.add(lease_id)
        self.orders.pop(lease_id, None)

    @property
    def is_busy(self) -> bool:
        return bool(self.orders or self.proofs)

    def finish(self, shell: "Shell") -> None:
        """Execute every order, and check the card's memory for every proof."""
        while self.is_busy:
            for lease_id in tuple(self.orders):
                self.carry_out(lease_id, 1, shell)
            for number in tuple(self.proofs):
                self.poll(number, shell)

    def lose_tail(self, shell: "Shell") -> None:
        """Drop the orders to grow that waited for the record of the last event."""
        shell.unproved.update(self.before_growth)

    def forget_daemon(self) -> None:
        """Drop what a killed daemon had not sent, or had requested without a reply."""
        self.orders.clear()
        self.proofs.clear()
        # An order that was never executed may have been lost with its row, and its number with it.
        known = self.told | self.mapped.keys()
        self.numbers = {key: region_id for key, region_id in self.numbers.items() if region_id in known}

    def check(self, shell: "Shell") -> None:
        """Check that no lease's regions exceed its worker's slice."""
        for lease_id in {region.lease_id for region in self.mapped.values()} & shell.alive:
            assert self.held_by(lease_id) <= self.slices[lease_id], "regions hold more than their slice"
