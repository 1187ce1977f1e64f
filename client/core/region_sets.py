"""Region sets: the regions that launches name, sent to the session's worker once for many launches."""

from collections.abc import Iterable

from gpulease.client.core.lease_request import MAX_WIRE_BYTES
from gpulease.client.core.operations import RequestPipeline
from gpulease.client.core.regions import RegionView
from gpulease.client.core.waits import Procedure
from gpulease.client.errors import InvalidHandle, InvalidRequest, Unsupported
from gpulease.client.handles import Handle, HandleOwner
from gpulease.client.numbers import whole
from gpulease.client.texts import quoted
from gpulease.protocol import Opcode
from gpulease.protocol.codec import build_body
from gpulease.protocol.counts import counted
from gpulease.protocol.limits import MAX_REGIONS
from gpulease.protocol.messages import RegionRef
from gpulease.protocol.messages import RegionSet as RegionSetBody
from gpulease.protocol.opcodes import SessionOption


class RegionSet(Handle):
    """A set of regions that launches use; made by `session.region_set`, freed when its last reference is dropped.

    A launch that names it starts only if none of its regions has ended or is cancelled.

    Attributes:
        regions: The regions.
        epoch: The epoch of the session's words at which all of them were active; -1 if none is known.
    """

    __slots__ = ("epoch", "regions")

    _free_op = Opcode.REGION_SET_FREE

    def __init__(self, handle: int, regions: tuple[RegionView, ...]) -> None:
        super().__init__(None, handle)
        self.regions = regions
        self.epoch = -1

    def __repr__(self) -> str:
        return f"<RegionSet {self.handle} of {counted(len(self.regions), 'region')}{'' if self.is_alive else ', gone'}>"


class RegionSets:
    """Makes the region sets of one session, which launches name."""

    def __init__(self, operations: RequestPipeline) -> None:
        self._operations = operations
        self._attachment = operations.attachment

    @property
    def granule_bytes(self) -> int:
        """Sizes of regions are multiples of this many bytes; 0 if the session's worker has no regions."""
        value = self._attachment.option_value(SessionOption.REGIONS)
        # A daemon of another version may send an option of another length. Treat it as a daemon without regions.
        return int.from_bytes(value) if value is not None and len(value) == 4 else 0

    def make(self, regions: Iterable[RegionView]) -> Procedure[RegionSet]:
        """Make a set of regions.

        Raises Unsupported, InvalidHandle, or InvalidRequest (also while the session records).
        """
        self._operations.check_recording("region_set")
        if not isinstance(regions, Iterable):
            raise InvalidRequest(f"region_set: the argument must be several regions, not {quoted(regions)}")
        # Drop repeated regions, and keep the order.
        listed = list(regions)
        for region in listed:
            if not isinstance(region, RegionView):
                raise InvalidHandle(f"region_set: the regions must be Region objects, not {quoted(region)}")
        return self._make(tuple(dict.fromkeys(listed)))

    def _make(self, regions: tuple[RegionView, ...]) -> Procedure[RegionSet]:
        if not self.granule_bytes:
            raise Unsupported(
                "region_set: this session can't have regions",
                "Its daemon is too old for them, or its driver can't unmap memory: acquire a lease on another node",
            )
        if not 1 <= len(regions) <= MAX_REGIONS:
            raise InvalidRequest(f"region_set: a set must have 1 to {MAX_REGIONS} regions, not {len(regions)}")
        # Check the regions here, because the error of a launch with the set could not say which region is wrong.
        for region in regions:
            region.check(self._attachment, "region_set")
        named = RegionSetBody(tuple(RegionRef(region._state.slot, region._state.number) for region in regions))
        making = self._operations.make(
            Opcode.REGION_SET, build_body(named), Opcode.REGION_SET_FREE, lambda reply: RegionSet(reply.handle, regions)
        )
        return (yield from self._operations.do("region_set", making))


def regions_named(regions: RegionSet, position: int, session: HandleOwner, subject: str) -> tuple[int, int]:
    """Return the handle of a launch's region set, and the launch's position, as its frame carries them.

    Args:
        regions: The set.
        position: The launch's argument `position`.
        session: The session's connection, to which the set must belong.
        subject: The operation, for messages.

    Raises InvalidHandle or InvalidRequest.
    """
    if not isinstance(regions, RegionSet):
        raise InvalidHandle(
            f"{subject}: regions must be a RegionSet, not {quoted(regions)}", "Make one with session.region_set([...])"
        )
    if regions.owner is not session:
        regions.check(session, subject)
    return regions.handle, whole(position, f"{subject}: position", least=0, most=MAX_WIRE_BYTES)
