"""Measures the benefit of a shared prefix: the time to the first token after it, and how many sequences fit a region.

    PYTHONPATH=.dev python -m tests.lab.prefix_times [MODEL | SHAPE [PREFIX [BLOCKS]]]

PREFIX is a number of tokens, BLOCKS the size of the region. Uses the running daemon, or a private one. Measures a
decoder that reuses prefixes and one that does not, and compares their tokens. Prints one JSON object per figure.
"""

import asyncio
import contextlib
import random
import sys
import time
from collections.abc import Sequence
from typing import Any, Final

from gpulease.client.bench.decode_service import checkpoint_named
from gpulease.client.bench.figures import percentile, print_figures
from gpulease.client.console.private_daemon import private_daemon, running_address
from gpulease.client.decode import TINY_MODEL, Checkpoint, Decoder, DecoderSettings, SamplingParameters, TenantConfig
from gpulease.client.decode.row_records import PAGE

PREFIX: Final = 192
BLOCKS: Final = 60
"""Default number of the region's blocks: enough for three sequences with the default prefix, if they share none."""

ROUNDS: Final = 5
OWN_TOKENS: Final = 16
"""Number of tokens of each prompt after the prefix."""

ANSWER: Final = 32
SEQUENCES: Final = 64
PREFILL_ROWS: Final = 512

_SAMPLING: Final = SamplingParameters(temperature=0.8, seed=7)


def _settings(prefix: int, *, reuses: bool) -> DecoderSettings:
    positions = prefix + OWN_TOKENS + ANSWER
    rows = min(PREFILL_ROWS, positions)
    return DecoderSettings(rows + SEQUENCES, rows, SEQUENCES, positions, reuses_prefixes=reuses)


async def measure(
    address: str, checkpoint: Checkpoint, prefix: int, blocks: int, rounds: int = ROUNDS, sequences: int = SEQUENCES
) -> list[dict[str, Any]]:
    """Return the figures of a decoder that reuses prefixes, and of one that does not.

    Raises the errors of `Decoder.open`.
    """
    figures = []
    outputs: dict[bool, list[list[int]]] = {}
    for reuses in (False, True):
        tenants = [TenantConfig("bench", SEQUENCES, blocks, max_waiting=sequences)]
        settings = _settings(prefix, reuses=reuses)
        async with Decoder.open(checkpoint, tenants, settings, address=address) as decoder:
            load = _PrefixLoad(decoder, prefix)
            figures.append(await load.first_tokens(rounds) | {"reuses_prefixes": reuses})
            figures.append(await load.at_once(sequences) | {"reuses_prefixes": reuses})
            outputs[reuses] = load.outputs
    # Reuse of prefixes must not change the tokens.
    wrong = sum(one != other for one, other in zip(outputs[False], outputs[True], strict=True))
    return [*figures, {"figure": "outputs", "compared": len(outputs[True]), "wrong": wrong}]


class _PrefixLoad:
    """Requests with a common prefix.

    Attributes:
        outputs: The tokens of each request.
    """

    def __init__(self, decoder: Decoder, prefix: int) -> None:
        self.outputs: list[list[int]] = []
        self._decoder, self._prefix = decoder, prefix
        self._vocabulary = decoder.scheduler.settings.vocabulary

    def _prompt(self, text: int, unique: int) -> list[int]:
        def tokens(seed: int, count: int) -> list[int]:
            numbers = random.Random(seed)
            return [numbers.randrange(3, self._vocabulary) for _ in range(count)]

        return tokens(text, self._prefix) + tokens(1000 + unique, OWN_TOKENS)

    async def _read(self, prompt: Sequence[int]) -> float:
        """Compute an answer. Returns the seconds to its first token."""
        begin_s = time.perf_counter()
        generation = self._decoder.submit(prompt, max_tokens=ANSWER, tenant_id="bench", sampling=_SAMPLING)
        await anext(generation)
        took_s = time.perf_counter() - begin_s
        async for _ in generation:
            pass
        self.outputs.append(generation.tokens)
        return took_s

    async def first_tokens(self, rounds: int) -> dict[str, Any]:
        """Time the first token after a new prefix, and after a prefix that an earlier sequence had."""
        new, reused = [], []
        await self._read(self._prompt(0, 0))
        for text in range(1, rounds + 1):
            new.append(await self._read(self._prompt(text, 1)))
            reused.append(await self._read(self._prompt(text, 2)))
        return {
            "figure": "first token",
            "prefix": self._prefix,
            "new_ms": percentile(new, 50) * 1e3,
            "again_ms": percentile(reused, 50) * 1e3,
        }

    async def at_once(self, sequences: int) -> dict[str, Any]:
        """Count the sequences that live at the same time in the region, out of `sequences` with one prefix."""
        tenant = self._decoder.scheduler.tenants["bench"]
        begin_s = time.perf_counter()
        # Compute the prefix once in advance, as in a server. Without reuse this has no effect.
        await self._read(self._prompt(0, 0))
        tasks = [asyncio.create_task(self._read(self._prompt(0, unique))) for unique in range(1, sequences + 1)]
        peak = 0
        while not all(task.done() for task in tasks):
            peak = max(peak, len(tenant.live))
            await asyncio.sleep(0)
        await asyncio.gather(*tasks)
        # The answers ended in any order. Sort them, so that those of two decoders can be compared.
        self.outputs[-sequences:] = sorted(self.outputs[-sequences:])
        return {
            "figure": "at once",
            "prefix": self._prefix,
            "blocks": tenant.region_blocks,
            "sequences": peak,
            "reserved_before": tenant.region_blocks // -(-(self._prefix + OWN_TOKENS + ANSWER - 1) // PAGE),
            "took_s": time.perf_counter() - begin_s,
        }


def main(words: Sequence[str]) -> None:
    """Measure what the command line names (see the module's docstring)."""
    chosen, prefix, blocks = (*words[:3], *(str(TINY_MODEL), str(PREFIX), str(BLOCKS))[len(words) :])
    with contextlib.ExitStack() as stack:
        address = running_address() or stack.enter_context(private_daemon("auto"))
        for figures in asyncio.run(measure(address, checkpoint_named(chosen), int(prefix), int(blocks))):
            print_figures(figures)


if __name__ == "__main__":
    main(sys.argv[1:])
