"""A launch behind a free that was interrupted before or after its frame was queued; a lock that was tested."""

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from gpulease.client import KernelArgs
from gpulease.client.core.waits import is_held
from gpulease.protocol import Opcode
from helpers.client_faces import Face, Scenario
from helpers.interrupt_points import InterruptPoints
from helpers.scripted_peer import ScriptedPeer

Run = Callable[[Scenario], None]


class Interrupted(BaseException):
    """What the interrupted call raises."""


@pytest.mark.parametrize("is_queued", [False, True])
@pytest.mark.parametrize("is_first", [False, True], ids=["a launch like the last", "the first launch"])
def test_an_interrupted_free_is_sent_once_though_a_launch_comes_first(
    run_over_both: Run, peer: ScriptedPeer, monkeypatch: pytest.MonkeyPatch, is_queued: bool, is_first: bool
) -> None:
    async def scenario(face: Face) -> None:
        async with face.session() as session:
            real = getattr(session, "target", session)
            attachment = real._session.attachment
            # Freed buffers of this size would be kept for the next allocation.
            monkeypatch.setattr(type(attachment.held), "hold", lambda *_: False)
            module = await session.module_load(b"ptx")
            buffer = await session.mem_alloc(4096)
            if not is_first:
                await session.launch(module, "nothing", [1], [1], KernelArgs())
            await session.sync()
            put = attachment.writer.put_whole

            class Interrupting:
                """The writer, interrupted once, at a free."""

                def __getattr__(self, name: str) -> Any:
                    return getattr(writer, name)

                def put_whole(self, *parts: bytes) -> bool:
                    attachment.writer = writer
                    if is_queued:
                        put(*parts)
                    raise Interrupted

            writer = attachment.writer
            attachment.writer = Interrupting()
            with pytest.raises(Interrupted):
                await session.mem_free(buffer)
            await session.launch(module, "nothing", [1], [1], KernelArgs())
            await session.sync()
            assert not attachment.dropped

    run_over_both(scenario)
    assert peer.ops().count(Opcode.MEM_FREE.name) == 1


def test_an_interrupt_while_a_lock_is_tested_leaves_it_free() -> None:
    """Otherwise no other thread could use the session any more, nor give back what an interrupted call has made."""
    lock, met = threading.RLock(), 0
    with ThreadPoolExecutor(1) as pool:
        for point in InterruptPoints().walk(lambda: is_held(lock), lambda _: None):
            met += 1
            assert pool.submit(lock.acquire, blocking=False).result(), str(point)
            pool.submit(lock.release).result()
    assert met
