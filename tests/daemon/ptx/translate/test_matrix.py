"""mma, ldmatrix, stmatrix and movmatrix: every lane's part, with drawn elements."""

import math
import random
import struct
from collections.abc import Callable, Sequence

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gpulease.daemon.drivers.interface import ImageRejected, KernelFault
from gpulease.daemon.ptx.translate import module
from helpers.exact import KINDS, Kind, signed
from helpers.matrices import FORMATS, SHAPES, Place, Shape, dot, of_bytes

pytestmark = pytest.mark.exhaustive

RunBlock = Callable[..., list[list[int]]]
Matrix = list[list[int]]
FEW = settings(max_examples=2, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
LANES = [(lane >> 2, lane & 3) for lane in range(32)]


@pytest.fixture(params=["together", "apart"])
def run_block(run_block: RunBlock, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> RunBlock:
    """Both ways of running a warp; the comment sets their code apart."""
    if request.param == "apart":
        monkeypatch.setattr(module, "MAX_LANE_INSTRUCTIONS", 0)
    return lambda body, *rest, **options: run_block(f"// {request.param}\n{body}", *rest, **options)


UNPACK = "".join(f"mov.b64 {{%r{2 * n}, %r{2 * n + 1}}}, %a{n};" for n in range(6))


def parts(matrix: Matrix, place: Place, count: int, bits: int) -> list[list[int]]:
    """Each lane's elements as 32-bit words (of 64-bit elements: those)."""
    found = []
    for g, t in LANES:
        elements = [matrix[row][column] for row, column in (place(g, t, i) for i in range(count))]
        per_word = max(1, 32 // bits)
        words = [elements[n : n + per_word] for n in range(0, count, per_word)]
        found.append([sum(value << bits * n for n, value in enumerate(word)) for word in words])
    return found


def together(words: Sequence[Sequence[int]], place: Place, count: int, shape: Shape, bits: int) -> Matrix:
    """The other way round, of a result."""
    matrix = [[0] * shape.n for _ in range(shape.m)]
    per_word = max(1, 32 // bits)
    for (g, t), kept in zip(LANES, words, strict=True):
        for i in range(count):
            row, column = place(g, t, i)
            matrix[row][column] = kept[i // per_word] >> bits * (i % per_word) & (1 << bits) - 1
    return matrix


def multiply(
    run_block: RunBlock, spelling: str, shape: Shape, bits: tuple[int, int, int], matrices: Sequence[Matrix]
) -> Matrix:
    """Run one mma whose registers are 32 bits wide."""
    a_bits, c_bits, d_bits = bits
    held = [
        parts(matrix, place, count, width)
        for matrix, place, count, width in zip(
            matrices, (shape.a, shape.b, shape.c), shape.counts, (a_bits, a_bits, c_bits), strict=True
        )
    ]
    names, start = [], 0
    for part in held:
        names.append("{" + ", ".join(f"%r{start + n}" for n in range(len(part[0]))) + "}")
        start += len(part[0])
    results = shape.counts[2] * d_bits // 32
    into = "{" + ", ".join(f"%r{n}" for n in range(results)) + "}"
    keep = "".join(f"cvt.u64.u32 %o{n}, %r{n};" for n in range(results))
    words = [a + b + c for a, b, c in zip(*held, strict=True)]
    rows = [[low | high << 32 for low, high in zip(w[::2], [*w, 0][1::2], strict=False)] for w in words]
    kept = run_block(f"{UNPACK} {spelling} {into}, {names[0]}, {names[1]}, {names[2]}; {keep}", rows)
    return together(kept, shape.c, shape.counts[2], shape, d_bits)


def drawn(draw: random.Random, rows: int, columns: int, kind: Kind, way: str) -> Matrix:
    """Numbers of like size, whose sums cancel; any finite ones; special values among them."""

    def one() -> int:
        bits = draw.getrandbits(kind.bits)
        if way == "near" or draw.random() < 0.3:
            bits = (kind.bias << kind.digits) + draw.randint(-2, 1) * (1 << kind.digits) + draw.getrandbits(kind.digits)
            return bits | draw.getrandbits(1) * kind.sign
        if way == "zeros" and draw.random() < 0.6:
            return draw.getrandbits(1) * kind.sign
        is_finite = bits & kind.nan < kind.infinity
        return bits if is_finite or (way == "special" and draw.random() < 0.05) else bits & ~kind.infinity

    return [[one() for _ in range(columns)] for _ in range(rows)]


FLOATS = [
    (f"mma.sync.aligned.{shape}.row.col.{d}.{a}.{b}.{c}", shape, a, b, c, d)
    for shape, a, b, c, d in [
        *(("m16n8k16", "f16", "f16", c, d) for c in ("f16", "f32") for d in ("f16", "f32")),
        ("m16n8k8", "f16", "f16", "f32", "f32"),
        ("m16n8k8", "f16", "f16", "f16", "f16"),
        ("m16n8k8", "bf16", "bf16", "f32", "f32"),
        ("m16n8k16", "bf16", "bf16", "f32", "f32"),
        ("m16n8k4", "tf32", "tf32", "f32", "f32"),
        ("m16n8k8", "tf32", "tf32", "f32", "f32"),
        ("m16n8k32", "e5m2", "e4m3", "f32", "f32"),
        ("m16n8k32", "e4m3", "e5m2", "f32", "f32"),
    ]
]


@pytest.mark.parametrize(("spelling", "shape", "a", "b", "c", "d"), FLOATS)
def test_floats(run_block: RunBlock, spelling: str, shape: str, a: str, b: str, c: str, d: str) -> None:
    kinds = FORMATS[a], FORMATS[b]
    bits = kinds[0].bits
    layout = SHAPES[f"{shape}.{bits}"]

    @FEW
    @given(st.randoms(use_true_random=True), st.sampled_from(["near", "any", "special", "zeros"]))
    def run(draw: random.Random, way: str) -> None:
        left, right = drawn(draw, layout.m, layout.k, kinds[0], way), drawn(draw, layout.k, layout.n, kinds[1], way)
        added = drawn(draw, layout.m, layout.n, KINDS[c], way)
        given_bits = bits, KINDS[c].bits, KINDS[d].bits
        found = multiply(run_block, spelling, layout, given_bits, (left, right, added))
        if a == "tf32":
            left, right = ([[v & ~0x1FFF for v in row] for row in matrix] for matrix in (left, right))
        for row in range(layout.m):
            for column in range(layout.n):
                factors = [line[column] for line in right]
                if bits == 8:
                    expected = of_bytes(left[row], factors, added[row][column], (a, b))
                else:
                    expected = dot(left[row], factors, added[row][column], kinds, KINDS[c], KINDS[d])
                assert found[row][column] == expected, (row, column)

    run()


@pytest.mark.parametrize("seed", range(4))
def test_products_in_a_row_are_as_products_apart(run_block: RunBlock, seed: int) -> None:
    draw = random.Random(seed)

    def product() -> str:
        d, a, b, c = (", ".join(f"%r{draw.randrange(10)}" for _ in range(count)) for count in (2, 2, 1, 2))
        guard = draw.choice(["", "", "@%x0 "])
        return f"{guard}mma.sync.aligned.m16n8k8.row.col.f16.f16.f16.f16 {{{d}}}, {{{a}}}, {{{b}}}, {{{c}}};"

    products = [product() for _ in range(20)]
    products[7] = f"AGAIN: {products[7]}"
    end = "setp.ne.u32 %x1, %r15, 0; mov.u32 %r15, 0; @%x1 bra AGAIN;"
    keep = "".join(f"mov.b64 %o{n}, {{%r{2 * n}, %r{2 * n + 1}}};" for n in range(4))
    start = f"{UNPACK} mov.u32 %r15, 1; setp.eq.u32 %x0, 0, 0;"
    rows = [[draw.getrandbits(64) & 0x3BFF_3BFF_3BFF_3BFF for _ in range(6)] for _ in range(32)]
    together, apart = ("".join(products), "bar.warp.sync -1;".join(products))
    assert run_block(f"{start} {together} {end} {keep}", rows) == run_block(f"{start} {apart} {end} {keep}", rows)


BYTES = [
    (shape, a, b, stops)
    for shape in ("m8n8k16", "m16n8k16", "m16n8k32")
    for a, b, stops in (("s8", "s8", ".satfinite"), ("u8", "s8", ""), ("s8", "u8", ".satfinite"), ("u8", "u8", ""))
]


@pytest.mark.parametrize(("shape", "a", "b", "stops"), BYTES)
def test_bytes(run_block: RunBlock, shape: str, a: str, b: str, stops: str) -> None:
    draw, layout = random.Random(f"{shape}{a}{b}"), SHAPES[f"{shape}.8"]
    left = [draw.randbytes(layout.k) for _ in range(layout.m)]
    right = [draw.randbytes(layout.n) for _ in range(layout.k)]
    ends = (0, 1, 2**31 - 1, 2**31 - 1000, 2**31, 2**31 + 1000)
    added = [[draw.choice(ends) for _ in range(layout.n)] for _ in range(layout.m)]
    spelling = f"mma.sync.aligned.{shape}.row.col{stops}.s32.{a}.{b}.s32"
    matrices = [list(map(list, left)), list(map(list, right)), added]
    found = multiply(run_block, spelling, layout, (8, 32, 32), matrices)
    for row in range(layout.m):
        for column in range(layout.n):
            total = signed(added[row][column], 32)
            for x, y in zip(left[row], (line[column] for line in right), strict=True):
                total += (signed(x, 8) if a == "s8" else x) * (signed(y, 8) if b == "s8" else y)
            if stops:
                total = max(-(2**31), min(2**31 - 1, total))
            assert found[row][column] == total % 2**32


@pytest.mark.parametrize("shape", ["m8n8k4", "m16n8k4", "m16n8k8", "m16n8k16"])
def test_doubles(run_block: RunBlock, shape: str) -> None:
    draw, layout = random.Random(3), SHAPES[f"{shape}.64"]
    sizes = ((layout.m, layout.k), (layout.k, layout.n), (layout.m, layout.n))
    numbers = [[[draw.uniform(-4, 4) for _ in range(columns)] for _ in range(rows)] for rows, columns in sizes]
    as_bits = [[[struct.unpack("<Q", struct.pack("<d", v))[0] for v in row] for row in matrix] for matrix in numbers]
    places = (layout.a, layout.b, layout.c)
    held = [parts(m, place, n, 64) for m, place, n in zip(as_bits, places, layout.counts, strict=True)]
    names, start = [], 0
    for count in layout.counts:
        names.append("{" + ", ".join(f"%v{start + n}" for n in range(count)) + "}")
        start += count
    into = "{" + ", ".join(f"%o{n}" for n in range(layout.counts[2])) + "}"
    own = ".reg .b64 %v<16>; mul.wide.u32 %d0, %i, 128; add.u64 %d0, %area, %d0;"
    take = "".join(f"ld.global.u64 %v{n}, [%d0+{8 * n}];" for n in range(start))
    text = f"{own} {take} mma.sync.aligned.{shape}.row.col.f64.f64.f64.f64 {into}, {', '.join(names)};"
    area = bytearray(b"".join(struct.pack(f"<{start}Q", *a, *b, *c).ljust(128) for a, b, c in zip(*held, strict=True)))
    kept = run_block(text, [[]] * 32, area=area)
    found = together(kept, layout.c, layout.counts[2], layout, 64)
    for row in range(layout.m):
        for column in range(layout.n):
            factors = zip(numbers[0][row], (line[column] for line in numbers[1]), strict=True)
            exact = math.fsum([numbers[2][row][column], *(x * y for x, y in factors)])
            (number,) = struct.unpack("<d", struct.pack("<Q", found[row][column]))
            assert math.isclose(number, exact, rel_tol=1e-13, abs_tol=1e-14)


# 32 rows of 8 halves; lane n gives the address of row 7n + 3, so rows come from everywhere.
HALVES = [[(row * 8 + column) * 37 & 0xFFFF for column in range(8)] for row in range(32)]
PLACES = """shl.b32 %r14, %i, 4; cvt.u64.u32 %d2, %r14; add.u64 %d2, %area, %d2; mov.u32 %r13, sh;
add.u32 %r13, %r13, %r14;"""
FILL = f"{PLACES} ld.global.v2.u64 {{%d3, %d4}}, [%d2]; st.shared.v2.u64 [%r13], {{%d3, %d4}}; bar.warp.sync -1;"
COPY = "bar.warp.sync -1; ld.shared.v2.u64 {%d3, %d4}, [%r13]; st.global.v2.u64 [%d2], {%d3, %d4};"
ADDRESS = "mul.lo.u32 %r15, %i, 7; add.u32 %r15, %r15, 3; and.b32 %r15, %r15, 31; shl.b32 %r15, %r15, 4;"
GENERIC = "cvt.u64.u32 %d1, %r15; cvta.shared.u64 %d1, %d1;"


def row_of(lane: int) -> int:
    return (7 * lane + 3) % 32


def area_of(rows: Matrix) -> bytearray:
    return bytearray(b"".join(struct.pack("<8H", *row) for row in rows).ljust(4096, b"\0"))


def element(matrices: Matrix, g: int, t: int, n: int, half: int, trans: bool) -> int:
    row, column = (2 * t + half, g) if trans else (g, 2 * t + half)
    return matrices[8 * n + row][column]


@pytest.mark.parametrize("count", [1, 2, 4])
@pytest.mark.parametrize(("trans", "space"), [("", ""), (".trans", ".shared::cta")])
def test_matrices_are_loaded(run_block: RunBlock, count: int, trans: str, space: str) -> None:
    names = ", ".join(f"%r{n}" for n in range(count))
    place = "%r15" if space else "%d1"
    keep = "".join(f"cvt.u64.u32 %o{n}, %r{n};" for n in range(count))
    text = f"{FILL} {ADDRESS} {GENERIC} ldmatrix.sync.aligned.m8n8.x{count}{trans}{space}.b16 {{{names}}}, [{place}];"
    kept = run_block(text + keep, [[]] * 32, area=area_of(HALVES))
    matrices = [HALVES[row_of(lane)] for lane in range(32)]
    for (g, t), words in zip(LANES, kept, strict=True):
        for n in range(count):
            halves = [element(matrices, g, t, n, half, trans != "") for half in (0, 1)]
            assert words[n] == halves[0] | halves[1] << 16


@pytest.mark.parametrize("count", [1, 2, 4])
@pytest.mark.parametrize(("trans", "space"), [("", ""), (".trans", ".shared"), ("", ".shared::cta")])
def test_matrices_are_stored(run_block: RunBlock, count: int, trans: str, space: str) -> None:
    rows = []
    for g, t in LANES:
        words = [[element(HALVES, g, t, n, half, trans != "") for half in (0, 1)] for n in range(count)]
        rows.append([low | high << 16 for low, high in words])
    names = ", ".join(f"%b{n}" for n in range(count))
    place = "%r15" if space else "%d1"
    store = f"stmatrix.sync.aligned.m8n8.x{count}{trans}{space}.b16 [{place}], {{{names}}};"
    area = bytearray(4096)
    run_block(f"{FILL} {ADDRESS} {GENERIC} {store} {COPY}", rows, area=area)
    expected = [[0] * 8 for _ in range(32)]
    for lane in range(8 * count):
        expected[row_of(lane)] = HALVES[lane]
    assert area == area_of(expected)


def test_a_matrix_is_turned_over(run_block: RunBlock) -> None:
    rows = [[HALVES[g][2 * t] | HALVES[g][2 * t + 1] << 16] for g, t in LANES]
    kept = run_block("movmatrix.sync.aligned.m8n8.trans.b16 %b0, %b0; cvt.u64.u32 %o0, %b0;", rows)
    assert [row[0] for row in kept] == [HALVES[2 * t][g] | HALVES[2 * t + 1][g] << 16 for g, t in LANES]


LOAD_ONE = "ldmatrix.sync.aligned.m8n8.x1.shared.b16 {%r1}, [%b0];"


def test_only_the_rows_taken_must_be_there(run_block: RunBlock) -> None:
    run_block(LOAD_ONE, [[16 * lane if lane < 8 else 4096] for lane in range(32)])
    for place, fault in ((4096, "illegal shared address 0x1000"), (8, "misaligned shared address 0x8")):
        with pytest.raises(KernelFault, match=fault):
            run_block(LOAD_ONE, [[place if lane == 7 else 0] for lane in range(32)])


def test_the_warp_must_be_whole(run_block: RunBlock) -> None:
    with pytest.raises(KernelFault, match="needs a whole warp executed with lanes 0x00000fff alone"):
        run_block(LOAD_ONE, [[0]] * 12)
    with pytest.raises(KernelFault, match="lanes 0xfffffffe alone"):
        run_block(f"setp.eq.u32 %x0, %i, 0; @%x0 ret; {LOAD_ONE}", [[0]] * 32)
    with pytest.raises(KernelFault, match="never complete"):
        run_block(f"setp.eq.u32 %x0, %i, 0; @%x0 bra ONE; {LOAD_ONE} ONE: bar.sync 0;", [[0]] * 32)


@pytest.mark.parametrize(
    "text",
    [
        "mma.sync.aligned.m8n8k4.row.col.f32.f16.f16.f32 {%r0}, {%r0}, {%r0}, {%r0};",
        "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%r0,%r1}, {%r0}, {%r0}, {%r0};",
        "mma.sync.aligned.m16n8k16.col.col.f32.f16.f16.f32 {%r0}, {%r0}, {%r0}, {%r0};",
        "mma.sync.aligned.m8n8k32.row.col.s32.s4.s4.s32 {%r0,%r1}, {%r0}, {%r0}, {%r0,%r1};",
        "mma.sync.aligned.m16n8k8.row.col.f16.f16.f16.f16 {%r0,%r1}, {%d0,%r1}, {%r0}, {%r0,%r1};",
        "mma.sync.aligned.m16n8k8.row.col.f16.f16.f16.f16 {%r0,3}, {%r0,%r1}, {%r0}, {%r0,%r1};",
        "ldmatrix.sync.aligned.m8n8.x2.shared.b16 {%r0}, [sh];",
        "ldmatrix.sync.aligned.m8n8.x1.shared.b16 {%r0}, [in];",
        "ldmatrix.sync.aligned.m8n8.x1.shared.b16 {%r0}, %r1;",
        "ldmatrix.sync.aligned.m8n8.x1.global.b16 {%r0}, [%area];",
        "stmatrix.sync.aligned.m8n8.x1.shared.b16 [sh], {%f0, %r0};",
        "movmatrix.sync.aligned.m8n8.trans.b16 %h0, %h1;",
    ],
)
def test_others_are_refused(run_block: RunBlock, text: str) -> None:
    with pytest.raises(ImageRejected):
        run_block(text, [[]])
