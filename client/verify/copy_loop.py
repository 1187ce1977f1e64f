"""`python -m gpulease.client.verify.copy_loop ADDRESS`: a client that copies to and from the card until killed."""

import sys
from typing import Final

import numpy as np

from gpulease.client import GpuBuilder, GpuSession

COPY_BYTES: Final = 32 << 20
LEASE_S: Final = 120.0


def _copy(address: str) -> None:
    lease = GpuBuilder(address).min_vram(2 * COPY_BYTES).lease_secs(LEASE_S).acquire()
    session = GpuSession(lease)
    buffer = session.mem_alloc(COPY_BYTES)
    data = np.ones(COPY_BYTES, np.uint8)
    session.mem_write(buffer, 0, data)
    # This line reports to the parent that the lease exists and the first copy is done.
    print(lease.lease_id, flush=True)
    while True:
        session.mem_write(buffer, 0, data)
        session.mem_read(buffer, 0, COPY_BYTES, into=data)


if __name__ == "__main__":
    _copy(sys.argv[1])
