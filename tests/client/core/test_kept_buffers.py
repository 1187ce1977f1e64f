"""Buffers that a lease keeps, as both APIs ask for them of a scripted daemon."""

from collections.abc import Callable
from typing import Any

import pytest

from gpulease.client import InvalidHandle, Unsupported
from helpers.client_faces import Face, Scenario
from helpers.scripted_peer import ScriptedPeer

Run = Callable[[Scenario], None]


def test_a_kept_buffer_is_freed_by_mem_free_alone(run: Run, peer: ScriptedPeer) -> None:
    peer.owns_memory = True

    async def scenario(face: Face) -> None:
        async with face.session() as session:
            assert session.owns_memory
            buffer = await session.mem_alloc(16)
            handle = buffer.handle
            await session.keep(buffer, "it")
            del buffer
            await session.sync()
            assert peer.kept == {"it": handle}
            found = await session.kept("it")
            assert (found.handle, found.size_bytes) == (handle, 16)
            await session.mem_free(found)
            await session.sync()
            assert handle not in peer.memory

    run(scenario)


def test_a_taken_buffer_is_freed_with_its_last_reference(run: Run, peer: ScriptedPeer) -> None:
    peer.owns_memory = True

    async def scenario(face: Face) -> None:
        async with face.session() as session:
            buffer = await session.mem_alloc(16)
            handle = buffer.handle
            await session.keep(buffer, "it")
            with pytest.raises(InvalidHandle, match=r"no buffer with the name 'that'\. It keeps: 'it'"):
                await session.take("that")
            taken = await session.take("it")
            assert (taken.handle, taken.size_bytes, peer.kept) == (handle, 16, {})
            del taken
            await session.sync()
            assert handle not in peer.memory

    run(scenario)


def test_an_older_daemon_keeps_nothing_by_name(run: Run, peer: ScriptedPeer) -> None:
    async def scenario(face: Face) -> None:
        async with face.session() as session:
            buffer = await session.mem_alloc(16)
            assert not session.owns_memory
            asks: tuple[Callable[[], Any], ...] = (
                lambda: session.keep(buffer, "it"),
                lambda: session.kept("it"),
                lambda: session.kept_names(),
                lambda: session.take("it"),
                lambda: session.reset(),
            )
            for ask in asks:
                with pytest.raises(Unsupported, match="the session's daemon is too old for it"):
                    await ask()

    run(scenario)
