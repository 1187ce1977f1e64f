"""Both APIs of the client behind one interface, so that a scenario is written once: every call is awaited."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

from gpulease.client import GpuBuilder, GpuLease, GpuSession, KernelArgs, Region, aio
from helpers.scripted_peer import ScriptedPeer


class Awaited:
    """Wraps a blocking object so that its methods can be awaited, like those of the asyncio API."""

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
    """The face's own object, to be given to other objects of the face."""
    return getattr(thing, "target", thing)


@asynccontextmanager
async def entered(manager: Any) -> AsyncIterator[Any]:
    """The block of a face's context manager, whichever kind it is."""
    if hasattr(manager, "__aenter__"):
        async with manager as value:
            yield value
    else:
        with manager as value:
            yield value


class Face:
    """How a scenario leases and opens, whichever face it runs on."""

    def __init__(self, name: str, peer: ScriptedPeer) -> None:
        self.name = name
        self.peer = peer

    def builder(self) -> Any:
        """A builder for the peer's address, with a size."""
        kind: Any = GpuBuilder if self.name == "blocking" else aio.GpuBuilder
        return kind(self.peer.address).min_vram(1 << 20)

    async def acquire(self, builder: Any = None) -> Any:
        wish = builder or self.builder()
        return Awaited(wish.acquire()) if self.name == "blocking" else await wish.acquire()

    async def open(self, lease: Any) -> Any:
        return Awaited(GpuSession(lease.target)) if self.name == "blocking" else await aio.GpuSession(lease)

    @asynccontextmanager
    async def session(self) -> AsyncIterator[Any]:
        """A session on a lease of its own; both are gone behind the block."""
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
    """Run a scenario on a face, on an event loop of its own."""
    asyncio.run(scenario(face))  # type: ignore[arg-type]


async def any_operation(session: Any, buffer: Any, module: Any, name: str) -> None:
    """The session operation of that name; LAUNCH repeats forever, because a single one never fails."""
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
