"""LAUNCH_WITH: attributes reach the driver, regions are looked at, and what makes no sense is refused."""

from collections.abc import Iterator
from dataclasses import fields
from typing import Any

import pytest

from gpulease.daemon.drivers.interface import DriverLaunchAttributes
from gpulease.protocol.messages import LaunchWith
from gpulease.protocol.opcodes import Opcode, Status
from gpulease.protocol.session_words import RegionWord
from helpers.region_rig import RegionRig, quiet_in, region_rig

NONE = (0, 0, 0)


@pytest.fixture(name="made")
def _made() -> Iterator[RegionRig]:
    with region_rig(is_native=True) as made:
        yield made


@pytest.fixture(name="asked")
def _asked(made: RegionRig, monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    asked: list[tuple[Any, ...]] = []
    monkeypatch.setattr(made.context, "launch_with", lambda *args: asked.append(args), raising=False)
    return asked


def launch_with(
    made: RegionRig, region_set: int = 0, cluster: tuple[int, int, int] = NONE, flags: int = 1
) -> LaunchWith:
    plain = made.launch(region_set, 4096, grid_x=4)
    x, y, z = cluster
    return LaunchWith(*(getattr(plain, item.name) for item in fields(plain)), flags, x, y, z)  # type: ignore[call-arg]


def test_attributes_reach_the_driver(made: RegionRig, asked: list[tuple[Any, ...]]) -> None:
    chosen = made.set_of(made.open())
    made.ask(Opcode.LAUNCH_WITH, launch_with(made))
    made.ask(Opcode.LAUNCH_WITH, launch_with(made, chosen, (2, 1, 1), flags=0))
    assert [args[-1] for args in asked] == [
        DriverLaunchAttributes(True, None),
        DriverLaunchAttributes(False, (2, 1, 1)),
    ]
    assert {(args[0].name, args[1]) for args in asked} == {("scale", (4, 1, 1))}


def test_no_launch_is_expected_behind_it(made: RegionRig, asked: list[tuple[Any, ...]]) -> None:
    one = made.open()
    chosen = made.set_of(one)
    made.feed(quiet_in(made.launch(chosen, one.address), 1) * 2)
    expected = made.session._planner.expected
    made.ask(Opcode.LAUNCH_WITH, launch_with(made))
    assert made.session._planner.expected is expected
    assert len(asked) == 1


def test_a_region_that_ended_refuses_it(made: RegionRig, asked: list[tuple[Any, ...]]) -> None:
    one = made.open()
    chosen = made.set_of(one)
    made.flip(one, RegionWord.REVOKED)
    assert made.refused(Opcode.LAUNCH_WITH, launch_with(made, chosen)).status is Status.REVOKED
    assert not asked


@pytest.mark.parametrize(
    ("cluster", "flags", "said"),
    [
        (NONE, 2, "0x2 has flags"),
        ((2, 0, 1), 0, "must be a multiple"),
        ((3, 1, 1), 0, "must be a multiple"),
        ((1, 2, 1), 1, "must be a multiple"),
    ],
)
def test_what_makes_no_sense(
    made: RegionRig, asked: list[tuple[Any, ...]], cluster: tuple[int, int, int], flags: int, said: str
) -> None:
    failure = made.refused(Opcode.LAUNCH_WITH, launch_with(made, cluster=cluster, flags=flags))
    assert failure.status is Status.LAUNCH_FAILED
    assert said in failure.message
    assert not asked
