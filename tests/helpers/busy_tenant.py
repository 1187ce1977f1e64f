"""A tenant that computes and checks until a given time, in a separate process: `busy_tenant LEASE_S UNTIL_S`.

Prints "leased", and at the end how many rounds were right.
"""

import sys
import time

from gpulease.client import GpuBuilder, GpuSession
from helpers.kernels import check_main_job

lease_s, until_s = float(sys.argv[1]), time.monotonic() + float(sys.argv[2])
with GpuBuilder().min_vram(1 << 20).lease_secs(lease_s).acquire() as lease, GpuSession(lease) as session:
    print("leased", flush=True)
    rounds = 0
    while time.monotonic() < until_s:
        check_main_job(session)
        rounds += 1
    print(f"{rounds} rounds", flush=True)
