"""Spellings that mean the same in this driver do the same: spaces, scopes, orders, layouts of fragments."""

from collections.abc import Callable, Sequence

import pytest

from gpulease.daemon.drivers.interface import ImageRejected

pytestmark = pytest.mark.exhaustive

RunBlock = Callable[..., list[list[int]]]

SPACES = (".shared", ".shared::cta", ".shared::cluster", "")
SCOPES = ("", ".cta", ".cluster")
ORDERS = ("", ".release", ".relaxed")


def spelled(head: str, *slots: Sequence[str]) -> list[str]:
    """Every choice of each slot, with the others' first."""
    first = [slot[0] for slot in slots]
    found = [head + "".join(first)]
    for number, slot in enumerate(slots):
        found += [head + "".join([*first[:number], choice, *first[number + 1 :]]) for choice in slot[1:]]
    return found


CHANGES = [
    (spelled("mbarrier.inval", SPACES), "", ""),
    (spelled("mbarrier.expect_tx", ("", ".relaxed"), SCOPES, SPACES), "", ", 24"),
    (spelled("mbarrier.complete_tx", ("", ".relaxed"), SCOPES, SPACES), "", ", 24"),
    (spelled("mbarrier.arrive", ("", ".noComplete"), ORDERS, SCOPES, SPACES), "%d6, ", ", 2"),
    (spelled("mbarrier.arrive_drop", ("", ".noComplete"), ORDERS, SCOPES, SPACES), "%d6, ", ", 2"),
    (spelled("mbarrier.arrive.expect_tx", ORDERS, SCOPES, SPACES), "%d6, ", ", 8"),
    (spelled("mbarrier.arrive_drop.expect_tx", ORDERS, SCOPES, SPACES), "%d6, ", ", 8"),
    (spelled("cp.async.mbarrier.arrive.noinc", SPACES[:2] + SPACES[3:]), "", ""),
    (spelled("cp.async.mbarrier.arrive", SPACES[:2] + SPACES[3:]), "", ""),
]
GENERIC = "mov.u64 %d1, sh; cvta.shared.u64 %d1, %d1; mov.u64 %d7, 0; mov.u64 %d6, 0;"


@pytest.mark.parametrize("number", range(len(CHANGES)))
def test_barriers_in_memory(run_block: RunBlock, number: int) -> None:
    spellings, into, rest = CHANGES[number]
    text = GENERIC
    for n, spelling in enumerate(spellings):
        base = "sh" if "shared" in spelling else "%d1"
        space = SPACES[n % len(SPACES)]
        start = f"mbarrier.init{space}.b64 [{'sh' if space else '%d1'}+{8 * n}], 5;"
        text += f"{start} {spelling}.b64 {into}[{base}+{8 * n}]{rest};"
        text += f"ld.shared.u64 %d5, [sh+{8 * n}]; add.u64 %d5, %d5, %d6;"
        text += "mov.u64 %d4, %d5;" if n == 0 else "xor.b64 %d5, %d5, %d4; or.b64 %d7, %d7, %d5;"
    kept = run_block(text + "mov.u64 %o0, %d7; mov.u64 %o1, %d4;", [[]])
    assert kept[0][0] == 0
    assert (kept[0][1] == 0) == ("inval" in spellings[0])


@pytest.mark.parametrize("way", ["test_wait", "try_wait"])
def test_waits(run_block: RunBlock, way: str) -> None:
    orders = ("", ".acquire", ".relaxed")
    text = GENERIC + "mbarrier.init.shared.b64 [sh], 1; mbarrier.arrive.shared.b64 %d6, [sh]; mov.u32 %r1, 0;"
    spellings = spelled(f"mbarrier.{way}", orders, SCOPES, SPACES)
    spellings += spelled(f"mbarrier.{way}.parity", orders, SCOPES, SPACES)
    for spelling in spellings:
        base, state = "sh" if "shared" in spelling else "%d1", "0" if "parity" in spelling else "%d6"
        text += f"{spelling}.b64 %x0, [{base}], {state}; selp.u32 %r2, 1, 0, %x0; add.u32 %r1, %r1, %r2;"
    assert run_block(text + "cvt.u64.u32 %o0, %r1;", [[]])[0][0] == len(spellings)


FRAGMENTS = [
    *(("a", "m16n16k16", kind, count) for kind, count in (("f16", 8), ("bf16", 4), ("s8", 2), ("u8", 2))),
    ("b", "m32n8k16", "f16", 8),
    ("a", "m16n16k8", "tf32", 4),
    ("b", "m16n16k8", "tf32", 4),
    *((part, "m8n8k4", "f64", 2 if part == "c" else 1) for part in "abc"),
    ("c", "m16n16k16", "f16", 4),
    ("c", "m8n32k16", "s32", 8),
    ("c", "m16n16k8", "f32", 8),
]
PLACES = {".global": "%area", ".shared": "sh", ".shared::cta": "sh", "": "%d1"}
FILL = """shl.b32 %r14, %i, 5; cvt.u64.u32 %d2, %r14; add.u64 %d2, %area, %d2; mov.u32 %r13, sh;
add.u32 %r13, %r13, %r14;
mov.u64 %d3, 1000003; mul.wide.u32 %d4, %i, 77777; mul.lo.u64 %d4, %d4, %d3;
st.global.v2.u64 [%d2], {%d3, %d4}; st.global.v2.u64 [%d2+16], {%d4, %d2};
st.shared.v2.u64 [%r13], {%d3, %d4}; st.shared.v2.u64 [%r13+16], {%d4, %d2}; mov.u64 %d7, 0;
mov.u64 %d1, sh; cvta.shared.u64 %d1, %d1; mov.u64 %d6, 0; bar.warp.sync -1;"""


def registers(kind: str, count: int, start: int = 0) -> str:
    if kind == "f64":
        return "{" + ", ".join(f"%g{start + n}" for n in range(count)) + "}"
    return "{" + ", ".join(f"%r{start + n}" for n in range(count)) + "}"


@pytest.mark.parametrize(("part", "shape", "kind", "count"), FRAGMENTS)
@pytest.mark.parametrize("layout", ["row", "col"])
def test_matrices_in_all_spaces(run_block: RunBlock, part: str, shape: str, kind: str, count: int, layout: str) -> None:
    text = FILL
    for n, (space, place) in enumerate(PLACES.items()):
        into = registers(kind, count)
        text += f"wmma.load.{part}.sync.aligned.{layout}.{shape}{space}.{kind} {into}, [{place}]; mov.u64 %d5, 0;"
        for r in range(count):
            wide = f"mov.b64 %d0, %g{r};" if kind == "f64" else f"cvt.u64.u32 %d0, %r{r};"
            text += f"{wide} mad.lo.u64 %d5, %d5, 1000003, %d0;"
        text += "mov.u64 %d6, %d5;" if n == 0 else "xor.b64 %d5, %d5, %d6; or.b64 %d7, %d7, %d5;"
        if part == "c" and n == 0:
            text += stores(layout, shape, kind, into)
    kept = run_block(text + "mov.u64 %o0, %d7; mov.u64 %o1, %d6;", [[]] * 32, area=bytearray(4096))
    assert [row[0] for row in kept] == [0] * 32
    assert any(row[1] for row in kept)


def stores(layout: str, shape: str, kind: str, given: str) -> str:
    """Store a fragment by every space, 1 KiB apart, and collect in %d7 where a lane's share of the bytes differs."""
    text = ""
    for space, place in ((".global", "%area"), (".shared", "sh"), (".shared::cta", "sh"), ("", "%d1")):
        at = {".global": 1024, ".shared": 1024, ".shared::cta": 2048, "": 3072}[space]
        text += f"wmma.store.d.sync.aligned.{layout}.{shape}{space}.{kind} [{place}+{at}], {given};"
    text += "bar.warp.sync -1; ld.global.u64 %d3, [%d2+1024];"
    loads = "ld.shared.u64 %d4, [%r13+{at}]; xor.b64 %d4, %d4, %d3; or.b64 %d7, %d7, %d4;"
    size = {"f16": 512, "f64": 512}.get(kind, 1024)
    clear = f"shl.b32 %r14, %i, 5; setp.lt.u32 %x0, %r14, {size}; mov.u32 %r13, sh; add.u32 %r13, %r13, %r14;"
    return (
        text
        + clear
        + "".join(f"@%x0 {part.strip()};" for at in (1024, 2048, 3072) for part in loads.format(at=at).split(";")[:-1])
    )


LAYOUTS = [(left, right) for left in ("row", "col") for right in ("row", "col")]
PRODUCTS = [
    ("m16n16k8.f32.tf32.tf32.f32", "tf32", (4, 4, 8), [""]),
    ("m16n16k16.s32.s8.u8.s32", "s8", (2, 2, 8), ["", ".satfinite"]),
    ("m8n8k4.f64.f64.f64.f64", "f64", (1, 1, 2), ["", ".rn"]),
]


@pytest.mark.parametrize(("form", "kind", "counts", "ends"), PRODUCTS)
def test_products_of_fragments_by_any_layout(
    run_block: RunBlock, form: str, kind: str, counts: tuple[int, int, int], ends: list[str]
) -> None:
    text = "mov.u64 %d7, 0;" + "".join(f"mov.u32 %r{n}, %b{n % 4}; mov.b64 %g{n % 4}, %a{n % 4};" for n in range(16))
    into = ("%f" if kind == "tf32" else "%r", counts[2])
    results = registers(kind, 2, 4) if kind == "f64" else "{" + ", ".join(f"{into[0]}{n}" for n in range(8)) + "}"
    a, b = registers(kind, counts[0]), registers(kind, counts[1], 1)
    c = registers(kind, 2, 2) if kind == "f64" else "{" + ", ".join(f"%r{8 + n}" for n in range(8)) + "}"
    for n, (left, right, end) in enumerate((x, y, end) for x, y in LAYOUTS for end in ends):
        if kind != "f64":
            text += "".join(f"mov.u32 %r{k}, %b{k % 4};" for k in range(8))
        text += f"wmma.mma.sync.aligned.{left}.{right}.{form}{end} {results}, {a}, {b}, {c}; mov.u64 %d5, 0;"
        for r in range(counts[2]):
            taken = {"f64": f"mov.b64 %d0, %g{4 + r};", "tf32": f"mov.b32 %r0, %f{r}; cvt.u64.u32 %d0, %r0;"}
            text += f"{taken.get(kind, f'cvt.u64.u32 %d0, %r{r};')} mad.lo.u64 %d5, %d5, 1000003, %d0;"
        text += "mov.u64 %d6, %d5;" if n == 0 else "xor.b64 %d5, %d5, %d6; or.b64 %d7, %d7, %d5;"
    rows = [[0x3F8000003F800000 + (n * 37 + k * 11 << 13) for k in range(4)] for n in range(32)]
    kept = run_block(text + "mov.u64 %o0, %d7; mov.u64 %o1, %d6;", rows)
    assert [row[0] for row in kept] == [0] * 32
    assert any(row[1] for row in kept)


# Instructions on a predicate, words, and single and double floats, whose result is in %e; then the same in other orders
# of their modifiers, all of which ptxas 13.0 takes. CUB writes vote.ballot.sync.
ORDERS_OF_MODIFIERS = {
    "vote.sync.ballot.b32 %e, %q, -1": ["vote.ballot.sync.b32", "vote.b32.ballot.sync", "vote.sync.b32.ballot"],
    "vote.sync.any.pred %p, %q, -1": ["vote.any.sync.pred", "vote.pred.any.sync"],
    "shfl.sync.up.b32 %e, %a, 1, 0, -1": ["shfl.up.sync.b32", "shfl.b32.sync.up"],
    "match.any.sync.b32 %e, %a, -1": ["match.sync.any.b32", "match.b32.any.sync"],
    "redux.sync.add.u32 %e, %a, -1": ["redux.add.sync.u32", "redux.u32.sync.add"],
    "add.rn.ftz.sat.f32 %x, %f, %g": ["add.sat.ftz.rn.f32", "add.f32.rn.sat.ftz"],
    "add.rz.ftz.f32 %x, %f, %g": ["add.ftz.rz.f32", "add.f32.ftz.rz"],
    "div.approx.ftz.f32 %x, %f, %g": ["div.ftz.approx.f32", "div.f32.ftz.approx"],
    "min.ftz.NaN.f32 %x, %f, %g": ["min.NaN.ftz.f32", "min.f32.NaN.ftz"],
    "add.sat.s32 %e, %a, %b": ["add.s32.sat"],
    "bfind.shiftamt.u32 %e, %a": ["bfind.u32.shiftamt"],
    "shf.l.wrap.b32 %e, %a, %b, 5": ["shf.l.b32.wrap"],
    "cvt.rni.ftz.sat.s32.f32 %e, %f": ["cvt.sat.ftz.rni.s32.f32", "cvt.s32.f32.rni.sat.ftz", "cvt.s32.rni.f32.ftz.sat"],
    "cvt.rn.sat.f32.f64 %x, %h": ["cvt.sat.rn.f32.f64", "cvt.f32.f64.sat.rn"],
    "setp.lt.and.ftz.f32 %p, %f, %g, %q": ["setp.and.lt.ftz.f32", "setp.ftz.f32.and.lt"],
    "set.lt.and.ftz.u32.f32 %e, %f, %g, %q": ["set.and.ftz.lt.u32.f32", "set.u32.ftz.f32.and.lt"],
    "ld.volatile.global.u32 %e, [%area]": ["ld.global.volatile.u32", "ld.u32.global.volatile"],
    "atom.relaxed.gpu.global.max.u32 %e, [%area], %a": ["atom.max.global.gpu.relaxed.u32", "atom.global.u32.max"],
    "prmt.b32.f4e %e, %a, %b, %n": ["prmt.f4e.b32"],
    "testp.finite.f32 %p, %f": ["testp.f32.finite"],
}


@pytest.mark.parametrize("instruction", ORDERS_OF_MODIFIERS)
def test_modifiers_in_any_order_that_ptxas_takes(run_block: RunBlock, instruction: str) -> None:
    spelling, operands = instruction.split(" ", 1)
    seen = []
    for one in (spelling, *ORDERS_OF_MODIFIERS[instruction]):
        body = f"""{{
        .reg .b32 %a, %b, %e; .reg .f32 %f, %g, %x; .reg .f64 %h; .reg .pred %p, %q; .reg .b32 %y;
        mov.u32 %a, %b0; mov.u32 %b, %b1; cvt.rn.f32.s32 %f, %b0; mov.f32 %g, 0f3F99999A; cvt.f64.f32 %h, %f;
        setp.gt.s32 %q, %b1, 0; setp.gt.s32 %p, %b1, 5; mov.u32 %e, 0; mov.f32 %x, 0f00000000;
        {one} {operands};
        mov.b32 %y, %x; selp.u32 %b2, 1, 0, %p; cvt.u64.u32 %o0, %e; cvt.u64.u32 %o1, %y; cvt.u64.u32 %o2, %b2;
        }}"""
        rows = [[n * 7919 - 90_000, n % 11 - 4] for n in range(32)]
        seen.append(run_block(body, rows, area=bytearray(4096)))
    assert any(any(kept[:3]) for kept in seen[0])
    assert all(kept == seen[0] for kept in seen[1:])


@pytest.mark.parametrize(
    "instruction",
    [
        "mul.s32.lo %e, %a, %a;",
        "mul24.u32.lo %e, %a, %a;",
        "shf.wrap.l.b32 %e, %a, %a, 5;",
        "bar.sync.warp -1;",
        "cvt.rn.s32.f32 %e, %f;",
        "cvt.f32.rni.s32 %e, %f;",
        "vote.sync.ballot.ballot.b32 %e, %q, -1;",
        "mma.sync.aligned.m16n8k8.col.row.f32.f16.f16.f32 {%f, %f, %f, %f}, {%a, %a}, {%a}, {%f, %f, %f, %f};",
    ],
)
def test_orders_that_mean_something_else_or_nothing_are_refused(run_block: RunBlock, instruction: str) -> None:
    with pytest.raises(ImageRejected, match="is not supported"):
        run_block(f"{{ .reg .b32 %a, %e; .reg .f32 %f; .reg .pred %q; {instruction} }}", [[]])
