"""The decode engine as a scorer, to be compared with references: it computes prompts in chunks, and decodes several
sequences together.
"""

from collections.abc import Sequence

import numpy as np

from gpulease.client.decode.row_records import PAGE, Rows
from helpers.decode.agreement import Logits
from helpers.decode.engine_rig import BLOCKS, GREEDY, EngineRig, RunningRig, Seat


class EngineScorer:
    """An engine's model. Each sequence uses its own blocks of the rig's first pool."""

    def __init__(self, running: RunningRig) -> None:
        self._running = running

    def logits(self, token_ids: list[int]) -> Logits:
        """Return the logits [tokens, vocabulary] of every position.

        Each step has as many rows as the engine accepts.
        """

        async def part(rig: EngineRig) -> Logits:
            return np.concatenate(await _prefilled(rig, rig.seat(), token_ids))

        return self._running.run(part)

    def greedy(self, prompts: list[list[int]], count: int) -> list[list[int]]:
        """Return the `count` likeliest next tokens of each prompt.

        Decodes as many sequences together as the pool has room for.
        """
        limits = self._running.rig.engine.forward.limits
        blocks = -(-(max(map(len, prompts)) + count) // PAGE)
        lanes = min(limits.max_rows, limits.tables, BLOCKS // blocks)
        seats = [Seat(0, 0, lane, tuple(range(lane * blocks, (lane + 1) * blocks))) for lane in range(lanes)]
        outputs: list[list[int]] = []
        for first in range(0, len(prompts), lanes):
            together = prompts[first : first + lanes]

            async def part(rig: EngineRig, together: list[list[int]] = together) -> list[list[int]]:
                return await _decoded(rig, seats, together, count)

            outputs += self._running.run(part)
        return outputs


def _rows(rig: EngineRig, places: Sequence[tuple[Seat, int, int]]) -> Rows:
    rows: Rows = np.concatenate([rig.row(seat, GREEDY, position, token) for seat, position, token in places])
    return rows


async def _prefilled(rig: EngineRig, seat: Seat, token_ids: list[int]) -> list[Logits]:
    """Compute a prompt from its beginning. Returns the logits of each step's rows."""
    found: list[Logits] = []
    most = rig.engine.forward.limits.max_rows
    places = [(seat, position, token) for position, token in enumerate(token_ids)]
    for first in range(0, len(places), most):
        rows = _rows(rig, places[first : first + most])
        await rig.compute(rows)
        found.append(await rig.engine.logits(len(rows)))
    return found


async def _decoded(rig: EngineRig, seats: list[Seat], prompts: list[list[int]], count: int) -> list[list[int]]:
    """Compute all but each prompt's last token, then decode the prompts together, with a row for each in a step."""
    sequences = [list(prompt) for prompt in prompts]
    for seat, prompt in zip(seats, prompts, strict=False):
        await _prefilled(rig, seat, prompt[:-1])
    for _ in range(count):
        places = [(seat, len(tokens) - 1, tokens[-1]) for seat, tokens in zip(seats, sequences, strict=False)]
        results = await rig.compute(_rows(rig, places))
        for tokens, token in zip(sequences, results["token"], strict=True):
            tokens.append(int(token))
    return [tokens[len(prompt) :] for tokens, prompt in zip(sequences, prompts, strict=True)]
