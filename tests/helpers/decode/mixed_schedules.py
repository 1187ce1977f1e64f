"""Random schedules: lines join and leave, in any pool and any blocks, in chunks of any size, with rows in any order."""

from collections.abc import Sequence
from dataclasses import dataclass
from random import Random
from typing import Final

from hypothesis import strategies as st

from gpulease.client.decode.row_records import PAGE
from helpers.decode.engine_rig import BLOCKS, TENANTS, Line, MixedStep, Seat

MAX_STEPS: Final = 5
MAX_JOINS: Final = 3
"""Maximum number of lines that join before one step."""


@dataclass(eq=False)
class _Live:
    seat: Seat
    length: int
    next: int = 0


class _House:
    """The used and the free block tables and blocks during a schedule."""

    def __init__(self, tables: int, random: Random) -> None:
        self._random = random
        self._tables = list(range(tables))
        self._blocks = [list(range(BLOCKS)) for _ in TENANTS]
        self.live: list[_Live] = []

    def join(self, line: int, length: int, tenant: int) -> None:
        needed, free = -(-length // PAGE), self._blocks[tenant]
        if not self._tables or needed > len(free):
            return
        self._random.shuffle(free)
        table = self._tables.pop(self._random.randrange(len(self._tables)))
        blocks = tuple(free.pop() for _ in range(needed))
        self.live.append(_Live(Seat(line, tenant, table, blocks), length))

    def leave(self, live: _Live) -> None:
        self.live.remove(live)
        self._tables.append(live.seat.table)
        self._blocks[live.seat.tenant] += live.seat.blocks


@st.composite
def schedules(draw: st.DrawFn, lines: Sequence[Line], tables: int, max_rows: int, max_chunk: int) -> list[MixedStep]:
    """Draw a schedule of at most MAX_STEPS steps.

    A step has at most `max_rows` rows, and at most `max_chunk` of a line.
    """
    random = draw(st.randoms(use_true_random=False))
    house, steps = _House(tables, random), []
    for _ in range(draw(st.integers(1, MAX_STEPS))):
        for live in [live for live in house.live if live.next == live.length or draw(st.booleans())]:
            house.leave(live)
        for line in draw(st.lists(st.integers(0, len(lines) - 1), min_size=not house.live, max_size=MAX_JOINS)):
            house.join(line, len(lines[line]), draw(st.integers(0, len(TENANTS) - 1)))
        rows: list[tuple[Seat, int]] = []
        for live in house.live:
            most = min(max_chunk, live.length - live.next, max_rows - len(rows))
            count = draw(st.integers(min(1, most), most))
            rows += [(live.seat, live.next + number) for number in range(count)]
            live.next += count
        random.shuffle(rows)
        steps.append(MixedStep(tuple(rows), draw(st.booleans())))
    return steps
