"""`Decoder.generate`: texts continued by the tiny model."""

import asyncio
from contextlib import aclosing
from dataclasses import replace
from pathlib import Path

import pytest

from gpulease.client.decode import (
    TINY_MODEL,
    AdmissionReason,
    AdmissionRefused,
    Decoder,
    DecoderSettings,
    ModelRejected,
    RandomCheckpoint,
    RequestRejected,
    TenantConfig,
)
from gpulease.client.errors import InvalidRequest
from helpers.daemon import Daemon
from helpers.decode.random_models import TINY

PROMPT = "Changed in version"
SETTINGS = DecoderSettings(max_rows=16, prefill_rows=16, max_sequences=4, positions=64)


def test_pieces_are_the_tokens_text_whatever_becomes_of_the_region(daemon: Daemon) -> None:
    async def part() -> None:
        async with Decoder.open(TINY_MODEL, settings=SETTINGS, address=daemon.address) as decoder:
            tokenizer = await decoder.tokenizer()
            tokens = [each.token async for each in decoder.submit(tokenizer.encode(PROMPT), max_tokens=24)]
            quiet = tokenizer.decode(tokens)
            assert "".join([piece async for piece in decoder.generate(PROMPT, max_tokens=24)]) == quiet
            pieces: list[str] = []
            async for piece in decoder.generate(PROMPT, max_tokens=24):
                if not pieces:
                    (region,) = [lease for lease in daemon.leases() if lease.get("parent")]
                    await asyncio.to_thread(daemon.revoke, int(region["lease_id"], 16))
                pieces.append(piece)
            assert "".join(pieces) == quiet
            # However late the revocation came, this request meets it.
            assert "".join([piece async for piece in decoder.generate(PROMPT, max_tokens=24)]) == quiet
            assert decoder.rebinds == 1

    asyncio.run(part())


def test_closing_a_text_ends_its_sequence(daemon: Daemon) -> None:
    async def part() -> None:
        async with Decoder.open(TINY_MODEL, settings=SETTINGS, address=daemon.address) as decoder:
            async with aclosing(decoder.generate(PROMPT, max_tokens=40)) as text:
                await anext(text)
                assert decoder.scheduler.live_sequences == 1
            assert decoder.scheduler.live_sequences == 0
            with pytest.raises(RequestRejected, match="context"):
                await anext(decoder.generate(PROMPT, max_tokens=1000))

    asyncio.run(part())


def test_a_text_is_its_tenant_s_while_it_is_read(daemon: Daemon) -> None:
    """A text counts against `max_waiting` before it has tokens, and a text that can't fit is never cut."""

    async def part() -> None:
        tenants = [TenantConfig("ann", 1, 4, max_waiting=1), TenantConfig("bob", 1, 4)]
        async with Decoder.open(TINY_MODEL, tenants, SETTINGS, address=daemon.address) as decoder:

            async def first(tenant: str, text: str = PROMPT) -> str:
                async with aclosing(decoder.generate(text, max_tokens=4, tenant_id=tenant)) as pieces:
                    return await anext(pieces)

            results = await asyncio.gather(*(first("ann") for _ in range(5)), first("bob"), return_exceptions=True)
            refused = [result for result in results if isinstance(result, AdmissionRefused)]
            assert [error.reason for error in refused] == [AdmissionReason.QUOTA_EXCEEDED] * 3
            assert results[0] == results[1] == results[-1] != ""
            with pytest.raises(AdmissionRefused, match="TooLarge"):
                await first("ann", "wörd import " * 300_000)

    asyncio.run(part())


def test_a_model_without_a_tokenizer_takes_no_texts(daemon: Daemon) -> None:
    async def part() -> None:
        async with Decoder.open(RandomCheckpoint(TINY, 1), settings=SETTINGS, address=daemon.address) as decoder:
            for _ in range(2):
                with pytest.raises(ModelRejected, match="no tokenizer"):
                    await anext(decoder.generate(PROMPT, max_tokens=1))

    asyncio.run(part())


def test_positions_beyond_the_model_s_context_are_refused_before_anything_is_acquired(tmp_path: Path) -> None:
    async def part() -> None:
        settings = replace(SETTINGS, positions=257)
        nobody = f"unix:{tmp_path / 'nobody'}"
        with pytest.raises(InvalidRequest, match="positions is 257; the model's own context has 256"):
            async with Decoder.open(TINY_MODEL, settings=settings, address=nobody):
                pass

    asyncio.run(part())
