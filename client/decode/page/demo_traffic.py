"""The demonstration's own requests: one sequence per tenant, so that the page has something to show."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from gpulease.client.decode.decode_errors import EngineDecodeFailed, NoModelLoaded
from gpulease.client.decode.decode_requests import SamplingParameters
from gpulease.client.decode.row_records import PAGE
from gpulease.client.decode.supervisor.decoder import Decoder
from gpulease.client.errors import GpuLeaseError

PROMPTS: Final = (
    "The import statement ",
    "A class definition ",
    "Changed in version ",
    "The with statement ",
    "A generator expression ",
    "Operator precedence ",
)
"""Beginnings in the style of Python's help, on which the tiny model was trained."""

MAX_TOKENS: Final = 160
"""Maximum number of tokens of one text."""

PAUSE_S: Final = 0.5
"""Seconds of pause between two texts of a tenant."""

RETRY_S: Final = 2.0
"""Seconds before a retry after a request that failed, for example while the tenant's region can't be rebuilt."""

TAIL_CHARACTERS: Final = 600
"""Maximum number of characters of a text that are kept, and so shown on the page."""

SAMPLING: Final = SamplingParameters(temperature=0.8, top_p=0.95)


@dataclass(slots=True)
class DemoText:
    """A text that is being generated.

    Attributes:
        text: Its last `TAIL_CHARACTERS` characters, including the prompt.
        replays: How often it was replayed.
    """

    text: str
    replays: int = 0


class DemoTraffic:
    """Keeps each tenant generating. Run `run` as a task, and cancel the task to stop.

    Attributes:
        texts: The latest text of each tenant, by its id.
    """

    def __init__(self, decoder: Decoder, tenants: Sequence[str]) -> None:
        self.texts: dict[str, DemoText] = {}
        self._decoder, self._tenants = decoder, tuple(tenants)

    async def run(self) -> None:
        """Generate until this is cancelled, or the decoder has ended."""
        async with asyncio.TaskGroup() as group:
            for number, tenant_id in enumerate(self._tenants):
                group.create_task(self._keep_generating(tenant_id, number))

    async def _keep_generating(self, tenant_id: str, number: int) -> None:
        """Generate one text after another, each with a prompt that no other tenant uses at that time."""
        while True:
            try:
                await self._generate(tenant_id, PROMPTS[number % len(PROMPTS)], number)
                await asyncio.sleep(PAUSE_S)
            # The decoder has ended, so no further request can succeed.
            except (NoModelLoaded, EngineDecodeFailed):
                return
            except GpuLeaseError:
                await asyncio.sleep(RETRY_S)
            # This changes the seed, too, so that texts differ.
            number += len(self._tenants) + 1

    async def _generate(self, tenant_id: str, prompt: str, seed: int) -> None:
        tokenizer = await self._decoder.tokenizer()
        tokens = tokenizer.encode(prompt)
        scheduler = self._decoder.scheduler
        # A tenant's region may be smaller than the context.
        room = min(scheduler.settings.context, PAGE * scheduler.tenants[tenant_id].config.max_blocks)
        sampling = SamplingParameters(SAMPLING.temperature, SAMPLING.top_p, seed=seed)
        max_tokens = max(1, min(MAX_TOKENS, room - len(tokens)))
        generation = self._decoder.submit(tokens, max_tokens=max_tokens, sampling=sampling, tenant_id=tenant_id)
        shown = self.texts[tenant_id] = DemoText(prompt)
        stream = tokenizer.stream()
        try:
            async for emitted in generation:
                shown.text = (shown.text + stream.add(emitted.token))[-TAIL_CHARACTERS:]
                shown.replays = generation.replays
        finally:
            generation.cancel()
