"""A tenant that computes and checks until its input ends, in a separate process: `busy_tenant LEASE_S`.

Prints "leased", and at the end how many rounds had correct results.
"""

import select
import sys
from typing import Final

from gpulease.client import GpuBuilder, GpuSession
from helpers.kernels import check_main_job

PAUSE_S: Final = 0.1

with GpuBuilder().min_vram(1 << 20).lease_secs(float(sys.argv[1])).acquire() as lease, GpuSession(lease) as session:
    print("leased", flush=True)
    rounds = 0
    while not select.select([sys.stdin], [], [], PAUSE_S)[0]:
        check_main_job(session)
        rounds += 1
    print(f"{rounds} rounds", flush=True)
