"""Every atomic form against its definition: what it gives and what it leaves, in each space, for drawn operands."""

import struct
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gpulease.daemon.drivers.interface import ImageRejected, KernelFault

RunBlock = Callable[..., list[list[int]]]
Step = Callable[[int, int], int]

FEW = settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])

# How the place is named: its space, and how %d0 gets its address.
PLACES = {
    "global": (".global", "mov.u64 %d0, %area;"),
    "shared": (".shared", "mov.u64 %d0, sh;"),
    "shared::cta": (".shared::cta", "mov.u64 %d0, sh;"),
    "generic global": ("", "mov.u64 %d0, %area;"),
    "generic shared": ("", "mov.u64 %d0, sh; cvta.shared.u64 %d0, %d0;"),
}


def signed(value: int, bits: int) -> int:
    return value - (1 << bits) if value >> (bits - 1) else value


def integer(kind: str, operation: str) -> Step:
    bits = int(kind[1:])

    def number(value: int) -> int:
        return signed(value, bits) if kind[0] == "s" else value

    table: dict[str, Step] = {
        "add": lambda old, b: old + b,
        "min": lambda old, b: old if number(old) <= number(b) else b,
        "max": lambda old, b: old if number(old) >= number(b) else b,
        "and": lambda old, b: old & b,
        "or": lambda old, b: old | b,
        "xor": lambda old, b: old ^ b,
        "exch": lambda old, b: b,
        "inc": lambda old, b: 0 if old >= b else old + 1,
        "dec": lambda old, b: b if old == 0 or old > b else old - 1,
    }
    return lambda old, b: table[operation](old, b) % (1 << bits)


FORMS = [
    *(("add", kind) for kind in ("u32", "s32", "u64")),
    *((operation, kind) for operation in ("min", "max") for kind in ("u32", "s32", "u64", "s64")),
    *((operation, kind) for operation in ("and", "or", "xor", "exch") for kind in ("b32", "b64")),
    ("inc", "u32"),
    ("dec", "u32"),
]


def change(place: str, spelling: str, bits: int, *, with_red: bool = False) -> str:
    """Start the place with %a0, combine %a1 in, keep what came out and what was left; and what `red` leaves beside."""
    space, address = PLACES[place]
    register = {16: "%h", 32: "%r", 64: "%d"}[bits]
    narrow, widen = (f"cvt.u{bits}.u64", f"cvt.u64.u{bits}") if bits < 64 else ("mov.u64", "mov.u64")
    names = {"d": f"{register}6", "b": f"{register}5", "c": f"{register}7"}
    atom = spelling.format(space=space, a="[%d0]", **names)
    red = spelling.replace("atom", "red").replace("{d}, ", "").format(space=space, a="[%d0+16]", **names)
    return f"""
    {address} {narrow} {register}4, %a0; {narrow} {register}5, %a1; {narrow} {register}7, %a2;
    st{space}.b{bits} [%d0], {register}4; st{space}.b{bits} [%d0+16], {register}4;
    {atom} {red if with_red else ""}
    ld{space}.b{bits} {register}1, [%d0]; ld{space}.b{bits} {register}2, [%d0+16];
    {widen} %o0, {register}6; {widen} %o1, {register}1; {widen} %o2, {register}2;
    """


@pytest.mark.parametrize("place", [place for place in PLACES if place != "shared::cta"])
@pytest.mark.parametrize(("operation", "kind"), FORMS)
def test_integers(run_block: RunBlock, place: str, operation: str, kind: str) -> None:
    bits = int(kind[1:])
    with_red = operation != "exch"
    text = change(place, f"atom{{space}}.{operation}.{kind} {{d}}, {{a}}, {{b}};", bits, with_red=with_red)
    step = integer(kind, operation)
    edges = st.sampled_from([0, 1, 2, (1 << bits) - 1, 1 << (bits - 1), (1 << (bits - 1)) - 1])
    values = st.one_of(edges, st.integers(0, (1 << bits) - 1))

    @settings(FEW, max_examples=8)
    @given(values, values)
    def run(old: int, operand: int) -> None:
        expected = step(old, operand)
        assert run_block(text, [[old, operand]])[0][:3] == [old, expected, expected if with_red else old]

    run()


@pytest.mark.parametrize(
    ("spelling", "left"),
    [
        ("atom.and.relaxed.cta.b32", 4),
        ("atom.or.release.gpu.b32", 14),
        ("atom{space}.gpu.relaxed.add.u32", 18),
        ("atom{space}.sys.release.max.u32", 12),
    ],
)
def test_order_scope_and_space_stand_where_compilers_put_them(run_block: RunBlock, spelling: str, left: int) -> None:
    text = change("global", f"{spelling} {{d}}, {{a}}, {{b}};", 32, with_red=True)
    assert run_block(text, [[12, 6]])[0][:3] == [12, left, left]


@pytest.mark.parametrize(
    "spelling", ["atom.gpu.gpu.add.u32", "atom.add.u32.u32", "atom.u32.add", "atom.gpu.cta.add.u32"]
)
def test_other_spellings_are_refused(run_block: RunBlock, spelling: str) -> None:
    with pytest.raises(ImageRejected, match="this form"):
        run_block(f"{spelling} %r1, [%area], %r2;", [[0]])


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("bits", [16, 32, 64])
def test_compare_and_swap(run_block: RunBlock, place: str, bits: int) -> None:
    text = change(place, f"atom{{space}}.cas.b{bits} {{d}}, {{a}}, {{b}}, {{c}};", bits)
    top = (1 << bits) - 1
    for old, expected, new in [(5, 5, top), (5, 6, 7), (top, top, 0), (0, top, 1), (1 << (bits - 1), 0, 1)]:
        assert run_block(text, [[old, expected, new]])[0][:2] == [old, new if old == expected else old]


def flushed(bits: int) -> int:
    return bits & 0x80000000 if not bits & 0x7F800000 else bits


def sum_f32(left: int, right: int, *, ftz: bool) -> int:
    if ftz:
        left, right = flushed(left), flushed(right)
    with np.errstate(all="ignore"):
        total = np.array(left, "u4").view("f4") + np.array(right, "u4").view("f4")
    if np.isnan(total):
        return 0x7FFFFFFF
    found = int(total.view("u4"))
    return flushed(found) if ftz else found


SINGLES = st.one_of(
    st.sampled_from([0, 0x80000000, 1, 0x80000001, 0x007FFFFF, 0x00800000, 0x80800001, 0x7F800000, 0xFF800000]),
    st.sampled_from([0x7FC00000, 0x7F7FFFFF, 0x3F800000]),
    st.integers(0, 2**32 - 1),
)


@pytest.mark.parametrize("place", PLACES)
def test_f32_sums_flush_in_global_memory_only(run_block: RunBlock, place: str) -> None:
    text = change(place, "atom{space}.add.f32 {d}, {a}, {b};", 32, with_red=True)

    @FEW
    @given(SINGLES, SINGLES)
    def run(old: int, operand: int) -> None:
        expected = sum_f32(old, operand, ftz="global" in place)
        assert run_block(text, [[old, operand]])[0][:3] == [old, expected, expected]

    run()


@pytest.mark.parametrize("place", PLACES)
def test_f64_sums(run_block: RunBlock, place: str) -> None:
    text = change(place, "atom{space}.add.f64 {d}, {a}, {b};", 64)

    @FEW
    @given(st.floats(allow_nan=False, allow_infinity=False), st.floats(allow_nan=False))
    def run(old: float, operand: float) -> None:
        pattern, other = (struct.unpack("<Q", struct.pack("<d", value))[0] for value in (old, operand))
        with np.errstate(all="ignore"):
            total = struct.unpack("<Q", (np.float64(old) + np.float64(operand)).tobytes())[0]
        assert run_block(text, [[pattern, other]])[0][:2] == [pattern, total]

    run()


def sum_half(kind: str, left: int, right: int) -> int:
    """By exact arithmetic in f64, then one rounding."""
    if kind == "f16":
        with np.errstate(all="ignore"):
            parts = np.array([left, right], "u2").view("f2").astype("f8")
            total = (parts[0] + parts[1]).astype("f2")
        return 0x7FFF if np.isnan(total) else int(total.view("u2"))
    wide = (np.array([left, right], "u4") << np.uint32(16)).view("f4").astype("f8")
    with np.errstate(all="ignore"):
        total = wide[0] + wide[1]
    return 0x7FFF if np.isnan(total) else round_bf16(float(total), left & right & 0x8000)


def round_bf16(total: float, zero_sign: int) -> int:
    """A double to bf16, to nearest even: all its bits above the 16th of f32's pattern, by comparing neighbours."""
    if total == 0:
        return zero_sign
    sign, size = (0x8000 if total < 0 else 0), abs(total)
    largest = 0x7F7F

    def value(bits: int) -> float:
        return 2.0**128 if bits == 0x7F80 else struct.unpack("<f", struct.pack("<I", bits << 16))[0]

    low, high = 0, largest + 1
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if value(middle) <= size else (low, middle)
    below, above = size - value(low), value(high) - size
    return sign | (high if above < below or (above == below and low & 1) else low)


@pytest.mark.parametrize("place", ["global", "shared", "generic shared"])
@pytest.mark.parametrize("kind", ["f16", "bf16", "f16x2", "bf16x2"])
def test_half_sums(run_block: RunBlock, place: str, kind: str) -> None:
    width = 32 if kind.endswith("x2") else 16
    text = change(place, f"atom{{space}}.add.noftz.{kind} {{d}}, {{a}}, {{b}};", width, with_red=True)
    edges = [0, 0x8000, 1, 0x8001, 0x3FF, 0x400, 0x7BFF, 0x7C00, 0xFC00, 0x7C01, 0x3F80, 0x7F80, 0x7F7F, 0xFF80]
    one = st.one_of(st.sampled_from(edges), st.integers(0, 2**16 - 1))
    halves = st.lists(one, min_size=width // 16, max_size=width // 16)

    @settings(FEW, max_examples=40)
    @given(halves, halves)
    def run(old: list[int], operand: list[int]) -> None:
        def pack(parts: list[int]) -> int:
            return sum(part << 16 * n for n, part in enumerate(parts))

        expected = pack([sum_half(kind.removesuffix("x2"), *pair) for pair in zip(old, operand, strict=True)])
        assert run_block(text, [[pack(old), pack(operand)]])[0][:3] == [pack(old), expected, expected]

    run()


@pytest.mark.parametrize("space", [".global", ""])
@pytest.mark.parametrize(
    ("form", "count", "size"),
    [("v2.f32", 2, 4), ("v4.f32", 4, 4)]
    + [(f"noftz.v{n}.{kind}", n, 2) for n in (2, 4, 8) for kind in ("f16", "bf16")]
    + [(f"noftz.v{n}.{kind}", n, 4) for n in (2, 4) for kind in ("f16x2", "bf16x2")],
)
def test_vectors(run_block: RunBlock, space: str, form: str, count: int, size: int) -> None:
    kind = form.split(".")[-1]
    registers = [f"{'%h' if size == 2 else '%r'}{n}" for n in range(2 * count)]
    operands, results = (", ".join(part) for part in (registers[:count], registers[count:]))
    one = {"f16": 0x3C00, "bf16": 0x3F80, "f16x2": 0x3C003C00, "bf16x2": 0x3F803F80, "f32": 0x3F800000}[kind]
    two = {"f16": 0x4000, "bf16": 0x4000, "f16x2": 0x40004000, "bf16x2": 0x40004000, "f32": 0x40000000}[kind]
    sets = "".join(f"mov.b{8 * size} {register}, {one};" for register in registers[:count])
    text = f"""
    {{ .reg .b16 %h<16>; {sets}
    atom{space}.add.{form} {{{results}}}, [%area], {{{operands}}};
    red{space}.add.{form} [%area+32], {{{operands}}};
    cvt.u64.u{8 * size} %o0, {registers[-1]}; cvt.u64.u{8 * size} %o1, {registers[count]}; }}
    """
    area = bytearray(4096)
    for start in (0, 32):
        area[start : start + size * count] = one.to_bytes(size, "little") * count
    kept = run_block(text, [[]], area=area)
    assert kept[0][:2] == [one, one]
    for start in (0, 32):
        assert area[start : start + size * count] == two.to_bytes(size, "little") * count
        assert not any(area[start + size * count : start + 32])


@pytest.mark.parametrize("order", ["relaxed", "acquire", "release", "acq_rel", ""])
@pytest.mark.parametrize("scope", ["cta", "cluster", "gpu", "sys", ""])
def test_orders_and_scopes(run_block: RunBlock, order: str, scope: str) -> None:
    given_ = "".join(f".{part}" for part in (order, scope) if part)
    text = change("global", f"atom{given_}{{space}}.add.u32 _, {{a}}, {{b}};", 32)
    assert run_block(text, [[40, 2]])[0][1] == 42


def test_all_threads_of_all_blocks_count(run_block: RunBlock) -> None:
    area = bytearray(4096)
    text = "atom.global.add.u32 %r1, [%area], 1; red.global.max.u32 [%area+4], %i; red.shared.add.u32 [sh], 1;"
    run_block(text, [[]] * 100, grid=7, area=area)
    assert struct.unpack_from("<2I", area) == (700, 99)


def test_accesses_are_checked(run_block: RunBlock) -> None:
    with pytest.raises(KernelFault, match=r"illegal address 0x4 \(4-byte atomic\)"):
        run_block("mov.u64 %d0, 4; atom.add.u32 %r1, [%d0], 1;", [[]])
    with pytest.raises(KernelFault, match=r"misaligned address .* \(8-byte atomic\)"):
        run_block("atom.global.add.u64 %d1, [%area+4], 1;", [[]])
    with pytest.raises(KernelFault, match=r"illegal shared address 0x1000 \(4-byte atomic\)"):
        run_block("red.shared.add.u32 [sh+4096], 1;", [[]])


@pytest.mark.parametrize(
    "text",
    [
        "atom.global.add.L2::cache_hint.u32 %r1, [%area], 1, %d0;",
        "atom.global.add.u16 %h1, [%area], %h2;",
        "atom.global.exch.b128 %d1, [%area], %d2;",
        "red.acquire.gpu.global.add.u32 [%area], 1;",
        "atom.shared.add.v2.f32 {%f1, %f2}, [sh], {%f3, %f4};",
        "atom.global.min.f32 %f1, [%area], %f2;",
        "red.global.exch.b32 [%area], 1;",
    ],
)
def test_others_are_refused(run_block: RunBlock, text: str) -> None:
    with pytest.raises(ImageRejected, match="is not supported"):
        run_block(text, [[]])


def test_there_are_none_on_other_memory(run_block: RunBlock) -> None:
    with pytest.raises(ImageRejected, match=r"no atomic operations on \.param memory"):
        run_block("atom.add.u32 %r1, [in], 1;", [[]])
