"""Images of sessions: each is written in the lowest version that has all of it, and read in every known one."""

import msgpack
import pytest

from gpulease.daemon.contract.session_image import (
    IMAGE_VERSIONS,
    UNHELD,
    AllocationState,
    ConnectionState,
    GraphState,
    ModuleState,
    RegionImage,
    RegionSetState,
    RegionStates,
    RingState,
    SessionImage,
    UnreadableImage,
)

EVENTS = ((3, 1_700_000_000_000_000_000), (4, 1_700_000_000_000_000_700))


def image(unread: bytes = b"", events: tuple[tuple[int, int], ...] = ()) -> SessionImage:
    ring = RingState(1, 2, 3, 4)
    return SessionImage(
        lease_id=(1 << 127) + 5,
        number=7,
        driver=("cpu", 86, 12040),
        context=b"context",
        moved_bytes=9,
        modules=(ModuleState(1, b"ptx", (1, 2), 2, ((4096, 8),)),),
        last_module=1,
        allocations=(AllocationState(4096, 8, UNHELD),),
        kept=(("weights", 4096),),
        graphs=(GraphState(1, b"graph", 2),),
        last_graph=1,
        last_stream=2,
        connections=(
            ConnectionState(11, True, (1, 2), 2, ring, False, unread, events),
            ConnectionState(0, False, (), 0, None, True),
        ),
        arena_bytes=4096,
        printed=(b"text", False),
        counters=((1, 2),),
        kept_bytes=16,
    )


REGIONS = RegionStates(
    (
        RegionImage(bytes(15) + b"\1", 0, 5, 1 << 40, 4096, 0, None, False, False, False),
        RegionImage(bytes(15) + b"\2", 1, 6, 1 << 41, 4096, 64, (3, 1_700), True, True, True),
    ),
    (RegionSetState(1, (0, 1, 0), 2),),
    4,
    17,
)


CODED = (ModuleState(1, b"ptx", (1, 2), 2, ((4096, 8),), b"code"), ModuleState(2, b"ptx", (), 2, ()))


@pytest.mark.parametrize(
    ("made", "version"),
    [
        (image(), 1),
        (image(b"a request"), 2),
        (image(events=EVENTS), 2),
        (image(events=EVENTS)._replace(regions=REGIONS), 3),
        (image()._replace(regions=REGIONS), 3),
        (image()._replace(modules=CODED), 4),
        (image(b"a request")._replace(modules=CODED, regions=REGIONS), 4),
    ],
)
def test_an_image_is_written_in_the_lowest_version_that_has_all_of_it(made: SessionImage, version: int) -> None:
    data = made.to_bytes()
    assert (made.version, msgpack.unpackb(data)[0]) == (version, version)
    assert SessionImage.from_bytes(data) == made


def test_the_first_version_has_what_its_readers_know() -> None:
    data = msgpack.unpackb(image().to_bytes())
    connections = data[1 + SessionImage._fields.index("connections")]
    # The lease's id is first and last, and nothing has regions.
    assert len(data) == 1 + len(SessionImage._fields)
    assert [len(one) for one in connections] == [6, 6]
    assert [len(one) for one in data[1 + SessionImage._fields.index("modules")]] == [5]


def test_an_image_of_an_unknown_version_is_refused() -> None:
    unknown = max(IMAGE_VERSIONS) + 1
    data = msgpack.packb([unknown, *msgpack.unpackb(image().to_bytes())[1:]])
    with pytest.raises(UnreadableImage, match=f"at most {unknown - 1}, not {unknown}"):
        SessionImage.from_bytes(data)
