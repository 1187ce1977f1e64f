"""How long a lease takes to end under a kernel that never does, seen from the tenant and from the operator."""

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
from gpulease.client.sync.driver import ask
from gpulease.protocol import Opcode
from gpulease.protocol.messages import LeaseRevoke

SLICE_BYTES: Final = 1 << 20
REVOKED_LEASE_S: Final = 60.0

SPINNING_S: Final = 0.05
"""A kernel runs for so long before its lease is revoked."""

TOLD_S: Final = 10.0
"""For a revoked tenant to be told."""

_LOOK_S: Final = 0.002

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
"""A kernel that never ends by itself: its flag stays 0."""


def expiry(address: str, count: int, ttl_s: float = 0.5) -> dict[str, float]:
    """From a lease's deadline, under a kernel that never ends, to the tenant's error and to memory proved free."""
    told, free = [], []
    for _ in range(count):
        lease = GpuBuilder(address).min_vram(SLICE_BYTES).lease_secs(ttl_s).acquire()
        deadline = time.monotonic() + lease.remaining_s
        with GpuSession(lease) as session:
            kept = _spin(session)
            try:
                session.sync()
            except LeaseExpired:
                told.append((time.monotonic() - deadline) * 1e3)
            else:
                raise RuntimeError("a kernel that never ends has ended")
            del kept
        free.append(_wait_until_torn_down(lease)["ended_after_deadline_us"] / 1e3)
    return _figures("expiry", told, free)


def revocation(address: str, count: int) -> dict[str, float]:
    """From an operator's revoke, under a kernel that never ends, to the tenant's error and to memory proved free.

    Both are counted from before the revoke is sent, so they hold the way to the daemon and, the latter, back.
    """
    told, free = [], []
    for _ in range(count):
        lease = GpuBuilder(address).min_vram(SLICE_BYTES).lease_secs(REVOKED_LEASE_S).acquire()
        with GpuSession(lease) as session:
            kept = _spin(session)
            told_at: list[float] = []
            waiting = threading.Thread(target=_wait_until_revoked, args=(session, told_at), daemon=True)
            waiting.start()
            time.sleep(SPINNING_S)
            started = time.monotonic()
            # Answered once the memory is proved free.
            ask(Opcode.LEASE_REVOKE, LeaseRevoke(lease.lease_id, "a measurement"), address)
            free.append((time.monotonic() - started) * 1e3)
            waiting.join(TOLD_S)
            if not told_at:
                raise RuntimeError("a tenant was not told that its lease is revoked")
            told.append((told_at[0] - started) * 1e3)
            del kept
    return _figures("revoke", told, free)


def _spin(session: GpuSession) -> tuple[Module, Buffer]:
    """Launch the kernel that never ends; what must be kept alive."""
    flag = session.mem_alloc(4)
    module = session.module_load(SPIN_PTX)
    session.launch(module, "spin", (1,), (1,), KernelArgs().push_buffer(flag))
    return module, flag


def _wait_until_revoked(session: GpuSession, told_at: list[float]) -> None:
    try:
        session.sync()
    except Revoked:
        told_at.append(time.monotonic())


def _wait_until_torn_down(lease: GpuLease) -> LeaseReport:
    while True:
        report = lease.query()
        if report["state"] in ("torndown", "fenced"):
            return report
        time.sleep(_LOOK_S)


def _figures(name: str, told: list[float], free: list[float]) -> dict[str, float]:
    return {
        f"{name}_{what}_p{percent}_ms": percentile(samples, percent)
        for what, samples in (("told", told), ("free", free))
        for percent in (50, 99)
    }
