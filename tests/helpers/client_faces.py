"""Both APIs of the client behind one interface, so that a scenario is written only once. Every call is awaited."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

from gpulease.client import GpuBuilder, GpuLease, GpuSession, KernelArgs, Region, aio
from helpers.scripted_peer import ScriptedPeer


class Awaited:
    """Wraps a blocking object so that its methods can be awaited, as in the asyncio API."""

    WAITING = frozenset(
        {"renew", "free", "query", "mem_alloc", "mem_free", "mem_write", "mem_read"}
        | {"module_load", "module_unload", "launch", "sync", "close", "stream", "region_set"}
        | {"region", "cancel", "resume", "revoke", "grow", "shrink", "note", "notes", "reacquire", "printed", "used"}
        | {"keep", "kept", "kept_names", "take", "reset", "park", "move"}
    )

    def __init__(self, target: Any) -> None:
        self.target = target

    def __getattr__(self, name: str) -> Any:
        value = getattr(self.target, name)
        if name not in self.WAITING:
            return value

        async def call(*args: Any, **kwargs: Any) -> Any:
            result = value(*args, **kwargs)
            return Awaited(result) if isinstance(result, Region | GpuLease) else result

        return call


def real(thing: Any) -> Any:
    """Return the API's own object without its wrapper, to be passed to other objects of the API."""
    return getattr(thing, "target", thing)


@asynccontextmanager
async def entered(manager: Any) -> AsyncIterator[Any]:
    """Enter a context manager, blocking or asynchronous, for the block."""
    if hasattr(manager, "__aenter__"):
        async with manager as value:
            yield value
    else:
        with manager as value:
            yield value


class Face:
    """How a scenario acquires leases and opens sessions with either API."""

    def __init__(self, name: str, peer: ScriptedPeer) -> None:
        self.name = name
        self.peer = peer

    def builder(self) -> Any:
        """Return a builder for a small lease at the peer's address."""
        kind: Any = GpuBuilder if self.name == "blocking" else aio.GpuBuilder
        return kind(self.peer.address).min_vram(1 << 20)

    async def acquire(self, builder: Any = None) -> Any:
        wish = builder or self.builder()
        return Awaited(wish.acquire()) if self.name == "blocking" else await wish.acquire()

    async def open(self, lease: Any) -> Any:
        return Awaited(GpuSession(lease.target)) if self.name == "blocking" else await aio.GpuSession(lease)

    @asynccontextmanager
    async def session(self) -> AsyncIterator[Any]:
        """Yield a session on a new lease. Both end after the block."""
        lease = await self.acquire()
        try:
            session = await self.open(lease)
            try:
                yield session
            finally:
                await session.close()
        finally:
            real = getattr(lease, "target", lease)
            if self.name == "blocking":
                with real:
                    pass
            else:
                async with real:
                    pass


Scenario = Callable[[Face], Awaitable[None]]


def play(scenario: Scenario, face: Face) -> None:
    """Run a scenario with one API, on a new event loop."""
    asyncio.run(scenario(face))  # type: ignore[arg-type]


async def any_operation(session: Any, buffer: Any, module: Any, name: str) -> None:
    """Call the session operation of that name. LAUNCH is repeated until it fails, because a single one never fails."""
    match name:
        case "MEM_ALLOC":
            await session.mem_alloc(4)
        case "MEM_WRITE":
            await session.mem_write(buffer, 0, bytes(1 << 21))
        case "MEM_READ":
            await session.mem_read(buffer, 0, 1 << 21)
        case "MODULE_LOAD":
            await session.module_load(b"ptx")
        case "MODULE_UNLOAD":
            await session.module_unload(module)
        case "SYNC":
            await session.sync()
        case "LAUNCH":
            while True:
                await session.launch(module, "nothing", [1], [1], KernelArgs())
