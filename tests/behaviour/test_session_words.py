"""After the lease's end, the client itself refuses operations, before it builds a frame."""

import asyncio
import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

from gpulease.client import (
    GpuLease,
    GpuLeaseError,
    GpuSession,
    GpuSessionFailed,
    KernelArgs,
    LeaseExpired,
    Revoked,
    aio,
)
from gpulease.protocol.framing import HEADER_BYTES
from gpulease.protocol.ring import CHECK_BYTES
from helpers.daemon import Daemon
from helpers.kernels import TRANSFORM
from helpers.region_scene import scene_of
from helpers.waiting import wait_until

MOST_QUIET = CHECK_BYTES // HEADER_BYTES + 1
"""Maximum number of quiet requests that a client sends to a worker that is gone."""


class Scene:
    """A session, and operations in it that need no reply."""

    def __init__(self, lease: GpuLease) -> None:
        self.session = session = GpuSession(lease)
        self.module, self.buffer, self.stream = session.module_load(TRANSFORM), session.mem_alloc(64), session.stream()
        self.args = KernelArgs().push_buffer(self.buffer).push_u32(1).push_f32(2.0)
        with session.record() as self.graph:
            self.launch()
        self.launch()
        session.sync()

    def launch(self) -> None:
        self.session.launch(self.module, "scale", [1], [1], self.args)

    def operations(self) -> dict[str, Callable[[], object]]:
        return {
            "launch": self.launch,
            "launch in a stream": lambda: self.session.launch(
                self.module, "scale", [1], [1], self.args, stream=self.stream
            ),
            "graph": self.graph.launch,
            "write": lambda: self.session.mem_write(self.buffer, 0, bytes(64)),
            "event": self.stream.event,
        }

    @property
    def last_request_id(self) -> int:
        return self.session._session.attachment.connection.last_request_id


@contextmanager
def without_a_frame(scene: Scene) -> Iterator[None]:
    before = scene.last_request_id
    yield
    assert scene.last_request_id == before


def test_behind_a_revocation_no_quiet_operation_makes_a_frame(daemon: Daemon) -> None:
    lease = daemon.builder().acquire()
    scene = Scene(lease)
    assert not lease.revoked
    daemon.revoke(lease.lease_id, "the card is needed")
    assert lease.revoked
    with without_a_frame(scene):
        for operation in scene.operations().values():
            with pytest.raises(Revoked, match="the lease was revoked: the card is needed"):
                operation()


def test_behind_an_expiry_no_quiet_operation_makes_a_frame(daemon: Daemon) -> None:
    lease, scene, _ = daemon.short_lease(Scene)
    wait_until(lambda: lease.revoked, "the word says that the lease has ended")
    with without_a_frame(scene):
        for operation in scene.operations().values():
            with pytest.raises(LeaseExpired):
                operation()


@pytest.mark.parametrize("name", ["launch", "launch in a stream", "graph", "write", "event"])
def test_a_killed_worker_is_noticed_by_each_quiet_operation(daemon: Daemon, name: str) -> None:
    lease = daemon.builder().acquire()
    scene = Scene(lease)
    os.kill(daemon.worker_pid(lease.lease_id), signal.SIGKILL)
    daemon.wait_for_end(lease.lease_id)

    def do_many() -> None:
        for _ in range(MOST_QUIET):
            scene.operations()[name]()

    with pytest.raises(GpuLeaseError):
        do_many()


def test_the_word_says_that_a_worker_was_killed(daemon: Daemon) -> None:
    lease = daemon.builder().acquire()
    scene = Scene(lease)
    os.kill(daemon.worker_pid(lease.lease_id), signal.SIGKILL)
    wait_until(lambda: lease.revoked, "the word says that the lease has ended")
    with without_a_frame(scene):
        for operation in scene.operations().values():
            with pytest.raises(GpuSessionFailed, match="killed by SIGKILL"):
                operation()


def test_regions_have_words_of_their_own(daemon: Daemon) -> None:
    with scene_of(daemon) as scene:
        kept, ended = scene.region(), scene.region()
        assert not any(region.revoked for region in (kept, ended))
        daemon.revoke(ended.lease_id)
        assert ended.revoked
        kept.cancel()
        assert kept.revoked
        kept.resume()
        assert not kept.revoked
        assert not scene.lease.revoked


def test_the_word_of_asyncio(daemon: Daemon) -> None:
    async def run() -> None:
        builder = aio.GpuBuilder(daemon.address).min_vram(1 << 20).lease_secs(60)
        lease = await builder.acquire()
        async with aio.GpuSession(lease):
            daemon.revoke(lease.lease_id)
            assert lease.revoked

    asyncio.run(run())
