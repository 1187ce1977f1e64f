"""Every atomic form against its definition: what it gives and what it leaves, in each space, for drawn operands."""

import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Final

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gpulease.daemon.drivers.interface import ImageRejected, KernelFault
from helpers.atomics import outcome
from helpers.drawn_rows import Values, built, drawn_rows, one_of, whole_numbers

pytestmark = pytest.mark.exhaustive

RunBlock = Callable[..., list[list[int]]]
ComputeAll = Callable[..., dict[str, list[int]]]

FEW = settings(max_examples=3, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
MASK: Final = 2**64 - 1

# An odd number that mixes what was there with what is left into one result.
MIX: Final = 0x9E3779B97F4A7C15

# How the place is named: its space, and how %w gets its address, of 32 bytes that are the row's own.
SHARED: Final = ".shared .align 16 .b8 sh[2048];"
OWN: Final = "mov.u64 %w, sh; mad.wide.u32 %w, %i, 32, %w;"
PLACES: Final = {
    "global": (".global", "mov.u64 %w, %p;"),
    "generic global": ("", "mov.u64 %w, %p;"),
    "shared": (".shared", OWN),
    "shared::cta": (".shared::cta", OWN),
    "shared::cluster": (".shared::cluster", OWN),
    "generic shared": ("", f"{OWN} cvta.shared.u64 %w, %w;"),
}
ORDERS: Final = {"atom": ("", ".relaxed", ".acquire", ".release", ".acq_rel"), "red": ("", ".relaxed", ".release")}
SCOPES: Final = ("", ".cta", ".cluster", ".gpu", ".sys")

WORDS: Final = ("u32", "s32", "u64", "s64")
HALVES: Final = ("f16", "bf16", "f16x2", "bf16x2")
OPERATIONS: Final = {
    "add": ("u32", "s32", "u64", "f32", "f64", *HALVES),
    "min": WORDS,
    "max": WORDS,
    **dict.fromkeys(("and", "or", "xor", "exch"), ("b32", "b64")),
    "inc": ("u32",),
    "dec": ("u32",),
    "cas": ("b16", "b32", "b64"),
}
VECTORS: Final = {"f32": (2, 4), "f16": (2, 4, 8), "bf16": (2, 4, 8), "f16x2": (2, 4), "bf16x2": (2, 4)}
SIZES: Final = {"b16": 2, "f16": 2, "bf16": 2, "f16x2": 4, "bf16x2": 4, "f32": 4, "f64": 8}


@dataclass(frozen=True, slots=True)
class Form:
    """One spelling, and where it is tried."""

    opcode: str
    order: str
    place: str
    operation: str
    kind: str
    count: int = 1
    # As libcu++ spells it, with the operation in front of order and scope, and no space.
    is_operation_first: bool = False

    @property
    def bits(self) -> int:
        """The width of one number."""
        return 8 * SIZES.get(self.kind, int(self.kind[1:3]) // 8 if self.kind[1:3].isdigit() else 0)

    @property
    def body(self) -> str:
        """Start the place with parts of %a, combine parts of %b in (and of %c); what came out, and what was left."""
        space, address = PLACES[self.place]
        bits, count = self.bits, self.count
        names = {letter: [f"%{letter}{n}" for n in range(count)] for letter in "obcd"}
        declared = "".join(f".reg .b{bits} {', '.join(group)};" for group in names.values())
        operand, new, before = (listed(names[letter]) for letter in "bcd")
        cut = "".join(
            f"shr.u64 %v, {whole}, {8 * n}; cvt.u{bits}.u64 %{part}{n}, %v;"
            for part, whole in (("o", "%a"), ("b", "%b"), ("c", "%c"))
            for n in range(count)
        ).replace("cvt.u64.u64", "mov.u64")
        start = "".join(f"st{space}.b{bits} [%w+{n * bits // 8}], %o{n};" for n in range(count))
        half = ".noftz" if self.kind in HALVES else ""
        vector = f".v{count}" if count > 1 else ""
        spelling = f"{self.opcode}{self.order}{space}.{self.operation}{half}{vector}.{self.kind}"
        if self.is_operation_first:
            spelling = f"{self.opcode}.{self.operation}{self.order}.{self.kind}"
        operands = ([before] if self.opcode == "atom" else []) + ["[%w]", operand]
        operands += [new] if self.operation == "cas" else []
        mix = "".join(
            f"cvt.u64.u{bits} %v, %{part}{n}; mad.lo.u64 %d, %d, {MIX}, %v;" for part in "do" for n in range(count)
        ).replace("cvt.u64.u64", "mov.u64")
        left = "".join(f"ld{space}.b{bits} %o{n}, [%w+{n * bits // 8}];" for n in range(count))
        return f".reg .b64 %v; {declared} {address} {cut} {start} {spelling} {', '.join(operands)}; {left} {mix}"

    def expected(self, row: tuple[int, ...]) -> int:
        """The mixed results; `red` gives nothing, where zeros stand."""
        old, operand, new = ([value >> 8 * n & (1 << self.bits) - 1 for n in range(self.count)] for value in row)
        ftz = "shared" not in self.place
        left = [outcome(self.operation, self.kind, *parts, ftz=ftz) for parts in zip(old, operand, new, strict=True)]
        total = 0
        for value in (*(old if self.opcode == "atom" else [0] * self.count), *left):
            total = total * MIX + value & MASK
        return total


def listed(registers: list[str]) -> str:
    return registers[0] if len(registers) == 1 else f"{{{', '.join(registers)}}}"


def forms(operation: str, kind: str, count: int, turn: int) -> Iterator[Form]:
    """Each order, scope and place; which come together differs by the turn."""
    places = list(PLACES)[: 2 if count > 1 else None]
    for opcode, orders in ORDERS.items():
        if opcode == "atom" or operation not in ("exch", "cas"):
            for n in range(len(PLACES)):
                order = orders[(2 * n + turn) % len(orders)] + SCOPES[n % len(SCOPES)]
                yield Form(opcode, order, places[(n + turn) % len(places)], operation, kind, count)
    if count == 1 and kind not in HALVES:
        for n, order in enumerate(ORDERS["atom"][1:]):
            place = ("generic global", "generic shared")[(n + turn) % 2]
            scope = SCOPES[1 + (n + turn) % 4]
            yield Form("atom", order + scope, place, operation, kind, is_operation_first=True)


def all_forms() -> dict[str, list[Form]]:
    """By operation and type."""
    kinds = [(operation, kind, 1) for operation, some in OPERATIONS.items() for kind in some]
    kinds += [("add", kind, count) for kind, counts in VECTORS.items() for count in counts]
    found: dict[str, list[Form]] = {}
    for turn, (operation, kind, count) in enumerate(kinds):
        found.setdefault(f"{operation}.{kind}", []).extend(forms(operation, kind, count, turn))
    return found


FORMS: Final = all_forms()
EDGES: Final = {
    "f32": [0, 1 << 31, 1, 0x7FFFFF, 0x800000, 0x80800001, 0x7F800000, 0xFF800000, 0x7FC00000, 0x7F7FFFFF, 0x3F800000],
    "f64": [0, 1 << 63, 1, (1 << 52) - 1, 1 << 52, 1 << 63 | 1 << 52 | 1, 0x7FEFFFFFFFFFFFFF, 0xFFEFFFFFFFFFFFFF],
    "half": [0, 0x8000, 1, 0x8001, 0x3FF, 0x400, 0x7BFF, 0x7C00, 0xFC00, 0x7C01, 0x3F80, 0x7F80, 0x7F7F, 0xFF80],
}


def bits_of(value: float) -> int:
    return int.from_bytes(struct.pack("<d", value), "little")


def numbers(kind: str) -> Values[int]:
    """64 bits whose parts are of interest."""
    anything = whole_numbers(0, MASK)
    if kind == "f64":
        # Any bits, but an exponent that is not that of infinities and NaNs.
        finite = built(lambda bits: bits ^ (1 << 62) if bits >> 52 & 0x7FF == 0x7FF else bits, anything)
        return one_of(EDGES["f64"]) | finite | built(lambda eighths: bits_of(eighths / 8), whole_numbers(-999, 999))
    if kind == "f32":
        return built(lambda bits: bits << 32 | bits, one_of(EDGES["f32"])) | anything
    if kind in HALVES:
        half = one_of(EDGES["half"]) | whole_numbers(0, 2**16 - 1)
        return built(lambda *parts: sum(part << 16 * n for n, part in enumerate(parts)), half, half, half, half)
    tops = [edge << (bits - 1) for bits in (16, 32, 64) for edge in (1, 2)]
    return one_of([0, 1, 2, MASK, *(top - 1 for top in tops), *tops[:-1]]) | anything


@pytest.mark.parametrize("name", FORMS)
@FEW
@given(data=st.data())
def test_gives_what_was_and_leaves_what_comes_of_it(compute_all: ComputeAll, data: st.DataObject, name: str) -> None:
    operation, kind = name.split(".")
    number = numbers(kind)
    rows = data.draw(drawn_rows(number, number, number, most=24))
    if operation == "cas":
        rows += [(old, old, new) for old, _, new in rows]
    wanted = {form.body: [form.expected(row) for row in rows] for form in FORMS[name]}
    assert compute_all(wanted, ["b64"] * 3, "b64", rows, SHARED) == wanted


@pytest.mark.parametrize(
    ("spelling", "left"),
    [
        ("atom.and.relaxed.cta.b32", 4),
        ("atom.or.release.gpu.b32", 14),
        ("atom.global.gpu.relaxed.add.u32", 18),
        ("atom.global.sys.release.max.u32", 12),
        ("atom.u32.add", 18),
    ],
)
def test_order_scope_and_space_stand_where_compilers_put_them(run_block: RunBlock, spelling: str, left: int) -> None:
    text = f"""
    cvt.u32.u64 %r4, %a0; cvt.u32.u64 %r5, %a1; st.global.b32 [%area], %r4;
    {spelling} %r6, [%area], %r5; ld.global.b32 %r1, [%area];
    cvt.u64.u32 %o0, %r6; cvt.u64.u32 %o1, %r1;
    """
    assert run_block(text, [[12, 6]])[0][:2] == [12, left]


@pytest.mark.parametrize(
    "spelling", ["atom.gpu.gpu.add.u32", "atom.add.u32.u32", "atom.add.gpu.u32.s32", "atom.gpu.cta.add.u32"]
)
def test_other_spellings_are_refused(run_block: RunBlock, spelling: str) -> None:
    with pytest.raises(ImageRejected, match="this form"):
        run_block(f"{spelling} %r1, [%area], %r2;", [[0]])


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
    with pytest.raises(ImageRejected, match=r"must be on \.global or \.shared memory, not on \.param"):
        run_block("atom.add.u32 %r1, [in], 1;", [[]])
