"""Drawn programs of nested branches and loops with warp operations among the threads that take each path.

The model runs them in lockstep: all threads of a path do an operation together. Masks come from ballots, as in real
programs, so both must agree.
"""

import random
from collections.abc import Callable
from dataclasses import dataclass

import pytest

pytestmark = pytest.mark.exhaustive

RunBlock = Callable[..., list[list[int]]]
Values = dict[int, int]
Model = Callable[[Values, set[int]], None]

WORD = 2**32


def team(values: Values, active: set[int], thread: int) -> list[int]:
    """Who of a warp takes part with a thread."""
    return [other for other in sorted(active) if other // 32 == thread // 32]


def lanes(threads: list[int]) -> int:
    return sum(1 << thread % 32 for thread in threads)


def each(change: Callable[[Values, int, list[int]], int]) -> Model:
    """A model that gives each active thread a value made of what all had before."""

    def model(values: Values, active: set[int]) -> None:
        before = dict(values)
        for thread in active:
            values[thread] = change(before, thread, team(before, active, thread)) % WORD

    return model


@dataclass
class Programs:
    """Draws programs. %v is a thread's value, %m<n> the mask of those who take a path n deep."""

    draw: random.Random
    labels: int = 0

    def sequence(self, depth: int, level: int) -> tuple[str, Model]:
        """A few steps one after another."""
        steps = [self._step(depth, level) for _ in range(self.draw.randint(1, 3))]

        def model(values: Values, active: set[int]) -> None:
            for _, step in steps:
                step(values, active)

        return "".join(text for text, _ in steps), model

    def _step(self, depth: int, level: int) -> tuple[str, Model]:
        kinds: list[Callable[[int, int], tuple[str, Model]]] = [self._operation, self._operation]
        if depth:
            kinds += [self._choice, self._loop]
        return self.draw.choice(kinds)(depth, level)

    def _operation(self, depth: int, level: int) -> tuple[str, Model]:
        source = self.draw.randint(0, 31)
        table: list[tuple[str, Model]] = [
            (
                f"shfl.sync.idx.b32 %t, %v, {source}, 31, %m{level}; add.u32 %v, %v, %t;",
                each(lambda v, t, who: v[t] + (v[at] if (at := t - t % 32 + source) in who else 0)),
            ),
            (
                f"and.b32 %t, %v, 1; setp.ne.u32 %p, %t, 0; vote.sync.ballot.b32 %t, %p, %m{level};xor.b32 %v, %v, %t;",
                each(lambda v, t, who: v[t] ^ lanes([u for u in who if v[u] & 1])),
            ),
            (
                f"and.b32 %t, %v, 3; match.any.sync.b32 %t, %t, %m{level}; add.u32 %v, %v, %t;",
                each(lambda v, t, who: v[t] + lanes([u for u in who if v[u] & 3 == v[t] & 3])),
            ),
            (
                f"redux.sync.add.u32 %t, %v, %m{level}; xor.b32 %v, %v, %t;",
                each(lambda v, t, who: v[t] ^ sum(v[u] for u in who) % WORD),
            ),
            (f"mad.lo.u32 %v, %v, 5, {source};", each(lambda v, t, who: v[t] * 5 + source)),
            (f"bar.warp.sync %m{level};", each(lambda v, t, who: v[t])),
        ]
        return self.draw.choice(table)

    def _choice(self, depth: int, level: int) -> tuple[str, Model]:
        shift, label, inner = self.draw.randint(0, 7), self._label(), level + 1
        (then, then_model), (other, other_model) = (self.sequence(depth - 1, inner) for _ in range(2))
        text = f"""
        shr.u32 %t, %v, {shift}; and.b32 %t, %t, 1; setp.ne.u32 %p, %t, 0;
        vote.sync.ballot.b32 %m{inner}, %p, %m{level}; @%p bra THEN{label};
        not.b32 %m{inner}, %m{inner}; and.b32 %m{inner}, %m{inner}, %m{level}; {other} bra JOIN{label};
        THEN{label}: {then} JOIN{label}:
        """

        def model(values: Values, active: set[int]) -> None:
            taken = {thread for thread in active if values[thread] >> shift & 1}
            then_model(values, taken)
            other_model(values, active - taken)

        return text, model

    def _loop(self, depth: int, level: int) -> tuple[str, Model]:
        label, inner = self._label(), level + 1
        body, body_model = self.sequence(depth - 1, inner)
        text = f"""
        and.b32 %c{depth}, %v, 3; mov.u32 %m{inner}, %m{level};
        LOOP{label}: setp.ne.u32 %p, %c{depth}, 0; vote.sync.ballot.b32 %m{inner}, %p, %m{inner};
        @!%p bra DONE{label}; {body} sub.u32 %c{depth}, %c{depth}, 1; bra LOOP{label}; DONE{label}:
        """

        def model(values: Values, active: set[int]) -> None:
            turns = {thread: values[thread] & 3 for thread in active}
            for turn in range(3):
                body_model(values, {thread for thread in active if turns[thread] > turn})

        return text, model

    def _label(self) -> int:
        self.labels += 1
        return self.labels


@pytest.mark.parametrize("seed", range(24))
def test_drawn_programs(run_block: RunBlock, seed: int) -> None:
    draw = random.Random(seed)
    text, model = Programs(draw).sequence(3, 0)
    count = draw.choice([1, 7, 32, 45, 64, 96])
    start = [draw.getrandbits(32) for _ in range(count)]
    head = "{ .reg .b32 %v, %t, %m<5>, %c<4>; .reg .pred %p; mov.u32 %v, %b0; mov.u32 %m0, -1;"
    kept = run_block(f"{head} {text} cvt.u64.u32 %o0, %v; }}", [[value] for value in start])
    values = dict(enumerate(start))
    model(values, set(range(count)))
    assert [row[0] for row in kept] == [values[thread] for thread in range(count)]
