"""The faults that a tenant can cause, each with the error that the tenant must get and the way its lease must end."""

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
from gpulease.client.console.scene import SLICE_BYTES, Breach, MatrixCheck, Scene, worker_pid
from gpulease.client.verify.faulty_kernels import (
    BLOCK,
    GRID,
    ONE,
    WARP,
    compiling_long,
    launching_kernels,
    memory_hungry_kernels,
    printing,
    rule_breakers,
    with_managed_variable,
    with_variable,
)

FAR_BYTES: Final = 1 << 40
SHARED_BYTES: Final = 64
HEAP_BYTES: Final = 1 << 30

BEYOND_WORDS: Final = 1 << 24
"""An offset beyond the end of any card's shared memory."""

ENDLESS_S: Final = 1.0
"""Seconds for which an endless kernel may run before its lease ends."""

COPYING_S: Final = 0.5
"""Seconds for which a client copies before it is killed or stopped."""


@dataclass(frozen=True, slots=True)
class FaultOutcome:
    """The outcome of one fault.

    Attributes:
        error: The name of the error that the tenant got; "-" if no tenant was left to get one.
        words: The error's message.
        cause: The cause of the lease's end.
        reclaim_ms: Milliseconds from the start of the lease's end until its memory is proved free.
    """

    error: str
    words: str
    cause: str
    reclaim_ms: float


@dataclass(frozen=True, slots=True)
class Sizes:
    """Numbers of launches and kernels of the slow faults: fewer on the embedded driver."""

    launches: int
    long_kernels: int


def faults(scene: Scene, sizes: Sizes) -> list[MatrixCheck[FaultOutcome]]:
    """Return the rows for all faults that this driver can show, in the order in which they run."""
    rows = [
        MatrixCheck("illegal address", partial(_kernel, kernel="stray")),
        MatrixCheck("misaligned address", partial(_kernel, kernel="misaligned")),
        MatrixCheck("trap", partial(_kernel, kernel="trapped")),
        MatrixCheck("assertion", partial(_kernel, kernel="asserted")),
        MatrixCheck("shared memory overflow", partial(_kernel, kernel="beyond_shared")),
        MatrixCheck("stack overflow", partial(_kernel, kernel="sinking")),
        MatrixCheck("more than the slice", _over_slice),
        MatrixCheck("variables of 40 GiB", partial(_load, image=with_variable(40 << 30))),
        MatrixCheck("managed variable", partial(_load, image=with_managed_variable())),
        MatrixCheck("kernel that launches kernels", partial(_load, image=launching_kernels())),
        MatrixCheck("printf of every thread", _print),
        MatrixCheck("endless kernel, one warp", partial(_endless, grid=ONE, block=WARP)),
        MatrixCheck("endless kernel, whole card", partial(_endless, grid=GRID, block=BLOCK)),
        MatrixCheck(f"{sizes.launches} launches at once", partial(_flood, launches=sizes.launches)),
        MatrixCheck(f"PTX of {sizes.long_kernels} kernels", partial(_compile, kernels=sizes.long_kernels)),
        MatrixCheck("worker SIGSEGV", partial(_worker_signal, number=signal.SIGSEGV)),
        MatrixCheck("worker SIGKILL", partial(_worker_signal, number=signal.SIGKILL)),
        MatrixCheck("client SIGKILL in a copy", partial(_client_signal, number=signal.SIGKILL)),
        MatrixCheck("client that stops reading", partial(_client_signal, number=signal.SIGSTOP)),
    ]
    # Only a CUDA driver allocates memory for stacks and a heap by itself.
    if scene.is_card:
        rows[8:8] = [MatrixCheck("64 KiB of stack a thread", _stack), MatrixCheck("device heap of 1 GiB", _heap)]
    return rows


def _expected_error(error: GpuLeaseError, expected: type[GpuLeaseError]) -> str:
    if type(error) is not expected:
        raise Breach(f"the tenant must get {expected.__name__}, not {type(error).__name__}: {error}")
    return type(error).__name__


def _error_of(action: Callable[[], object]) -> GpuLeaseError:
    try:
        action()
    except GpuLeaseError as error:
        return error
    raise Breach("the tenant got no error")


def _free_lease(scene: Scene, lease_id: int, error: str, words: object) -> FaultOutcome:
    """Free the lease, and time the proof that its memory is free. This is the last step of a proof."""
    reclaim_ms = scene.free(lease_id)
    return FaultOutcome(error, str(words), scene.wait_for_end(lease_id), reclaim_ms)


def _kernel(scene: Scene, kernel: str) -> FaultOutcome:
    """Launch a kernel that faults. On a card the context is lost, and every later operation must report this."""
    lease = scene.builder().acquire()
    session = GpuSession(lease)
    buffer = session.mem_alloc(4096)
    module = session.module_load(rule_breakers())
    args = KernelArgs().push_buffer(buffer)
    # Some kernels take the address or the offset at which they fault.
    if kernel == "stray":
        args.push_u64(FAR_BYTES)
    elif kernel == "beyond_shared":
        args.push_u32(BEYOND_WORDS)
    session.launch(module, kernel, ONE, WARP, args, shared_bytes=SHARED_BYTES)
    error = _error_of(session.sync)
    # The context is lost, so every later operation must get the same error.
    if scene.is_card:
        _expected_error(_error_of(lambda: session.mem_alloc(4096)), SyncFailed)
        _expected_error(_error_of(session.sync), SyncFailed)
    return _free_lease(scene, lease.lease_id, _expected_error(error, SyncFailed), error)


def _over_slice(scene: Scene) -> FaultOutcome:
    lease = scene.builder().acquire()
    session = GpuSession(lease)
    error = _error_of(lambda: session.mem_alloc(SLICE_BYTES + 1))
    # After the refusal the whole slice must still be available.
    session.mem_free(session.mem_alloc(SLICE_BYTES))
    return _free_lease(scene, lease.lease_id, _expected_error(error, AllocFailed), error)


def _load(scene: Scene, image: bytes) -> FaultOutcome:
    lease = scene.builder().acquire()
    session = GpuSession(lease)
    error = _error_of(lambda: session.module_load(image))
    # A refused module must not keep memory.
    session.mem_free(session.mem_alloc(SLICE_BYTES))
    return _free_lease(scene, lease.lease_id, _expected_error(error, LoadFailed), error)


def _stack(scene: Scene) -> FaultOutcome:
    lease = scene.builder().acquire()
    session = GpuSession(lease)
    module = session.module_load(memory_hungry_kernels())
    buffer = session.mem_alloc(4096)
    session.launch(module, "local_64k", ONE, WARP, KernelArgs().push_buffer(buffer).push_u32(5))
    # The driver would allocate stacks for all of the card's threads, outside the slice. So the launch must be refused,
    # and the session must continue.
    error = _error_of(session.sync)
    session.sync()
    return _free_lease(scene, lease.lease_id, _expected_error(error, LaunchFailed), error)


def _heap(scene: Scene) -> FaultOutcome:
    """Allocate more than the device heap has. The kernel must get a null pointer."""
    lease = scene.builder().acquire()
    session = GpuSession(lease)
    module, heap_bytes = session.module_load(memory_hungry_kernels()), session.mem_alloc(8)
    session.launch(module, "from_heap", ONE, ONE, KernelArgs().push_buffer(heap_bytes).push_u64(HEAP_BYTES))
    # The kernel stores the pointer that it got.
    if any(session.mem_read(heap_bytes, 0, 8)):
        raise Breach(f"a kernel got {HEAP_BYTES} bytes of heap in a slice of {SLICE_BYTES}")
    return _free_lease(scene, lease.lease_id, "-", "a null pointer")


def _print(scene: Scene) -> FaultOutcome:
    """Print more than the printf buffer holds. The buffer must drop lines, not grow."""
    lease = scene.builder().acquire()
    session = GpuSession(lease)
    session.launch(session.module_load(printing()), "print_a_line", GRID, BLOCK, KernelArgs())
    session.sync()
    session.mem_free(session.mem_alloc(SLICE_BYTES))
    return _free_lease(scene, lease.lease_id, "-", "all were done")


def _endless(scene: Scene, grid: tuple[int, int, int], block: tuple[int, int, int]) -> FaultOutcome:
    lease = scene.builder().max_kernel_secs(ENDLESS_S).acquire()
    session = GpuSession(lease)
    flag = session.mem_alloc(4)
    module = session.module_load(rule_breakers())
    # The kernel waits for a flag that is never set; `max_kernel_secs` ends the lease.
    session.launch(module, "endless", grid, block, KernelArgs().push_buffer(flag))
    error = _error_of(session.sync)
    started = time.perf_counter()
    cause = scene.wait_for_end(lease.lease_id)
    return FaultOutcome(
        _expected_error(error, GpuSessionFailed), str(error), cause, (time.perf_counter() - started) * 1e3
    )


def _flood(scene: Scene, launches: int) -> FaultOutcome:
    """Launch as fast as possible. This breaks no rule, but the neighbour must not be affected either."""
    lease = scene.builder().acquire()
    session = GpuSession(lease)
    buffer = session.mem_alloc(4096)
    module = session.module_load(rule_breakers())
    # Launch without waiting, so that the ring and the driver's queue fill up.
    args = KernelArgs().push_buffer(buffer).push_u32(8).push_f32(1.0)
    for _ in range(launches):
        session.launch(module, "scale", ONE, WARP, args)
    session.sync()
    if (counted := scene.query(lease.lease_id)["launches"]) != launches:
        raise Breach(f"{counted} of {launches} launches were done")
    return _free_lease(scene, lease.lease_id, "-", "all were done")


def _compile(scene: Scene, kernels: int) -> FaultOutcome:
    lease = scene.builder().acquire()
    session = GpuSession(lease)
    started = time.perf_counter()
    loaded = len(session.module_load(compiling_long(kernels)).kernels)
    taken_s = time.perf_counter() - started
    if loaded != kernels:
        raise Breach(f"{loaded} of {kernels} kernels were loaded")
    return _free_lease(scene, lease.lease_id, "-", f"compiled in {taken_s:.1f} s")


def _worker_signal(scene: Scene, number: signal.Signals) -> FaultOutcome:
    lease = scene.builder().acquire()
    session = GpuSession(lease)
    # Use all memory, so that all of it has to be proved free.
    session.mem_alloc(SLICE_BYTES)
    started = time.perf_counter()
    os.kill(worker_pid(lease.lease_id), number)
    error = _error_of(session.sync)
    cause = scene.wait_for_end(lease.lease_id)
    return FaultOutcome(
        _expected_error(error, GpuSessionFailed), str(error), cause, (time.perf_counter() - started) * 1e3
    )


def _client_signal(scene: Scene, number: signal.Signals) -> FaultOutcome:
    """Kill the client's process, or stop it permanently; then free its lease as the operator."""
    command = [sys.executable, "-P", "-m", "gpulease.client.verify.copy_loop", scene.address]
    victim = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        if victim.stdout is None:
            raise ValueError("the client's process has no pipe")
        # The client prints its lease's id after its first copy.
        lease_id = int(victim.stdout.readline().strip() or "0", 16)
        if not lease_id:
            raise Breach("the client's process could not begin")
        time.sleep(COPYING_S)
        victim.send_signal(number)
        return _free_lease(scene, lease_id, "-", "the client is gone")
    finally:
        victim.kill()
        victim.communicate()
