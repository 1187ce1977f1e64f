"""Moves a parked session into another process: the old process exports it as an image, the new one restores it.

An export changes nothing in the session, which can continue until this process is killed. A session can't leave if it
has an object that another process could not recreate exactly; `check` raises the reason.
"""

from collections.abc import Mapping, Sequence
from typing import Final

from gpulease.daemon.contract.control_page import SESSION_TOTALS, Counter
from gpulease.daemon.contract.messages import ParkedRegion
from gpulease.daemon.contract.session_image import (
    FIRST_CONNECTION,
    LEASE,
    MAX_CODE_BYTES,
    UNHELD,
    AllocationState,
    ConnectionState,
    GraphState,
    ModuleState,
    RegionSetState,
    RegionStates,
    SessionImage,
)
from gpulease.daemon.drivers.interface import DriverError, ImageMismatch
from gpulease.daemon.session.ended_connections import EndedConnections
from gpulease.daemon.session.graph_operations import GraphOperations
from gpulease.daemon.session.holders import Holder
from gpulease.daemon.session.kept_buffers import KeepOperations
from gpulease.daemon.session.launches import PrintedOperations
from gpulease.daemon.session.memory_operations import ArenaOperations
from gpulease.daemon.session.modules import ModuleOperations
from gpulease.daemon.session.operations import SessionResources
from gpulease.daemon.session.region_memory import RegionMemory
from gpulease.daemon.session.region_operations import RegionOperations
from gpulease.daemon.session.stream_operations import ConnectionStreams, StreamOperations
from gpulease.protocol.failures import Refused
from gpulease.protocol.fast_dataclass import dataclass

_COUNTERS: Final = (*SESSION_TOTALS, Counter.MOST_ALLOCATED_BYTES)
"""Counters of the control page that count over the session's whole life."""


class CantLeave(Exception):
    """The session can't leave its process now.

    Attributes:
        is_lasting: Whether the reason is an object of the session, which stays; False if the session is only busy.
    """

    def __init__(self, reason: str, *, is_lasting: bool) -> None:
        super().__init__(reason)
        self.is_lasting = is_lasting


@dataclass(frozen=True, slots=True)
class SessionParts:
    """The parts of a session, and the name of its driver."""

    resources: SessionResources
    modules: ModuleOperations
    graphs: GraphOperations
    streams: StreamOperations
    keeper: KeepOperations
    ended: EndedConnections
    arena: ArenaOperations
    printed: PrintedOperations
    regions: RegionMemory
    region_sets: RegionOperations

    def check(self) -> None:
        """Raise CantLeave if the session has something that can't be created again in another process."""
        if self.ended.has_any:
            raise CantLeave("objects of an ended connection are not released yet", is_lasting=False)
        if self.regions.is_busy:
            raise CantLeave("one of its regions is being opened or ended", is_lasting=False)
        if why := self.why_stays():
            raise CantLeave(why, is_lasting=True)

    def why_stays(self) -> str:
        """Describe the object that prevents another process from continuing the session; "" if there is none."""
        if self.graphs.recorded() is None:
            return "it has a graph that uses something that no longer exists"
        return self.resources.context.why_stays()

    def export(
        self,
        lease_id: int,
        number: int,
        driver: str,
        moved_bytes: int,
        connections: Sequence[tuple[ConnectionState, Holder]],
    ) -> SessionImage:
        """Return the session's image; `check` must have passed. Raises CantLeave."""
        resources, context = self.resources, self.resources.context
        ledger = resources.ledger
        holders = {self.ended.unheld: UNHELD, self.keeper.holder: LEASE}
        for at, (_, holder) in enumerate(connections, FIRST_CONNECTION):
            holders.setdefault(holder, at)
        try:
            state = context.parked_state()
            modules, code_bytes = list[ModuleState](), 0
            for handle, loaded in ledger.loaded():
                code = context.module_code(loaded.module)
                code = code if code_bytes + len(code) <= MAX_CODE_BYTES else b""
                code_bytes += len(code)
                modules.append(
                    ModuleState(
                        handle,
                        self.modules.image_of(handle),
                        context.module_place(loaded.module),
                        holders[loaded.holder],
                        tuple((address, ledger.variable_size(address)) for address in sorted(loaded.variables)),
                        code,
                    )
                )
        except DriverError as error:
            raise CantLeave(str(error), is_lasting=True) from None
        recorded = self.graphs.recorded() or []
        printed = self.printed.take()
        self.printed.put_back(printed[0], is_lost=printed[1])
        return SessionImage(
            lease_id=lease_id,
            number=number,
            driver=(driver, context.compute_capability, context.cuda_version),
            context=state,
            moved_bytes=moved_bytes,
            modules=tuple(modules),
            last_module=ledger.last_module,
            allocations=tuple(
                AllocationState(address, size, holders[holder]) for address, size, holder in ledger.allocations_held()
            ),
            kept=tuple(self.keeper.names()),
            graphs=tuple(GraphState(number, payload, holders[holder]) for number, payload, holder in recorded),
            last_graph=self.graphs.last_number,
            last_stream=self.streams.last_number,
            connections=tuple(state for state, _ in connections),
            arena_bytes=0 if self.arena.opened is None else self.arena.opened.size_bytes,
            printed=printed,
            counters=tuple((int(counter), int(resources.counters[counter])) for counter in _COUNTERS),
            kept_bytes=ledger.kept_bytes,
            regions=self._region_states(holders) if self.regions.had_any else None,
        )

    def _region_states(self, holders: Mapping[Holder, int]) -> RegionStates:
        states, members = self.regions.states()
        region_sets = zip(self.region_sets.made(), members, strict=True)
        sets = tuple(
            RegionSetState(region_set.handle, tuple(at), holders[region_set.holder]) for region_set, at in region_sets
        )
        return RegionStates(tuple(states), sets, self.region_sets.last_set, self.region_sets.launches_begun)

    def parked_regions(self) -> tuple[ParkedRegion, ...]:
        """Return the place of the bytes of each region that has not ended."""
        context = self.resources.context
        places = context.parked_regions()
        return tuple(
            ParkedRegion(region_id, *places[address], context.region_kept_bytes(places[address][1]))
            for region_id, address in self.regions.active()
        )

    def restore(
        self, image: SessionImage, connections: Sequence[tuple[ConnectionState, ConnectionStreams, Holder]]
    ) -> None:
        """Create the objects of the image again, except graphs. Raises ImageMismatch.

        The context must have adopted the parked memory. `connections` are the session's, in the image's order, each
        with its streams and its holder in this process.
        """
        resources = self.resources
        ledger = resources.ledger
        holders = [self.ended.unheld, self.keeper.holder, *(holder for _, _, holder in connections)]
        try:
            # Step 1: modules, in the order in which they were loaded, so that the driver puts them at the same
            # addresses.
            for module in image.modules:
                ledger.holder = holders[module.holder]
                self.modules.restore(module.number, module.image, module.place, dict(module.variables), module.code)
            ledger.restore_last_module(image.last_module)
            # Step 2: the records of allocations. Their memory is parked.
            for address, size_bytes, holder in image.allocations:
                ledger.holder = holders[holder]
                ledger.add_allocation(address, size_bytes)
            for name, handle in image.kept:
                self.keeper.restore(name, handle)
            # Step 3: regions and their sets. Regions that ended since the export end here, before their bytes come
            # back.
            if image.regions is not None:
                regions = self.regions.restore(image.regions.regions)
                sets = (
                    (region_set.handle, [regions[at] for at in region_set.members], holders[region_set.holder])
                    for region_set in image.regions.sets
                )
                self.region_sets.restore_sets(sets, image.regions.last_set)
                self.regions.end_by_page()
            # Step 4: streams, which have no queued work, and events, all of which are done.
            ledger.charge_kept(image.kept_bytes)
            for state, streams, _ in connections:
                self.streams.restore(streams, state.streams, state.selected, state.events)
            self.streams.restore_last_number(image.last_stream)
        except (DriverError, Refused, IndexError, KeyError, ValueError) as error:
            raise ImageMismatch(str(error)) from None
        finally:
            ledger.holder = self.ended.unheld
        # Step 5: counters, and the output of kernels.
        self.printed.put_back(image.printed[0], is_lost=image.printed[1])
        for counter, value in image.counters:
            resources.counters[counter] = value
        resources.record_usage()

    def restore_graphs(self, image: SessionImage, connections: Sequence[Holder]) -> None:
        """Make the image's graphs again, once the session's bytes are back. Raises ImageMismatch."""
        ledger = self.resources.ledger
        holders = [self.ended.unheld, self.keeper.holder, *connections]
        try:
            for number, payload, holder in image.graphs:
                ledger.holder = holders[holder]
                self.graphs.restore(number, payload)
            self.graphs.restore_last_number(image.last_graph)
        except IndexError:
            raise ImageMismatch("a graph belongs to no connection") from None
        finally:
            ledger.holder = self.ended.unheld
