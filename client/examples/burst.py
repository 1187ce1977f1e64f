"""Send bursts of launches for one caller, who may hang up between them: `python -m gpulease.client.examples.burst`.

The caller's data is a region. A burst names it, so the first launch after the region's end is refused, and the rest of
the burst is skipped; other callers' bursts continue.
"""

import numpy as np

from gpulease.client import GpuBuilder, GpuSession, RegionFailed

SOURCE = """
extern "C" __global__ void add_one(float *x, int n) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) x[i] += 1;
}
"""


def run(bursts: int = 5, launches: int = 20) -> tuple[float, int]:
    """Return the remaining caller's value, and how many bursts the other caller completed before it hung up."""
    n, done = 1024, 0
    with GpuBuilder().min_vram("32MiB").acquire() as lease, GpuSession(lease) as session:
        module = session.compile(SOURCE)
        # Each caller's data is a region, and each burst names the set with that region.
        stays, leaves = lease.region("2MiB"), lease.region("2MiB")
        callers = [(region, session.region_set([region])) for region in (stays, leaves)]
        for burst in range(bursts):
            for region, regions in callers:
                try:
                    # A burst launches without waiting. The sync at its end raises the error of a refused launch.
                    for position in range(launches):
                        args = [region, n]
                        session.launch(module, "add_one", [4], [256], args, regions=regions, position=position)
                    session.sync()
                    done += region is leaves
                except RegionFailed as error:
                    # This caller has hung up. Drop it, and continue to serve the other caller.
                    callers = [caller for caller in callers if caller[0].lease_id != error.lease_id]
            if burst == 1:
                leaves.revoke("the caller hung up")
        result = np.frombuffer(session.mem_read(stays, 0, 4 * n), np.float32)
    return float(result.mean()), done


if __name__ == "__main__":
    print("mean {:g}, bursts before the end {}".format(*run()))
