"""Times a one-shot job from its call to its output, compared with the same kernel in a session of the same lease."""

import time
from typing import Final

import numpy as np

from gpulease.client import GpuBuilder, GpuLease, GpuSession, KernelArgs, Submission
from gpulease.client.bench.figures import percentile, timed_us
from gpulease.client.console.scene import await_pool
from gpulease.client.errors import GpuLeaseError

SLICE_BYTES: Final = 1 << 20
ROOM_BYTES: Final = 1 << 20
"""Memory reserved for jobs, in bytes."""

THREADS: Final = 32
SESSION_SAMPLES: Final = 500

TEARDOWN_LIMIT_S: Final = 30.0
"""Longest time for a job's memory to be proved free, in seconds."""

_POLL_S: Final = 0.005
_X: Final = np.arange(1, THREADS + 1, dtype=np.float32)


def submit_figures(address: str, ptx: bytes, count: int, *, has_pool: bool) -> dict[str, float]:
    """Return times of jobs in milliseconds, measured by the tenant. Raises GpuLeaseError, even for a wrong output.

    On a daemon with a pool, only jobs with a ready context are timed, each when the pool is full. Otherwise chance
    would decide whether a job gets a ready context.
    """
    builder = GpuBuilder(address).device("0").min_vram(SLICE_BYTES).submits(ROOM_BYTES).lease_secs(600)
    with builder.acquire() as lease:
        # Describe the job once, so that only its runs are timed.
        submission = lease.submit("scale", ptx).block([THREADS]).inout(_X).args(_arguments(KernelArgs()))
        single = []
        for _ in range(count):
            # Wait until the previous job's memory is free, because this job would wait for that.
            _await_end(lease)
            if has_pool:
                await_pool(address)
            single.append(_run(submission))
        if has_pool:
            return _figures("warm_submit", single)
        # Run one job right after another, like a tenant that never pauses.
        in_a_row = [_run(submission) for _ in range(count)]
        return _in_a_session(lease, ptx) | _figures("submit", single) | _figures("submit_next", in_a_row)


def _arguments(args: KernelArgs) -> KernelArgs:
    return args.push_u32(THREADS).push_f32(2.0)


def _run(submission: Submission) -> float:
    started = time.perf_counter()
    (output,) = submission.launch()
    took_ms = (time.perf_counter() - started) * 1e3
    if not np.array_equal(np.frombuffer(output, np.float32), 2 * _X):
        raise GpuLeaseError("a submit's output is wrong")
    return took_ms


def _in_a_session(lease: GpuLease, ptx: bytes) -> dict[str, float]:
    with GpuSession(lease) as session:
        module, buffer = session.module_load(ptx), session.mem_alloc(_X.nbytes)
        args = _arguments(KernelArgs().push_buffer(buffer))

        def launch_and_sync() -> None:
            session.launch(module, "scale", (1,), (THREADS,), args)
            session.sync()

        # Warm up, as for the session's other figures.
        timed_us(launch_and_sync, 50)
        return _figures("submit_session", [span / 1e3 for span in timed_us(launch_and_sync, SESSION_SAMPLES)])


def _await_end(lease: GpuLease) -> None:
    """Wait until no job is in progress, because the next one would wait for that job's memory. Raises GpuLeaseError."""
    deadline_s = time.monotonic() + TEARDOWN_LIMIT_S
    while "submit" in lease.query():
        if time.monotonic() > deadline_s:
            raise GpuLeaseError(f"a submit's memory is not proved free within {TEARDOWN_LIMIT_S:g} s")
        time.sleep(_POLL_S)


def _figures(name: str, samples_ms: list[float]) -> dict[str, float]:
    return {f"{name}_p{percent}_ms": percentile(samples_ms, percent) for percent in (50, 99)}
