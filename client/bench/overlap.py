"""Times copies and kernels in two streams, compared with the same work in one."""

from dataclasses import dataclass
from functools import partial
from typing import Any, Final

import numpy as np

from gpulease.client import Buffer, GpuBuilder, GpuLeaseError, GpuSession, KernelArgs, Module, Stream
from gpulease.client.bench.figures import percentile, timed_us

PIECE_BYTES: Final = {"cuda": 64 << 20, "cpu": 1 << 20}
"""Number of bytes copied to the card and back around each kernel, by driver. A small piece suffices for the embedded
driver, which runs one operation at a time and so gains nothing from streams."""

ROUNDS: Final = {"cuda": 1000, "cpu": 1}
"""Number of multiplications per value. On a large card the kernel then takes about as long as either copy."""

PIECES: Final = 8
SAMPLES: Final = 5
THREADS: Final = 256
_MULTIPLIER: Final = 1664525
_INCREMENT: Final = 1013904223

STIR_PTX: Final = b""".version 7.0
.target sm_75
.address_size 64
.visible .entry stir(.param .u64 data, .param .u32 count, .param .u32 rounds)
{
    .reg .pred %p<3>;
    .reg .b32 %r<9>;
    .reg .b64 %rd<4>;
    ld.param.u64 %rd1, [data];
    ld.param.u32 %r1, [count];
    ld.param.u32 %r2, [rounds];
    mov.u32 %r3, %ctaid.x;
    mov.u32 %r4, %ntid.x;
    mov.u32 %r5, %tid.x;
    mad.lo.u32 %r6, %r3, %r4, %r5;
    setp.ge.u32 %p1, %r6, %r1;
    @%p1 bra DONE;
    cvta.to.global.u64 %rd2, %rd1;
    mul.wide.u32 %rd3, %r6, 4;
    add.u64 %rd2, %rd2, %rd3;
    ld.global.u32 %r7, [%rd2];
AGAIN:
    mad.lo.u32 %r7, %r7, 1664525, 1013904223;
    sub.u32 %r2, %r2, 1;
    setp.ne.u32 %p2, %r2, 0;
    @%p2 bra AGAIN;
    st.global.u32 [%rd2], %r7;
DONE:
    ret;
}
"""


class WrongOrder(GpuLeaseError):
    """A stream did not keep its order: a copy or a kernel ran before operations that were queued earlier."""


@dataclass(frozen=True, slots=True)
class _Lane:
    """The stream, the buffer and the arrays of one lane. `data` and `back` are one-dimensional arrays of uint32."""

    stream: Stream
    buffer: Buffer
    data: Any
    back: Any


def overlap(address: str, driver: str) -> dict[str, float]:
    """Return median milliseconds per piece (a copy in, a kernel, a copy back), in one stream and in two."""
    size = PIECE_BYTES[driver]
    builder = GpuBuilder(address).device("0").min_vram(2 * size).lease_secs(600)
    with builder.acquire() as lease, GpuSession(lease) as session:
        # Each of the two lanes has its own memory, so they share nothing but the card.
        module = session.module_load(STIR_PTX)
        lanes = [_lane(session, size) for _ in range(2)]
        spans = {}
        for used in (lanes[:1], lanes):
            run = partial(_run, session, module, used, ROUNDS[driver])
            # The first run is a warm-up.
            run()
            spans[len(used)] = percentile(timed_us(run, SAMPLES), 50) / PIECES / 1e3
        for lane in lanes:
            _check(lane, ROUNDS[driver])
    return {"one_stream_ms": spans[1], "two_streams_ms": spans[2], "one_to_two": spans[1] / spans[2]}


def _lane(session: GpuSession, size: int) -> _Lane:
    # Use arrays in the arena, because only their copies can continue in a stream while the program continues.
    data, read_back = (session.empty(size // 4, np.uint32) for _ in range(2))
    data[:] = np.arange(size // 4, dtype=np.uint32)
    read_back[:] = 0
    return _Lane(session.stream(), session.mem_alloc(size), data, read_back)


def _run(session: GpuSession, module: Module, lanes: list[_Lane], rounds: int) -> None:
    for at in range(PIECES):
        # Give pieces to the lanes in turn. Within a lane, the stream keeps their order.
        lane = lanes[at % len(lanes)]
        count = lane.data.size
        args = KernelArgs().push_buffer(lane.buffer).push_u32(count).push_u32(rounds)
        session.mem_write(lane.buffer, 0, lane.data, stream=lane.stream)
        session.launch(module, "stir", (-(-count // THREADS),), (THREADS,), args, stream=lane.stream)
        session.mem_read(lane.buffer, 0, lane.data.nbytes, into=lane.back, stream=lane.stream)
    session.sync()


def _check(lane: _Lane, rounds: int) -> None:
    # Each round maps x to a x + b, so all rounds together map x to A x + B, modulo 2**32. Compute A and B.
    factor, summand = 1, 0
    for _ in range(rounds):
        factor, summand = factor * _MULTIPLIER % 2**32, (summand * _MULTIPLIER + _INCREMENT) % 2**32
    if not (lane.back == lane.data * np.uint32(factor) + np.uint32(summand)).all():
        raise WrongOrder("a copy or a kernel did not wait for what was put in its stream before it")
