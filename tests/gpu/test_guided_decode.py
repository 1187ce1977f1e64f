"""Guided decoding: a card's tokens, scores and likeliest tokens equal the embedded driver's, bit for bit."""

import asyncio

import pytest

from gpulease.client.decode import (
    TINY_MODEL,
    Decoder,
    DecoderSettings,
    Emitted,
    Generation,
    SamplingParameters,
    open_model,
)
from gpulease.client.decode.checkpoint import Checkpoint, RandomCheckpoint
from gpulease.client.decode.model_config import ModelConfig
from helpers.daemon import Daemon
from helpers.decode.random_models import HEAD_NORMS

pytestmark = pytest.mark.gpu

SETTINGS = DecoderSettings(max_rows=16, prefill_rows=16, max_sequences=8, positions=64)
SAMPLINGS = (
    SamplingParameters(),
    SamplingParameters(temperature=0.8, seed=3, repetition_penalty=1.3, presence_penalty=0.5, frequency_penalty=0.7),
    SamplingParameters(temperature=1.0, seed=4, min_p=0.05, logit_bias=((7, 4.0), (30, -100.0)), min_tokens=4),
    SamplingParameters(temperature=0.9, top_p=0.9, top_k=30, seed=5, frequency_penalty=2.0),
)


async def outputs(address: str, checkpoint: Checkpoint) -> list[list[Emitted]]:
    """Return the outputs of all samplings, computed together: the scores of the prompt, then the emitted tokens."""
    async with Decoder.open(checkpoint, settings=SETTINGS, address=address) as decoder:
        generations = [
            decoder.submit(range(3, 20 + number), max_tokens=16, sampling=sampling, ranks=20, scores_prompt=True)
            for number, sampling in enumerate(SAMPLINGS)
        ]
        tokens = await asyncio.gather(*map(_read, generations))
        return [generation.prompt_scores + its for generation, its in zip(generations, tokens, strict=True)]


async def _read(generation: Generation) -> list[Emitted]:
    return [emitted async for emitted in generation]


@pytest.mark.parametrize("config", [None, HEAD_NORMS], ids=["tiny", "heads 128 wide"])
def test_guided_tokens_and_scores_are_the_embedded_driver_s(
    daemon: Daemon, shared_daemon: Daemon, config: ModelConfig | None
) -> None:
    checkpoint = open_model(TINY_MODEL) if config is None else RandomCheckpoint(HEAD_NORMS, 1)
    card, embedded = (asyncio.run(outputs(one.address, checkpoint)) for one in (daemon, shared_daemon))
    assert card == embedded
    assert all(len(its) == 16 + number + 16 for number, its in enumerate(card))
