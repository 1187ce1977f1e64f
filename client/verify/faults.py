"""The faults: what a tenant does wrong, what it must be told, and how its lease ends."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Final

from gpulease.client import (
    AllocFailed,
    GpuLeaseError,
    GpuSession,
    GpuSessionFailed,
    KernelArgs,
    LaunchFailed,
    LoadFailed,
    SyncFailed,
)
from gpulease.client.verify.faulty_kernels import (
    BLOCK,
    GRID,
    ONE,
    WARP,
    compiling_long,
    hungry,
    launching_kernels,
    printing,
    rule_breakers,
    with_managed_variable,
    with_variable,
)
from gpulease.client.verify.scene import SLICE_BYTES, Breach, Scene, worker_pid

FAR_BYTES: Final = 1 << 40
SHARED_BYTES: Final = 64
HEAP_BYTES: Final = 1 << 30

BEYOND_WORDS: Final = 1 << 24
"""Into shared memory: past any card's."""

ENDLESS_S: Final = 1.0
"""How long an endless kernel may run before its lease ends."""

COPYING_S: Final = 0.5
"""A client copies for so long before something happens to it."""


@dataclass(frozen=True, slots=True)
class Told:
    """How one fault went.

    Attributes:
        error: What the tenant was told: its error's name, or "-" if there was nobody to tell.
        cause: Why the lease ended.
        reclaim_ms: From the end's begin to memory proved free.
    """

    error: str
    words: str
    cause: str
    reclaim_ms: float


@dataclass(frozen=True, slots=True)
class Fault:
    """One row."""

    name: str
    run: Callable[[Scene], Told]


@dataclass(frozen=True, slots=True)
class Sizes:
    """How much of what takes long."""

    launches: int
    long_kernels: int


def faults(scene: Scene, sizes: Sizes) -> list[Fault]:
    """All rows that this driver can show."""
    rows = [
        Fault("illegal address", partial(_kernel, kernel="stray")),
        Fault("misaligned address", partial(_kernel, kernel="misaligned")),
        Fault("trap", partial(_kernel, kernel="trapped")),
        Fault("assertion", partial(_kernel, kernel="asserted")),
        Fault("shared memory overflow", partial(_kernel, kernel="beyond_shared")),
        Fault("stack overflow", partial(_kernel, kernel="sinking")),
        Fault("more than the slice", _over_slice),
        Fault("variables of 40 GiB", partial(_load, image=with_variable(40 << 30))),
        Fault("managed variable", partial(_load, image=with_managed_variable())),
        Fault("kernel that launches kernels", partial(_load, image=launching_kernels())),
        Fault("printf of every thread", _print),
        Fault("endless kernel, one warp", partial(_endless, grid=ONE, block=WARP)),
        Fault("endless kernel, whole card", partial(_endless, grid=GRID, block=BLOCK)),
        Fault(f"{sizes.launches} launches at once", partial(_flood, launches=sizes.launches)),
        Fault(f"PTX of {sizes.long_kernels} kernels", partial(_compile, kernels=sizes.long_kernels)),
        Fault("worker SIGSEGV", partial(_worker_signal, number=signal.SIGSEGV)),
        Fault("worker SIGKILL", partial(_worker_signal, number=signal.SIGKILL)),
        Fault("client SIGKILL in a copy", partial(_client_signal, number=signal.SIGKILL)),
        Fault("client that stops reading", partial(_client_signal, number=signal.SIGSTOP)),
    ]
    if scene.is_card:
        rows[8:8] = [Fault("64 KiB of stack a thread", _stack), Fault("device heap of 1 GiB", _heap)]
    return rows


def _told(error: GpuLeaseError, expected: type[GpuLeaseError]) -> str:
    if type(error) is not expected:
        raise Breach(f"the tenant was told {type(error).__name__}, not {expected.__name__}: {error}")
    return type(error).__name__


def _failure_of(action: Callable[[], object]) -> GpuLeaseError:
    try:
        action()
    except GpuLeaseError as error:
        return error
    raise Breach("the tenant was told that all is well")


def _ended(scene: Scene, lease_id: int, error: str, words: object) -> Told:
    """The lease is given back by its tenant."""
    reclaim_ms = scene.free(lease_id)
    return Told(error, str(words), scene.wait_for_end(lease_id), reclaim_ms)


def _kernel(scene: Scene, kernel: str) -> Told:
    """A kernel that faults while it runs. On a card the context is lost, and every later operation says so."""
    lease = scene.wish().acquire()
    session = GpuSession(lease)
    buffer = session.mem_alloc(4096)
    module = session.module_load(rule_breakers())
    args = KernelArgs().push_buffer(buffer)
    if kernel == "stray":
        args.push_u64(FAR_BYTES)
    elif kernel == "beyond_shared":
        args.push_u32(BEYOND_WORDS)
    session.launch(module, kernel, ONE, WARP, args, shared_bytes=SHARED_BYTES)
    error = _failure_of(session.sync)
    if scene.is_card:
        _told(_failure_of(lambda: session.mem_alloc(4096)), SyncFailed)
        _told(_failure_of(session.sync), SyncFailed)
    return _ended(scene, lease.lease_id, _told(error, SyncFailed), error)


def _over_slice(scene: Scene) -> Told:
    lease = scene.wish().acquire()
    session = GpuSession(lease)
    error = _failure_of(lambda: session.mem_alloc(SLICE_BYTES + 1))
    session.mem_free(session.mem_alloc(SLICE_BYTES))
    return _ended(scene, lease.lease_id, _told(error, AllocFailed), error)


def _load(scene: Scene, image: bytes) -> Told:
    lease = scene.wish().acquire()
    session = GpuSession(lease)
    error = _failure_of(lambda: session.module_load(image))
    session.mem_free(session.mem_alloc(SLICE_BYTES))
    return _ended(scene, lease.lease_id, _told(error, LoadFailed), error)


def _stack(scene: Scene) -> Told:
    lease = scene.wish().acquire()
    session = GpuSession(lease)
    module = session.module_load(hungry())
    buffer = session.mem_alloc(4096)
    session.launch(module, "local_64k", ONE, WARP, KernelArgs().push_buffer(buffer).push_u32(5))
    error = _failure_of(session.sync)
    session.sync()
    return _ended(scene, lease.lease_id, _told(error, LaunchFailed), error)


def _heap(scene: Scene) -> Told:
    """The device's heap is bounded: a kernel that wants more of it gets a null pointer, and the card is not asked."""
    lease = scene.wish().acquire()
    session = GpuSession(lease)
    module, found = session.module_load(hungry()), session.mem_alloc(8)
    session.launch(module, "from_heap", ONE, ONE, KernelArgs().push_buffer(found).push_u64(HEAP_BYTES))
    if any(session.mem_read(found, 0, 8)):
        raise Breach(f"a kernel got {HEAP_BYTES} bytes of heap in a slice of {SLICE_BYTES}")
    return _ended(scene, lease.lease_id, "-", "a null pointer")


def _print(scene: Scene) -> Told:
    """What the printf buffer can't hold is lost; it does not grow."""
    lease = scene.wish().acquire()
    session = GpuSession(lease)
    session.launch(session.module_load(printing()), "print_a_line", GRID, BLOCK, KernelArgs())
    session.sync()
    session.mem_free(session.mem_alloc(SLICE_BYTES))
    return _ended(scene, lease.lease_id, "-", "all were done")


def _endless(scene: Scene, grid: tuple[int, int, int], block: tuple[int, int, int]) -> Told:
    lease = scene.wish().max_kernel_secs(ENDLESS_S).acquire()
    session = GpuSession(lease)
    flag = session.mem_alloc(4)
    module = session.module_load(rule_breakers())
    session.launch(module, "endless", grid, block, KernelArgs().push_buffer(flag))
    error = _failure_of(session.sync)
    started = time.perf_counter()
    cause = scene.wait_for_end(lease.lease_id)
    return Told(_told(error, GpuSessionFailed), str(error), cause, (time.perf_counter() - started) * 1e3)


def _flood(scene: Scene, launches: int) -> Told:
    """As many launches as fit through the door; not a fault, but nobody beside it may see one."""
    lease = scene.wish().acquire()
    session = GpuSession(lease)
    buffer = session.mem_alloc(4096)
    module = session.module_load(rule_breakers())
    args = KernelArgs().push_buffer(buffer).push_u32(8).push_f32(1.0)
    for _ in range(launches):
        session.launch(module, "scale", ONE, WARP, args)
    session.sync()
    if (counted := scene.query(lease.lease_id)["launches"]) != launches:
        raise Breach(f"{counted} of {launches} launches were done")
    return _ended(scene, lease.lease_id, "-", "all were done")


def _compile(scene: Scene, kernels: int) -> Told:
    lease = scene.wish().acquire()
    session = GpuSession(lease)
    started = time.perf_counter()
    loaded = len(session.module_load(compiling_long(kernels)).kernels)
    taken_s = time.perf_counter() - started
    if loaded != kernels:
        raise Breach(f"{loaded} of {kernels} kernels were loaded")
    return _ended(scene, lease.lease_id, "-", f"compiled in {taken_s:.1f} s")


def _worker_signal(scene: Scene, number: signal.Signals) -> Told:
    lease = scene.wish().acquire()
    session = GpuSession(lease)
    session.mem_alloc(SLICE_BYTES)
    started = time.perf_counter()
    os.kill(worker_pid(lease.lease_id), number)
    error = _failure_of(session.sync)
    cause = scene.wait_for_end(lease.lease_id)
    return Told(_told(error, GpuSessionFailed), str(error), cause, (time.perf_counter() - started) * 1e3)


def _client_signal(scene: Scene, number: signal.Signals) -> Told:
    """The client's process is killed, or stops and never goes on; its lease is then given back in its stead."""
    command = [sys.executable, "-P", "-m", "gpulease.client.verify.copy_loop", scene.address]
    victim = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        if victim.stdout is None:
            raise ValueError("the client's process has no pipe")
        lease_id = int(victim.stdout.readline().strip() or "0", 16)
        if not lease_id:
            raise Breach("the client's process could not begin")
        time.sleep(COPYING_S)
        victim.send_signal(number)
        return _ended(scene, lease_id, "-", "nobody is there to be told")
    finally:
        victim.kill()
        victim.communicate()
