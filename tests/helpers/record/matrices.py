"""Launches of single matrix instructions, with a warp for each of several sets of operands (PTX ISA 9.7.15.5)."""

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

import numpy as np

from helpers.record.cases import Array, Bound, Case, Result
from helpers.record.inputs import Draw, zeros

_LANES: Final = 32
_SETS: Final = 4
_SMALL: Final = 8

# For each element type: its bits, the type of the registers that contain its fragments, and that register's bits.
_ELEMENTS: Final = {
    "f16": (16, "b32", 32),
    "bf16": (16, "b32", 32),
    "tf32": (32, "b32", 32),
    "f64": (64, "f64", 64),
    "s8": (8, "b32", 32),
    "u8": (8, "b32", 32),
    "e4m3": (8, "b32", 32),
    "e5m2": (8, "b32", 32),
    "f32": (32, "f32", 32),
    "s32": (32, "s32", 32),
}

# NumPy's type with the range of each element type, if NumPy has one.
_WIDE: Final = {"f16": "f2", "bf16": "f4", "tf32": "f4", "f64": "f8"}

# The bits of 0 to 8 as floats of 8 bits. If a format has no such number, this is 0.
_BYTE_NUMBERS: Final = {
    "e4m3": np.array([0, 0x38, 0x40, 0x44, 0x48, 0x4A, 0x4C, 0x4E, 0x50], "u1"),
    "e5m2": np.array([0, 0x3C, 0x40, 0x42, 0x44, 0, 0x46, 0, 0x48], "u1"),
}


@dataclass(frozen=True, slots=True)
class Product:
    """One form of mma: d = a b + c."""

    m: int
    n: int
    k: int
    a: str
    b: str
    c: str
    d: str
    saturates: bool = False

    @property
    def text(self) -> str:
        shape, saturate = f"m{self.m}n{self.n}k{self.k}", ".satfinite" * self.saturates
        return f"mma.sync.aligned.{shape}.row.col{saturate}.{self.d}.{self.a}.{self.b}.{self.c}"

    @property
    def kernel(self) -> str:
        return self.text.removeprefix("mma.sync.aligned.").replace(".", "_")

    def registers(self, which: str) -> tuple[str, int]:
        """Return the register type of one of a, b, c and d, and how many of these registers a lane has."""
        count = {"a": self.m * self.k, "b": self.k * self.n}.get(which, self.m * self.n)
        bits, held, held_bits = _ELEMENTS[getattr(self, which)]
        return held, count * bits // held_bits // _LANES


def _products() -> Iterator[Product]:
    for k, c in itertools.product((8, 16), ("f16", "f32")):
        yield Product(16, 8, k, "f16", "f16", c, c)
    for k in (8, 16):
        yield Product(16, 8, k, "bf16", "bf16", "f32", "f32")
    for k in (4, 8):
        yield Product(16, 8, k, "tf32", "tf32", "f32", "f32")
    for m, k in ((8, 4), (16, 4), (16, 8), (16, 16)):
        yield Product(m, 8, k, "f64", "f64", "f64", "f64")
    for a, b in itertools.product(("s8", "u8"), repeat=2):
        for m, k in ((8, 16), (16, 16), (16, 32)):
            yield Product(m, 8, k, a, b, "s32", "s32", saturates=a == b)
    for a, b in itertools.product(("e4m3", "e5m2"), repeat=2):
        yield Product(16, 8, 32, a, b, "f32", "f32")


PRODUCTS: Final = tuple(_products())


def _kernel(product: Product) -> str:
    names = {}
    loads, stores, offset = "", "", 0
    for which in "abc":
        held, count = product.registers(which)
        size = int(held[1:]) // 8
        for number in range(count):
            loads += f"ld.global.{held} %{which}{number}, [%from+{offset}]; "
            offset += size
        names[which] = (held, count)
    held, count = names["d"] = product.registers("d")
    for number in range(count):
        stores += f"st.global.{held} [%to+{number * int(held[1:]) // 8}], %d{number}; "
    declared = " ".join(f".reg .{held} %{which}<{count}>;" for which, (held, count) in names.items())
    lists = {which: "{" + ", ".join(f"%{which}{n}" for n in range(count)) + "}" for which, (_, count) in names.items()}
    return f"""
.visible .entry {product.kernel}(.param .u64 operands, .param .u64 results)
{{
    .reg .b64 %from, %to; .reg .b32 %i, %n; {declared}
    mov.u32 %i, %ctaid.x; mov.u32 %n, %tid.x; mad.lo.u32 %i, %i, {_LANES}, %n;
    ld.param.u64 %from, [operands]; ld.param.u64 %to, [results];
    mad.wide.u32 %from, %i, {offset}, %from; mad.wide.u32 %to, %i, {_bytes(product, "d")}, %to;
    {loads}
    {product.text} {lists["d"]}, {lists["a"]}, {lists["b"]}, {lists["c"]};
    {stores}
    ret;
}}
"""


def _bytes(product: Product, which: str) -> int:
    held, count = product.registers(which)
    return int(held[1:]) // 8 * count


def _moves() -> Iterator[tuple[str, str]]:
    """Yield kernels' names, and their instructions on registers and shared memory that contain random bits."""
    for count, trans in itertools.product((1, 2, 4), ("", ".trans")):
        into = "{" + ", ".join(f"%d{n}" for n in range(count)) + "}"
        given = "{" + ", ".join(f"%a{n}" for n in range(count)) + "}"
        form = f"sync.aligned.m8n8.x{count}{trans}.shared.b16"
        # The 16-byte rows are in another order than the lanes.
        where = "xor.b32 %at, %n, 13; shl.b32 %at, %at, 4; add.u32 %at, %at, %sh;"
        name = form.replace(".", "_")
        yield f"ldmatrix_{name}", f"{where} ldmatrix.{form} {into}, [%at];"
        yield f"stmatrix_{name}", f"{where} stmatrix.{form} [%at], {given};"
    yield "movmatrix", "movmatrix.sync.aligned.m8n8.trans.b16 %d0, %a0;"


def _move_kernel(name: str, body: str) -> str:
    """Return a kernel in which each lane loads four words, and stores its result and its part of shared memory."""
    fill = " ".join(f"ld.global.b32 %a{n}, [%from+{4 * n}]; st.shared.b32 [%own+{4 * n}], %a{n};" for n in range(4))
    keep = " ".join(
        f"st.global.b32 [%to+{4 * n}], %d{n}; ld.shared.b32 %a{n}, [%own+{4 * n}];"
        f" st.global.b32 [%to+{16 + 4 * n}], %a{n};"
        for n in range(4)
    )
    return f"""
.visible .entry {name}(.param .u64 operands, .param .u64 results)
{{
    .shared .align 16 .b8 room[512];
    .reg .b64 %from, %to; .reg .b32 %n, %own, %at, %sh, %a<4>, %d<4>;
    mov.u32 %n, %tid.x; mov.u32 %sh, room; mad.lo.u32 %own, %n, 16, %sh;
    ld.param.u64 %from, [operands]; ld.param.u64 %to, [results];
    mad.wide.u32 %from, %n, 16, %from; mad.wide.u32 %to, %n, 32, %to;
    mov.u32 %d0, 0; mov.u32 %d1, 0; mov.u32 %d2, 0; mov.u32 %d3, 0;
    {fill}
    bar.warp.sync -1;
    {body}
    bar.warp.sync -1;
    {keep}
    ret;
}}
"""


_MOVES: Final = dict(_moves())
PTX: Final = ".version 8.7\n.target sm_90\n.address_size 64\n" + "".join(
    (*map(_kernel, PRODUCTS), *(_move_kernel(name, body) for name, body in _MOVES.items()))
)


def matrix_cases() -> Iterator[Case]:
    """Yield cases with integers, whose sums are exact in any order; fractions; special values; and data moves."""
    for product in PRODUCTS:
        yield _case(product, "whole", Bound())
        if product.d != "s32":
            yield _case(product, "fractions", _room(product))
        if product.a in _WIDE:
            yield _case(product, "special", _room(product))
    for name in _MOVES:
        words = Draw(name).bits(_LANES, 4)
        arguments = (words, Result(zeros(_LANES, 8, kind="u4")))
        yield Case(f"matrix.{name}", ("matrices",), name, (1, 1, 1), (_LANES, 1, 1), arguments)


def _room(product: Product) -> Bound:
    """Return the bound: the ISA leaves a sum's order and its precision open, from single on (section 9.7.15.5.14)."""
    greatest = {"e4m3": 448.0, "e5m2": 448.0}.get(product.a, 4.0) * {"e4m3": 448.0, "e5m2": 448.0}.get(product.b, 4.0)
    precision = {"f16": 2.0**-10, "f64": 2.0**-51}.get(product.d, 2.0**-22)
    return Bound(2 * precision, product.k * greatest * precision, "the order and precision of sums are open")


def _case(product: Product, name: str, bound: Bound) -> Case:
    d = Draw(f"{product.kernel} {name}")
    fragments = [_fragments(d, product, which, name) for which in "abc"]
    operands = np.concatenate([fragment.reshape(_SETS * _LANES, -1) for fragment in fragments], axis=1)
    kind = {"f16": "f2", "f32": "f4", "f64": "f8", "s32": "i4"}[product.d]
    count = _bytes(product, "d") // np.dtype(kind).itemsize
    result = Result(zeros(_SETS, _LANES, count, kind=kind), bound)
    shape = ((_SETS, 1, 1), (_LANES, 1, 1))
    return Case(f"matrix.{product.kernel}-{name}", ("matrices",), product.kernel, *shape, (operands, result))


def _fragments(d: Draw, product: Product, which: str, name: str) -> Array:
    """Return the bytes of one operand for all lanes. Only a has special values."""
    whole = name == "whole"
    kind = getattr(product, which)
    count = _bytes(product, which) * 8 // _ELEMENTS[kind][0]
    shape = (_SETS, _LANES, count)
    numbers = d.integers(*shape, low=-_SMALL, high=_SMALL + 1)
    if kind in ("s8", "u8", "s32"):
        values = d.bits(*shape, kind={"s8": "i1", "u8": "u1", "s32": "i4"}[kind])
    elif kind in _BYTE_NUMBERS:
        # Any bits except those of infinities and NaNs.
        bits = d.bits(*shape, kind="u1") & np.uint8(0xBB if kind == "e5m2" else 0xF7)
        values = _BYTE_NUMBERS[kind][np.abs(numbers)] if whole else bits
    else:
        values = numbers.astype("f8") if whole else d.floats(*shape, kind="f8")
        if name == "special" and which == "a":
            values = d.specials(*shape, kind=_WIDE[kind])
            # Leave out the greatest finite number: whether a sum overflows on the way depends on its order.
            values[np.isfinite(values) & (np.abs(values) > 8)] = 1
        values = _as_floats(values, kind)
    return np.frombuffer(values.tobytes(), "u1").reshape(_SETS, _LANES, -1)


def _as_floats(values: Array, kind: str) -> Array:
    """Return values rounded to the type. For tf32, surplus bits are cut off."""
    with np.errstate(all="ignore"):
        return _rounded(values, kind)


def _rounded(values: Array, kind: str) -> Array:
    if kind == "bf16":
        return (values.astype("f4").view("u4") >> 16).astype("u2")
    if kind == "tf32":
        return values.astype("f4").view("u4") & np.uint32(0xFFFFE000)
    return values.astype({"f16": "f2", "f32": "f4", "f64": "f8"}[kind])
