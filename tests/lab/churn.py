"""A load on one daemon: a constant number of leases that are acquired, used, renewed and ended in every way."""

import asyncio
import contextlib
import itertools
import os
import random
import signal
import time
from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Awaitable
from typing import Final, TypeVar

import numpy as np

from gpulease.client.aio import GpuBuilder, GpuLease, GpuSession
from gpulease.client.console.scene import Breach, worker_pid
from gpulease.client.core.launch import KernelArguments
from gpulease.client.errors import GpuLeaseError, LeaseExpired, Revoked
from gpulease.client.kernel_args import KernelArgs
from gpulease.client.sync.driver import ask
from gpulease.protocol import Opcode
from gpulease.protocol.messages import Empty, LeaseRevoke

T = TypeVar("T")

SLICE_BYTES: Final = 1 << 20
VALUES: Final = 1024
GRID: Final = (4, 1, 1)
BLOCK: Final = (256, 1, 1)

AT_A_TIME: Final = 8
"""Maximum number of acquires in progress at the same time, because each starts a process."""

TTL_S: Final = 120.0
REST_TTL_S: Final = 120.0
"""Lifetime of a lease while all leases rest, in seconds, so that none ends during the rest."""

ENDINGS: Final = ("free", "expire", "drop", "kill", "revoke", "free", "free")
"""The ways in which leases end, in rotation."""

EXPIRY_PART: Final = 0.25
"""Duration of a lease that must expire, as a share of the mean life."""

PATIENCE_S: Final = 120.0
"""Longest wait, in seconds, until all leases rest, or until a tenant gets the error of its lease's end. After that,
something hangs."""

REFUSED_POLL_S: Final = 0.05

_X: Final = np.arange(VALUES, dtype=np.float32)


class Churn:
    """The load.

    Args:
        address: The daemon's address.
        leases: Number of leases at the same time.
        life_s: Mean life of a lease in seconds.
        image: PTX with the kernel `scale`.
        seed: Seed of the random lives.

    Attributes:
        took_ms: Milliseconds of each control operation that succeeded, by operation.
        ended: Number of leases that ended in each way.
        surprises: Sentences about events that should not have happened.
    """

    def __init__(self, address: str, leases: int, life_s: float, image: bytes, seed: int = 1) -> None:
        self.took_ms: defaultdict[str, list[float]] = defaultdict(list)
        self.ended: Counter[str] = Counter()
        self.surprises: list[str] = []
        self._address, self._leases, self._life_s, self._image = address, leases, life_s, image
        self._random = random.Random(seed)
        self._endings = itertools.cycle(ENDINGS)
        self._acquiring = asyncio.Semaphore(AT_A_TIME)
        self._rest, self._resume, self._changed = asyncio.Event(), asyncio.Event(), asyncio.Condition()
        self._resting = 0

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Run the load during the block: one task for each lease, and one that acts as an operator."""
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(self._slot()) for _ in range(self._leases)]
            tasks.append(group.create_task(self._act_as_operator()))
            try:
                yield
            finally:
                for task in tasks:
                    task.cancel()

    @contextlib.asynccontextmanager
    async def at_rest(self) -> AsyncIterator[None]:
        """Stop the load during the block: every lease is attached and renewed, and no request is sent."""
        self._resume.clear()
        # Step 1: tell all tasks to rest. Step 2: wait until all of them rest. Step 3: they rest until the block ends.
        self._rest.set()
        try:
            async with asyncio.timeout(PATIENCE_S), self._changed:
                # All leases and the operator have stopped: nothing changes until the block ends.
                await self._changed.wait_for(lambda: self._resting == self._leases + 1)
            yield
        finally:
            self._rest.clear()
            self._resume.set()

    # --- one lease after another ---

    async def _slot(self) -> None:
        while True:
            ending = next(self._endings)
            # A lease that must expire would end during the rest.
            if ending == "expire" and self._rest.is_set():
                ending = "free"
            try:
                self.ended[await self._live(ending)] += 1
            except (GpuLeaseError, Breach, TimeoutError) as error:
                self.surprises.append(f"{ending}: {type(error).__name__}: {error}")
                # Pause, so that an error that repeats does not make this loop spin.
                await asyncio.sleep(1.0)

    async def _live(self, ending: str) -> str:
        """Acquire, use and end one lease. Returns the way in which it ended."""
        ttl_s = max(1.0, EXPIRY_PART * self._life_s) if ending == "expire" else TTL_S
        builder = GpuBuilder(self._address).min_vram(SLICE_BYTES).lease_secs(ttl_s).timeout(30)
        async with self._acquiring:
            lease = await self._timed("acquire", builder.acquire())
        if ending == "expire":
            # This lease is short and is not renewed. All others are renewed twice.
            return await self._let_expire(lease)
        async with await self._timed("attach", GpuSession(lease)) as session:
            await self._work(session)
            # Renew twice, because the second renewal shows that the first had an effect.
            for _ in range(2):
                await self._hold(lease, self._random.uniform(0.25, 0.75) * self._life_s)
                await self._timed("renew", lease.renew(TTL_S))
                await self._timed("query", lease.query())
                await self._work(session)
            await self._end(ending, lease, session)
            return ending

    async def _let_expire(self, lease: GpuLease) -> str:
        """Use the lease until it expires. On a busy host it may expire before it is used."""
        with contextlib.suppress(LeaseExpired):
            async with GpuSession(lease) as session:
                await self._work(session)
                await _until_refused(session, self._rest)
            # All leases are about to rest, and this one would expire meanwhile, so free it.
            await lease.free()
            return "free"
        return "expire"

    async def _end(self, ending: str, lease: GpuLease, session: GpuSession) -> None:
        match ending:
            # The tenant closes the session and frees the lease.
            case "free":
                await session.close()
                await self._timed("free", lease.free())
            # The worker is killed: the daemon must notice this and end the lease.
            case "kill":
                os.kill(await asyncio.to_thread(worker_pid, lease.lease_id), signal.SIGKILL)
                with contextlib.suppress(GpuLeaseError):
                    await _until_refused(session)
            case "revoke":
                revoke = LeaseRevoke(lease.lease_id, "load")
                await self._timed("revoke", asyncio.to_thread(ask, Opcode.LEASE_REVOKE, revoke, self._address))
                with contextlib.suppress(Revoked):
                    await _until_refused(session)
            case "drop":
                pass  # The last reference to the lease is dropped, which frees it without waiting for a reply.

    async def _work(self, session: GpuSession) -> None:
        # Use all main operations of a session, and compare the result with numpy: a wrong result is also a surprise.
        module = await session.module_load(self._image)
        buffer = await session.mem_alloc(_X.nbytes)
        await session.mem_write(buffer, 0, _X)
        args: KernelArguments = KernelArgs().push_buffer(buffer).push_u32(VALUES).push_f32(2.0)
        await session.launch(module, "scale", GRID, BLOCK, args)
        await session.sync()
        read = np.frombuffer(await session.mem_read(buffer, 0, _X.nbytes), np.float32)
        if not np.array_equal(read, 2 * _X):
            raise Breach("a kernel's result is wrong")
        await session.mem_free(buffer)
        await session.module_unload(module)

    async def _hold(self, lease: GpuLease, seconds: float) -> None:
        """Wait for `seconds`. If all leases must rest meanwhile, renew the lease and rest, too."""
        until = time.monotonic() + seconds
        while (left_s := until - time.monotonic()) > 0:
            try:
                # Wait for the end of `seconds`, or for the rest, whichever comes first.
                async with asyncio.timeout(left_s):
                    await self._rest.wait()
            except TimeoutError:
                return
            await lease.renew(REST_TTL_S)
            await self._rest_with_others()

    async def _rest_with_others(self) -> None:
        # Count this task as resting until the rest ends.
        await self._count(1)
        await self._resume.wait()
        await self._count(-1)

    async def _count(self, change: int) -> None:
        async with self._changed:
            self._resting += change
            self._changed.notify_all()

    # --- an operator ---

    async def _act_as_operator(self) -> None:
        while True:
            # Once a second, request what an operator's page shows.
            for name, op in (("inventory", Opcode.GET_INVENTORY), ("list", Opcode.LEASE_LIST_ACTIVE)):
                await self._timed(name, asyncio.to_thread(ask, op, Empty(), self._address))
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(1.0):
                    await self._rest.wait()
            if self._rest.is_set():
                await self._rest_with_others()

    async def _timed(self, name: str, operation: Awaitable[T]) -> T:
        started = time.perf_counter()
        result = await operation
        self.took_ms[name].append((time.perf_counter() - started) * 1e3)
        return result


async def _until_refused(session: GpuSession, unless: asyncio.Event | None = None) -> None:
    """Sync until the session's end is reported, or `unless` is set. Raises the reported error, or TimeoutError."""
    async with asyncio.timeout(PATIENCE_S):
        # The first operation after the end raises the error, so poll.
        while unless is None or not unless.is_set():
            await session.sync()
            await asyncio.sleep(REFUSED_POLL_S)
