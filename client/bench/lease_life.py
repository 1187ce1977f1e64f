"""The times of a lease's life: from acquire to the first reply, and from its end to memory proved free."""

import secrets
import threading
import time
from typing import Final

from gpulease.client import (
    Buffer,
    GpuBuilder,
    GpuLease,
    GpuSession,
    KernelArgs,
    LeaseExpired,
    LeaseReport,
    Module,
    Revoked,
)
from gpulease.client.bench.figures import percentile
from gpulease.client.console.scene import await_pool
from gpulease.client.sync.driver import ask
from gpulease.protocol import Opcode
from gpulease.protocol.messages import LeaseRevoke

SLICE_BYTES: Final = 256 << 20
FIRST_PTX: Final = b""".version 7.0
.target sm_75
.address_size 64
.visible .entry first_%s(.param .u64 into)
{
    .reg .b32 %%r1;
    .reg .b64 %%rd<3>;
    ld.param.u64 %%rd1, [into];
    cvta.to.global.u64 %%rd2, %%rd1;
    mov.u32 %%r1, 1;
    st.global.u32 [%%rd2], %%r1;
    ret;
}
"""
"""A kernel. `%s` in its name takes a random number, so that no compiler's cache contains it."""


def acquisition(address: str, count: int) -> dict[str, float]:
    """Time leases: to the session's first reply, to the end of a first kernel, and from free to memory proved free."""
    return _percentiles_by_column([_one_lease_ms(address) for _ in range(count)], ("acquire", "first_kernel", "free"))


def warm_acquisition(address: str, count: int) -> dict[str, float]:
    """Time leases that take a ready context. Each is acquired once the pool is full."""
    rounds = []
    for _ in range(count):
        await_pool(address)
        rounds.append(_one_lease_ms(address))
    return _percentiles_by_column(rounds, ("warm_acquire", "warm_first_kernel"))


def _one_lease_ms(address: str) -> tuple[float, ...]:
    """Return three times in milliseconds: to the session's first reply, to the end of a new kernel, and of `free()`."""
    # Give the kernel a new name, so that no compiler's cache has it.
    ptx = FIRST_PTX % secrets.token_hex(8).encode()
    started = time.perf_counter()
    lease = GpuBuilder(address).device("0").min_vram(SLICE_BYTES).lease_secs(60).acquire()
    with GpuSession(lease) as session:
        # A granted lease is usable only once its session has replied.
        session.sync()
        answered = time.perf_counter()
        # Run the first kernel, from its PTX to its end.
        module, into = session.module_load(ptx), session.mem_alloc(4)
        session.launch(module, next(iter(module.kernels)), (1,), (1,), KernelArgs().push_buffer(into))
        session.sync()
        finished = time.perf_counter()
    # `free` returns once the daemon has proved the memory free.
    freeing = time.perf_counter()
    lease.free()
    freed = time.perf_counter()
    return tuple(seconds * 1e3 for seconds in (answered - started, finished - started, freed - freeing))


def _percentiles_by_column(rounds: list[tuple[float, ...]], names: tuple[str, ...]) -> dict[str, float]:
    """Return the percentiles 50 and 99 of each column of `rounds`, by name. Columns without a name are left out."""
    columns = zip(names, zip(*rounds, strict=True), strict=False)
    return {f"{name}_p{part}_ms": percentile(samples, part) for name, samples in columns for part in (50, 99)}


SPIN_SLICE_BYTES: Final = 1 << 20
REVOKED_LEASE_S: Final = 60.0

SPINNING_S: Final = 0.05
"""Seconds for which a kernel runs before its lease is revoked."""

EXPIRY_S: Final = 0.5
"""Time to live of a lease that expires, in seconds: enough to open a session and launch a kernel."""

NOTICE_LIMIT_S: Final = 10.0
"""Longest wait for the tenant's error after a revocation, in seconds."""

SPIN_PTX: Final = b""".version 7.0
.target sm_75
.address_size 64
.visible .entry spin(.param .u64 flag)
{
    .reg .pred %p1;
    .reg .b32 %r1;
    .reg .b64 %rd<3>;
    ld.param.u64 %rd1, [flag];
    cvta.to.global.u64 %rd2, %rd1;
AGAIN:
    ld.volatile.global.u32 %r1, [%rd2];
    setp.eq.u32 %p1, %r1, 0;
    @%p1 bra AGAIN;
    ret;
}
"""
"""A kernel that never ends on its own: its flag stays 0."""

_END_POLL_S: Final = 0.002


def expiry(address: str, count: int) -> dict[str, float]:
    """Time from a lease's deadline, under an endless kernel, to the tenant's error and to memory proved free."""
    errors_ms, free_ms = [], []
    for _ in range(count):
        lease = GpuBuilder(address).min_vram(SPIN_SLICE_BYTES).lease_secs(EXPIRY_S).acquire()
        # This is the deadline by this program's clock. The daemon's lease began a little earlier.
        deadline = time.monotonic() + lease.remaining_s
        with GpuSession(lease) as session:
            # Launch a kernel that runs until the lease ends.
            spinning = _spin(session)
            try:
                session.sync()
            except LeaseExpired:
                errors_ms.append((time.monotonic() - deadline) * 1e3)
            else:
                raise RuntimeError("a kernel that never ends has ended")
            del spinning
        # This figure is the daemon's own, from its deadline to the proof.
        free_ms.append(_wait_until_torn_down(lease)["ended_after_deadline_us"] / 1e3)
    return _end_figures("expiry", errors_ms, free_ms)


def revocation(address: str, count: int) -> dict[str, float]:
    """Time from an operator's revoke, under an endless kernel, to the tenant's error and to memory proved free.

    Both times begin before the revoke is sent, so they include sending the request to the daemon. The time to the proof
    also includes receiving the reply.
    """
    errors_ms, free_ms = [], []
    for _ in range(count):
        lease = GpuBuilder(address).min_vram(SPIN_SLICE_BYTES).lease_secs(REVOKED_LEASE_S).acquire()
        with GpuSession(lease) as session:
            spinning = _spin(session)
            refused_at: list[float] = []
            # A thread waits for the error, because this one waits for the reply to the revoke.
            waiting = threading.Thread(target=_wait_until_revoked, args=(session, refused_at), daemon=True)
            waiting.start()
            time.sleep(SPINNING_S)
            started = time.monotonic()
            # The reply comes once the memory is proved free.
            ask(Opcode.LEASE_REVOKE, LeaseRevoke(lease.lease_id, "a measurement"), address)
            free_ms.append((time.monotonic() - started) * 1e3)
            waiting.join(NOTICE_LIMIT_S)
            if not refused_at:
                raise RuntimeError("a tenant did not learn that its lease is revoked")
            errors_ms.append((refused_at[0] - started) * 1e3)
            del spinning
    return _end_figures("revoke", errors_ms, free_ms)


def _spin(session: GpuSession) -> tuple[Module, Buffer]:
    """Launch the endless kernel; return the handles that must be kept alive."""
    # The kernel waits until its flag is not 0, but nothing changes the flag.
    flag = session.mem_alloc(4)
    module = session.module_load(SPIN_PTX)
    session.launch(module, "spin", (1,), (1,), KernelArgs().push_buffer(flag))
    return module, flag


def _wait_until_revoked(session: GpuSession, refused_at: list[float]) -> None:
    try:
        session.sync()
    except Revoked:
        refused_at.append(time.monotonic())


def _wait_until_torn_down(lease: GpuLease) -> LeaseReport:
    while True:
        report = lease.query()
        if report["state"] in ("torndown", "fenced"):
            return report
        time.sleep(_END_POLL_S)


def _end_figures(name: str, errors_ms: list[float], free_ms: list[float]) -> dict[str, float]:
    return {
        f"{name}_{figure}_p{percent}_ms": percentile(samples, percent)
        for figure, samples in (("told", errors_ms), ("free", free_ms))
        for percent in (50, 99)
    }
