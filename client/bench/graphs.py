"""What a launch graph costs through a lease, beside the same launches one by one."""

from typing import Final

from gpulease.client import GpuBuilder, GpuSession, KernelArgs
from gpulease.client.bench.figures import per_call_us, percentile, timed_us

LAUNCHES: Final = 20
THREADS: Final = 32
SLICE_BYTES: Final = 64 << 20
CALLS: Final = 200
"""Graphs launched without a wait: fewer than the driver lets wait."""


def graph_figures(address: str, ptx: bytes, samples: int, *, shared_memory: bool = True) -> dict[str, float]:
    """Microseconds of twenty launches of a small kernel, as calls and as one graph."""
    wanted = GpuBuilder(address).device("0").min_vram(SLICE_BYTES).lease_secs(600)
    with wanted.acquire() as lease, GpuSession(lease, shared_memory=shared_memory) as session:
        module = session.module_load(ptx)
        args = KernelArgs().push_buffer(session.mem_alloc(THREADS * 4)).push_u32(THREADS)
        args.push_parameter("factor", "f32", 1.0)

        def launch() -> None:
            for _ in range(LAUNCHES):
                session.launch(module, "scale", (1, 1, 1), (THREADS, 1, 1), args)

        with session.record() as graph:
            launch()
        factors = iter(range(1 << 30))

        def launch_and_sync() -> None:
            launch()
            session.sync()

        def graph_and_sync() -> None:
            graph.launch()
            session.sync()

        def rebind_and_sync() -> None:
            graph.launch(factor=next(factors))
            session.sync()

        for warm in (launch_and_sync, graph_and_sync, rebind_and_sync):
            timed_us(warm, 20)
        calls = []
        for _ in range(samples // CALLS + 1):
            calls += timed_us(graph.launch, CALLS)
            session.sync()
        return {
            "calls_20_us": per_call_us(launch, session.sync, samples),
            "graph_20_us": per_call_us(graph.launch, session.sync, samples),
            "graph_20_call_us": percentile(calls, 50),
            "calls_20_sync_p50_us": percentile(timed_us(launch_and_sync, samples), 50),
            "graph_20_sync_p50_us": percentile(timed_us(graph_and_sync, samples), 50),
            "graph_20_rebound_p50_us": percentile(timed_us(rebind_and_sync, samples), 50),
        }
