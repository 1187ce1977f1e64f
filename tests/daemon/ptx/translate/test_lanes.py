"""Threads that run together give what each gives by itself: drawn programs of arbitrary jumps, both ways."""

import itertools
import random
from collections.abc import Callable

import pytest

from gpulease.daemon.drivers.interface import KernelFault
from gpulease.daemon.ptx.limits import MAX_LANE_INSTRUCTIONS
from gpulease.daemon.ptx.parse.parser import parse
from gpulease.daemon.ptx.translate import module

pytestmark = pytest.mark.exhaustive

RunBlock = Callable[..., list[list[int]]]

# %v, %w and %f differ between threads from the start, %u and %t do not; any may later.
_HEAD = """
.reg .b32 %v, %w, %u, %t, %k, %fuel, %s, %e, %c<4>; .reg .b64 %at; .reg .f32 %y; .reg .pred %z, %x9;
mov.u32 %v, %b0; mov.u32 %w, %b1; mov.u32 %u, %ntid.x; mov.u32 %t, 3; mov.u32 %fuel, 40;
mov.u32 %s, sh; mad.lo.u32 %s, %i, 4, %s; st.shared.u32 [%s], %w; cvt.rn.f32.u32 %y, %b0;
"""
_TAIL = """
END: cvt.rzi.u32.f32 %k, %y; ld.shared.u32 %e, [%s]; xor.b32 %w, %w, %e; xor.b32 %u, %u, %t;
cvt.u64.u32 %o0, %v; cvt.u64.u32 %o1, %w; cvt.u64.u32 %o2, %u; cvt.u64.u32 %o3, %k; bra KEEP;
"""
_STEPS = (
    "add.u32 %v, %v, %w;",
    "mad.lo.u32 %w, %w, 5, %v;",
    "xor.b32 %v, %v, %u;",
    "add.u32 %u, %u, %t;",
    "mad.lo.u32 %t, %t, 3, %u;",
    "mov.u32 %t, 7;",
    "shr.u32 %u, %u, 1;",
    "add.u32 %k, %t, 9; xor.b32 %v, %v, %k;",
    "add.u32 %k, %t, %v; xor.b32 %w, %w, %k;",
    "st.shared.u32 [%s], %v;",
    "ld.shared.u32 %e, [%s]; add.u32 %v, %v, %e;",
    "and.b32 %k, %v, 63; mad.wide.u32 %at, %k, 4, %area; ld.global.u32 %e, [%at]; add.u32 %w, %w, %e;",
    "mad.wide.u32 %at, %i, 4, %area; ld.global.u32 %e, [%at+16]; xor.b32 %v, %v, %e;",
    "ld.global.u32 %e, [%area+8]; add.u32 %u, %u, %e;",
    "div.u32 %v, %v, %t;",
    "fma.rn.f32 %y, %y, 0f3F000000, 0f3F800000;",
    "setp.gt.f32 %x9, %y, 0f40400000; selp.u32 %w, %w, %v, %x9;",
    "popc.b32 %e, %v; add.u32 %t, %t, 1;",
)
# In a loop these keep a program's threads from running together, so few programs have them.
_RARE_STEPS = (
    "bar.sync 0;",
    "red.global.add.u32 [%area+1024], %v;",
    "atom.global.add.u32 %e, [%area+1028], 0; add.u32 %w, %w, 1;",
)
_WARP_STEPS = (
    "shfl.sync.bfly.b32 %e, %v, 5, 31, -1; add.u32 %v, %v, %e;",
    "shfl.sync.down.b32 %e|%x9, %w, 2, 31, -1; selp.u32 %k, 1, %e, %x9; xor.b32 %w, %w, %k;",
    "shfl.sync.up.b32 %e, %t, %t, 0x1800, -1; add.u32 %w, %w, %e;",
    "shfl.sync.idx.b32 %e, %v, %w, 0x181f, -1; xor.b32 %v, %v, %e;",
    "and.b32 %k, %v, 1; setp.ne.u32 %x9, %k, 0; vote.sync.ballot.b32 %e, %x9, -1; xor.b32 %u, %u, %e;",
    "setp.gt.u32 %x9, %v, %w; vote.sync.all.pred %x9, %x9, -1; selp.u32 %t, %t, %u, %x9;",
    "redux.sync.add.u32 %e, %v, -1; add.u32 %t, %t, %e;",
    "redux.sync.min.s32 %e, %w, -1; xor.b32 %u, %u, %e;",
    "activemask.b32 %e; xor.b32 %w, %w, %e;",
    "elect.sync %e|%x9, -1; selp.u32 %k, 1, %e, %x9; add.u32 %v, %v, %k;",
    "mov.u32 %e, %laneid; mov.u32 %k, %lanemask_lt; add.u32 %v, %v, %e; xor.b32 %w, %w, %k;",
    "mov.u32 %e, %tid.y; mov.u32 %k, %warpid; add.u32 %v, %v, %e; add.u32 %w, %w, %k;",
    "bar.warp.sync -1;",
)
_CONDITIONS = (
    "and.b32 %e, %v, 3; setp.eq.u32 %z, %e, 0;",
    "setp.lt.u32 %z, %w, %v;",
    "and.b32 %e, %u, 1; setp.eq.u32 %z, %e, 0;",
    "and.b32 %e, %t, 2; setp.ne.u32 %z, %e, 0;",
    "setp.lt.u32 %z, %i, 5;",
)


def nested_program(draw: random.Random) -> str:
    """Choices and loops in one another, as compilers write them."""
    steps = (*_STEPS, *_STEPS, *(_RARE_STEPS[:1] if draw.random() < 0.4 else ()))
    steps += _WARP_STEPS if draw.random() < 0.5 else ()
    # Where lanes part exchanges mostly lack some, so half of the programs have no such choices.
    conditions = draw.choice((_CONDITIONS, _CONDITIONS[2:4]))
    labels = itertools.count()

    counts = ("mov.u32 %c{0}, 3;", "and.b32 %c{0}, %v, 3;")[: 1 + (conditions is _CONDITIONS)]

    def sequence(depth: int) -> str:
        return "".join(draw.choice((step, step, choice, loop))(depth) for _ in range(draw.randint(1, 4)))

    def step(depth: int) -> str:
        return _drawn_step(draw, steps, conditions) + "\n"

    def choice(depth: int) -> str:
        if not depth:
            return step(depth)
        label, other = next(labels), sequence(depth - 1) if draw.random() < 0.5 else ""
        body = f"{draw.choice(conditions)} @%z bra ELSE{label};\n{sequence(depth - 1)}"
        return f"{body} bra JOIN{label};\nELSE{label}: {other}\nJOIN{label}:\n"

    def loop(depth: int) -> str:
        if not depth:
            return step(depth)
        label, times = next(labels), draw.choice(counts).format(depth)
        leave = f"{draw.choice(conditions)} @%z {draw.choice((f'bra OUT{label}', 'bra END', 'ret'))};"
        inner = sequence(depth - 1) + (leave if draw.random() < 0.4 else "") + sequence(depth - 1)
        after = draw.choice(("", f"add.u32 %v, %v, %c{depth};", f"add.u32 %u, %u, %c{depth};"))
        count = f"sub.u32 %c{depth}, %c{depth}, 1; setp.gt.s32 %z, %c{depth}, 0; @%z bra LOOP{label};"
        return f"{times} LOOP{label}: {inner} {count}\nOUT{label}: {after}\n"

    return _HEAD + sequence(3) + _TAIL


def drawn_program(draw: random.Random) -> str:
    """Blocks that end in jumps to anywhere; every jump back takes fuel, and barriers are for whoever comes."""
    count = draw.randint(2, 8)
    steps = (*_STEPS, *(_RARE_STEPS if draw.random() < 0.2 else ()))
    text = _HEAD
    for number in range(count):
        text += f"B{number}:\n" + "".join(
            f"{_drawn_step(draw, steps, _CONDITIONS)}\n" for _ in range(draw.randint(0, 3))
        )
        text += _drawn_end(draw, number, count)
    return text + _TAIL


def _drawn_step(draw: random.Random, steps: tuple[str, ...], conditions: tuple[str, ...]) -> str:
    step = draw.choice(steps)
    if draw.random() < 0.25:
        parts = [part.strip() for part in step.split(";")[:-1]]
        sign = draw.choice(("", "!"))
        return draw.choice(conditions) + " ".join(f"@{sign}%z {part};" for part in parts)
    return step


def _drawn_end(draw: random.Random, number: int, count: int) -> str:
    target = draw.randrange(count)
    guard = draw.choice(("@%z ", "@!%z ", "@%z ", ""))
    text = draw.choice(_CONDITIONS) if guard else ""
    kind = draw.random()
    if kind < 0.15:
        return "\n"
    if kind < 0.25:
        return f"{text} {guard or '@%z '}bra END;\n"
    if kind < 0.3:
        return f"{text} {guard or '@%x9 '}ret;\n"
    if target <= number:
        text += "sub.u32 %fuel, %fuel, 1; setp.eq.u32 %x9, %fuel, 0; @%x9 bra END;"
    return f"{text} {guard}bra B{target};\n"


def run_both(
    run_block: RunBlock, monkeypatch: pytest.MonkeyPatch, body: str, count: int, block: tuple[int, int, int]
) -> None:
    """Fails unless the threads' results, and what they left in memory, are the same both ways."""
    draw = random.Random(count)
    rows = [[draw.getrandbits(32), draw.getrandbits(8)] for _ in range(count)]
    start = draw.randbytes(512) + bytes(4096 - 512)
    areas = bytearray(start), bytearray(start)
    kept: list[object] = []
    for most, area in zip((MAX_LANE_INSTRUCTIONS, 0), areas, strict=True):
        with monkeypatch.context() as patch:
            patch.setattr(module, "MAX_LANE_INSTRUCTIONS", most)
            try:
                kept.append(run_block(f"// {most}\n{body}", rows, block=block, area=area))
            except KernelFault:
                # Drawn exchanges may lack lanes. How far the others have got by then is open.
                area[:] = start
                kept.append("fault")
    assert kept[0] == kept[1]
    assert areas[0] == areas[1]


@pytest.mark.parametrize("program", [drawn_program, nested_program])
@pytest.mark.parametrize("seed", range(6))
def test_drawn_programs(
    run_block: RunBlock, monkeypatch: pytest.MonkeyPatch, seed: int, program: Callable[[random.Random], str]
) -> None:
    draw = random.Random(seed)
    block = draw.choice([(1, 1, 1), (7, 1, 1), (16, 1, 1), (37, 1, 1), (5, 3, 2), (17, 2, 2), (32, 2, 1)])
    run_both(run_block, monkeypatch, program(draw), block[0] * block[1] * block[2], block)


_WRONG = (
    # A whole group's addresses in a row, but for one; one of a row that is not there, first and last and between.
    "selp.u32 %e, 0x7fffffff, 0, %z; mad.wide.u32 %at, %e, 4, %area; ld.global.u32 %w, [%at];",
    "add.u32 %k, %i, 1021; mad.wide.u32 %at, %k, 4, %area; @%z st.global.u32 [%at+4], %v;",
    "@%z st.global.u32 [%area+4101], %v;",
    "selp.u32 %e, 65536, %s, %z; ld.shared.u32 %w, [%e];",
    "selp.u32 %e, 3, %s, %z; st.shared.u32 [%e], %w;",
    "selp.b64 %at, 1, %area, %z; ld.u32 %w, [%at];",
    "selp.b64 %at, 1, %area, %z; atom.global.add.u32 %w, [%at], 1;",
    "@%z trap;",
    "@!%z bra PAST; ld.global.u32 %w, [%area+8000]; PAST:",
    "mul.lo.u32 %k, %i, 4; add.u32 %k, %k, 4080; mov.u32 %e, sh; add.u32 %e, %e, %k; @%z st.shared.u32 [%e+16], %v;",
)


@pytest.mark.parametrize("body", _WRONG)
def test_a_fault_is_the_threads_that_made_it(run_block: RunBlock, monkeypatch: pytest.MonkeyPatch, body: str) -> None:
    text = f"{_HEAD} setp.eq.u32 %z, %b2, 1; {body} {_TAIL}"
    for block, who in (((16, 1, 1), 5), ((21, 1, 1), 20), ((3, 4, 2), 16), ((8, 8, 16), 1023)):
        rows = [[number, 1, number == who] for number in range(block[0] * block[1] * block[2])]
        said = []
        for most in (MAX_LANE_INSTRUCTIONS, 0):
            with monkeypatch.context() as patch:
                patch.setattr(module, "MAX_LANE_INSTRUCTIONS", most)
                with pytest.raises(KernelFault) as caught:
                    run_block(f"// {most}\n{text}", rows, block=block)
            said.append(str(caught.value))
        assert said[0] == said[1]


@pytest.mark.parametrize("width", [1, 15, 16, 17, 33, 1024])
def test_rows_of_any_width(run_block: RunBlock, width: int) -> None:
    body = """
    mov.u32 %b2, %tid.x; mov.u32 %b3, sh; mad.lo.u32 %b3, %i, 4, %b3; st.shared.u32 [%b3], %b2; bar.sync 0;
    ld.shared.u32 %b4, [%b3]; cvt.u64.u32 %o0, %b4; mov.u32 %b5, %laneid; cvt.u64.u32 %o1, %b5;
    mov.u32 %b5, %tid.y; cvt.u64.u32 %o2, %b5;
    """
    height = min(1024 // width, 3)
    kept = run_block(body, [[]] * (width * height), block=(width, height, 1))
    assert [row[:3] for row in kept] == [[n % width, n % 32, n // width] for n in range(width * height)]


def test_which_kernels_run_together(kernel_of: Callable[[str], str]) -> None:
    """What has no place in vectors stays with one thread at a time; the rest does not."""
    cases = {
        "": True,
        "setp.lt.u32 %x0, %i, 3; @%x0 bra L; L: bar.sync 0;": True,
        "setp.lt.u32 %x0, %i, 3; @%x0 bra L; bar.sync 0; L:": False,
        "setp.lt.u32 %x0, %i, 3; @%x0 bar.sync 0;": False,
        "setp.lt.u32 %x0, %n, 3; @%x0 bra L; bar.sync 0; L:": True,
        "setp.lt.u32 %x0, %i, 3; @%x0 bra L; ret; L: bar.sync 0;": True,
        "L: ld.volatile.global.u32 %b0, [%area]; setp.eq.u32 %x0, %b0, 0; @%x0 bra L;": False,
    }
    for body, expected in cases.items():
        (part,) = module.translate(parse(kernel_of("mov.u64 %o0, %a0;" + body)))
        assert ("%given" in part.text) == expected, body


# %s is 64 bytes before a word of the thread's own in shared memory, so for the first threads it lies before address 0.
_BEFORE = """
.reg .b32 %s, %e, %t; .reg .b64 %at; .local .align 8 .b8 lo[16]; .reg .pred %z;
mov.u32 %s, sh; mad.lo.u32 %s, %i, STRIDE, %s; add.s32 %s, %s, -64;
"""
_WRAPPED = {
    "words side by side": (4, "st.shared.u32 [%s+64], %b0; ld.shared.u32 %e, [%s+64];"),
    "words apart": (12, "st.shared.u32 [%s+64], %b0; ld.shared.u32 %e, [%s+64];"),
    "pairs": (8, "st.shared.v2.u32 [%s+64], {%i, %b0}; ld.shared.v2.u32 {%t, %e}, [%s+64];"),
    "some lanes": (4, "mov.u32 %e, %b0; setp.gt.u32 %z, %i, 2; @!%z bra OVER; st.shared.u32 [%s+64], %b0;"
                      " ld.shared.u32 %e, [%s+64]; OVER: mov.u32 %t, 0;"),
    "an atomic": (4, "st.shared.u32 [%s+64], 0; atom.shared.add.u32 %t, [%s+64], %b0; ld.shared.u32 %e, [%s+64];"),
    "one address": (4, "mov.u32 %s, sh; add.s32 %s, %s, -64; st.shared.u32 [%s+64], 7; ld.shared.u32 %e, [%s+64];"
                       " add.u32 %e, %e, %b0; sub.u32 %e, %e, 7;"),
    "local memory": (4, "mov.u32 %s, lo; add.s32 %s, %s, -64; st.local.u32 [%s+72], %b0; ld.local.u32 %e, [%s+72];"),
    "an offset that goes down": (4, "add.s32 %s, %s, 132; st.shared.u32 [%s+-68], %b0; ld.shared.u32 %e, [%s+-68];"),
}  # fmt: skip


@pytest.mark.parametrize("together", [True, False])
@pytest.mark.parametrize("case", _WRAPPED)
def test_a_32_bit_address_wraps_with_its_offset(
    run_block: RunBlock, monkeypatch: pytest.MonkeyPatch, case: str, together: bool
) -> None:
    if not together:
        monkeypatch.setattr(module, "MAX_LANE_INSTRUCTIONS", 0)
    stride, access = _WRAPPED[case]
    body = f"// {together}\n" + _BEFORE.replace("STRIDE", str(stride)) + f"{access} cvt.u64.u32 %o0, %e;"
    rows = [[1000 + 17 * n] for n in range(64)]
    assert [kept[0] for kept in run_block(body, rows)] == [row[0] for row in rows]


@pytest.mark.parametrize("together", [True, False])
def test_an_address_that_lies_outside_when_it_has_wrapped_is_a_fault(
    run_block: RunBlock, monkeypatch: pytest.MonkeyPatch, together: bool
) -> None:
    if not together:
        monkeypatch.setattr(module, "MAX_LANE_INSTRUCTIONS", 0)
    body = f"// {together}\n" + _BEFORE.replace("STRIDE", "4") + "ld.shared.u32 %e, [%s+60]; cvt.u64.u32 %o0, %e;"
    with pytest.raises(KernelFault) as caught:
        run_block(body, [[0]] * 64)
    assert caught.value.address == 2**32 - 4
