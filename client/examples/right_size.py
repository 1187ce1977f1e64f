"""Find the size of the lease that a job needs: `python -m gpulease.client.examples.right_size`."""

import numpy as np

from gpulease.client import GpuBuilder, GpuSession

MARGIN = 1.1
"""How much larger the lease is than the most memory that the job held. The margin is for larger batches, and for
another card's code."""


def job(session: GpuSession) -> float:
    """The job: make copies on the card, and return a sum."""
    values = session.array(np.arange(1 << 18, dtype=np.float32))
    for _ in range(3):
        # The array that is dropped here is freed, and does not count twice.
        values = values.copy()
    return float(values.numpy().sum())


def run() -> tuple[int, int, float]:
    """Return the bytes of the generous lease and of the right one, and the job's result in the right one."""
    # Step 1: acquire a generous lease, only to measure. `used` returns the most memory that the job has held.
    with GpuBuilder().min_vram("256MiB").acquire() as lease:
        with GpuSession(lease) as session:
            job(session)
            needed_bytes = lease.used().most_bytes
        generous_bytes = lease.size_bytes
    # Step 2: acquire a lease of that size with a margin, for the job itself.
    with GpuBuilder().min_vram(int(MARGIN * needed_bytes)).acquire() as lease, GpuSession(lease) as session:
        return generous_bytes, lease.size_bytes, job(session)


if __name__ == "__main__":
    print("{} bytes asked for, {} needed".format(*run()))
