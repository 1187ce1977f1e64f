"""A tenant that claims names and serves them, in a separate process.

`python -P -m helpers.fleet_tenant FILE SEED HOLD_S NAME,NAME... NODE=ADDRESS...`: for each name, it requests a lease
from one node after another, computes in the lease for a random time of at most HOLD_S or until the lease ends, and
begins again. For each kernel that ran, it writes a line of JSON to FILE. On SIGTERM it frees its leases and ends.
"""

import json
import os
import random
import signal
import sys
import threading
import time
from typing import Final

from gpulease.client import GpuBuilder, GpuLease, GpuLeaseError, GpuSession
from helpers.kernels import TRANSFORM, scale_args

LEASE_S: Final = 6
"""Duration of each lease, so that those of a killed tenant expire soon."""

LEAST_HOLD_S: Final = 1.0
RENEW_S: Final = 2.0
PAUSE_S: Final = 0.03
"""Pause between two kernels. With shorter pauses, tenants would take more of the host's time than the fleet itself."""

REFUSED_PAUSE_S: Final = (0.05, 0.3)

IS_OVER = threading.Event()


def boot_ns() -> int:
    return time.clock_gettime_ns(time.CLOCK_BOOTTIME)


def serve(name: str, nodes: dict[str, str], hold_s: float, file: int, dice: random.Random) -> None:
    """Serve the name until the tenant is stopped, with leases that it holds for at most `hold_s` each."""
    while not IS_OVER.is_set():
        node = dice.choice(sorted(nodes))
        try:
            lease = GpuBuilder(nodes[node]).min_vram(1 << 20).lease_secs(LEASE_S).name(name).acquire()
        except GpuLeaseError:
            IS_OVER.wait(dice.uniform(*REFUSED_PAUSE_S))
            continue
        try:
            with lease:
                compute(lease, node, file, time.monotonic() + dice.uniform(LEAST_HOLD_S, hold_s))
        except GpuLeaseError:
            continue


def compute(lease: GpuLease, node: str, file: int, until_s: float) -> None:
    """Run kernels until `until_s`. Raises GpuLeaseError when the lease has ended."""
    renewed_s = time.monotonic()
    with GpuSession(lease) as session:
        module, buffer = session.module_load(TRANSFORM), session.mem_alloc(4096)
        args = scale_args(buffer, 1024, 1)
        while time.monotonic() < until_s and not IS_OVER.wait(PAUSE_S):
            sent_ns = boot_ns()
            session.launch(module, "scale", [4], [256], args)
            session.sync()
            act = {"name": lease.name, "node": node, "epoch": lease.epoch, "sent_ns": sent_ns, "done_ns": boot_ns()}
            os.write(file, json.dumps(act).encode() + b"\n")
            if time.monotonic() > renewed_s + RENEW_S:
                renewed_s = time.monotonic()
                lease.renew(LEASE_S)


def main(path: str, seed: str, hold_s: str, names: str, *nodes: str) -> None:
    signal.signal(signal.SIGTERM, lambda *_: IS_OVER.set())
    file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    addresses = dict(node.split("=", 1) for node in nodes)
    threads = [
        threading.Thread(target=serve, args=(name, addresses, float(hold_s), file, random.Random(f"{seed}-{name}")))
        for name in names.split(",")
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    os.close(file)


if __name__ == "__main__":
    main(*sys.argv[1:])
