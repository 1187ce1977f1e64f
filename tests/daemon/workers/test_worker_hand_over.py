"""Messages to a worker about a connection that is handed to it."""

import asyncio
import contextlib
import socket
from typing import cast

import pytest

from gpulease.daemon.contract.control_page import state_of
from gpulease.daemon.contract.messages import AttachOrder
from gpulease.daemon.contract.worker_spec import WorkerSpec
from gpulease.daemon.host.ipc import close_all, receive_message
from gpulease.daemon.leases.model import FIRST_WARM_ID
from gpulease.daemon.workers.worker import Worker
from gpulease.daemon.workers.zygote_client import ZygoteClient


@pytest.mark.parametrize("told", [None, True, False])
def test_whether_it_is_a_strangers(told: bool | None) -> None:
    """Who nobody said anything of is one."""

    async def story() -> None:
        worker, theirs = Worker.create(WorkerSpec(FIRST_WARM_ID, "GPU-a", 0, is_shared=False), cast(ZygoteClient, None))
        if told is not None:
            worker.is_stranger = told
        near, far = socket.socketpair()
        with near, far, theirs:
            assert worker.hand_over(near.fileno(), AttachOrder(1, b"", ring=False, arena_bytes=0))
            message, fds = receive_message(theirs)
            close_all(fds)
        assert message["is_stranger"] is (told is not False)
        worker.close()

    asyncio.run(story())


def test_a_session_counts_as_opened_before_its_worker_hears_of_the_connection() -> None:
    async def story() -> None:
        worker, theirs = Worker.create(WorkerSpec(1, "GPU-a", 1, is_shared=False), cast(ZygoteClient, None))
        near, far = socket.socketpair()
        with near, far:
            assert not state_of(worker.page.fds.lease).has_session
            theirs.close()
            assert not worker.hand_over(near.fileno(), AttachOrder(1, b"", ring=False, arena_bytes=0))
            assert state_of(worker.page.fds.lease).has_session
        worker.close()

    asyncio.run(story())


@pytest.mark.parametrize("asks", [True, False])
def test_a_page_of_words_is_made_in_advance_unless_the_last_connection_asked_for_none(asks: bool) -> None:
    async def story() -> None:
        worker, theirs = Worker.create(WorkerSpec(1, "GPU-a", 1, is_shared=False), cast(ZygoteClient, None))
        near, far = socket.socketpair()
        with near, far, theirs:
            # The first client of a worker is expected to ask for the words.
            worker._send_lease(worker.spec)
            assert worker.regions is not None
            # After a scrub, the worker gets the next lease of the same tenant.
            assert worker.hand_over(near.fileno(), AttachOrder(1, b"", ring=False, arena_bytes=0, words=asks))
            worker.close_regions()
            worker._send_lease(worker.spec)
            assert (worker.regions is not None) is asks
            # A client that asks after all gets the page with its connection.
            assert worker.hand_over(near.fileno(), AttachOrder(2, b"", ring=False, arena_bytes=0, words=True))
            assert worker.regions is not None
            theirs.setblocking(False)
            with contextlib.suppress(BlockingIOError):
                while True:
                    close_all(receive_message(theirs)[1])
        worker.close()

    asyncio.run(story())
