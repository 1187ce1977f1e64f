import random
import tracemalloc
from contextlib import suppress
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpulease.daemon.drivers.interface import ImageRejected
from gpulease.daemon.ptx import limits
from gpulease.daemon.ptx.parse import declarations
from gpulease.daemon.ptx.parse.parser import parse
from gpulease.daemon.ptx.parse.syntax import Address, DeclaredVariable, Integer, PredicateGuard, Register, Target
from gpulease.daemon.ptx.translate.module import translate

VECTORS = sorted((Path(__file__).parents[4] / "vectors" / "gpu").glob("*.ptx"))
HEAD = ".version 8.0\n.target sm_75\n.address_size 64\n"
TEXTS = [path.read_text() for path in VECTORS if "programs" not in path.name and path.stat().st_size < 40_000]


def kernel(body: str) -> str:
    return f"{HEAD}.visible .entry k(.param .u64 p)\n{{\n{body}\n}}\n"


def rejection(text: str) -> ImageRejected:
    with pytest.raises(ImageRejected) as caught:
        translate(parse(text))
    return caught.value


@pytest.mark.parametrize("path", VECTORS, ids=lambda p: p.name)
def test_reads_what_nvcc_writes(path: Path) -> None:
    image = parse(path.read_text())
    assert image.functions
    assert image.target.startswith("sm_")


def test_the_tree_of_an_instruction() -> None:
    tree = parse(kernel(".reg .b32 %r<3>; .reg .pred %q;\nL:\n@!%q bra L;\nld.param.u32 %r2, [p+4];"))
    branch, load = tree.functions[0].instructions
    assert isinstance(branch.guard, PredicateGuard)
    assert branch.guard.negated
    assert branch.operands == (Target("L", 0),)
    assert branch.line == 8
    assert load.spelling == "ld.param.u32"
    into, address = load.operands
    assert isinstance(into, Register)
    assert into.name == "%r2"
    assert isinstance(address, Address)
    assert isinstance(address.base, DeclaredVariable)
    assert address.offset == 4


def test_names_in_inner_blocks_hide_outer_ones() -> None:
    tree = parse(kernel(".reg .b32 %t; { .reg .b64 %t; mov.b64 %t, 1; L: bra L; } mov.b32 %t, 0x10U; L: bra L;"))
    inner, jump, outer, later = tree.functions[0].instructions
    assert [i.operands[0].type.name for i in (inner, outer) if isinstance(i.operands[0], Register)] == ["b64", "b32"]
    assert outer.operands[1] == Integer(16)
    assert (jump.operands[0], later.operands[0]) == (Target("L", 1), Target("L", 3))


def test_parameters_are_laid_out_by_their_alignment() -> None:
    tree = parse(
        HEAD + ".entry k(.param .u8 a, .param .align 16 .b8 s[20], .param .u64 .ptr .global .align 4 p) { ret; }"
    )
    function = tree.functions[0]
    assert [(p.offset, p.size) for p in function.parameters] == [(0, 1), (16, 20), (40, 8)]
    assert function.parameter_bytes == 48


def test_initialisers_become_bytes() -> None:
    tree = parse(HEAD + ".global .align 4 .u16 a[3] = {1, -1}; .const .f32 c = 0f3F800000; .global .f64 d[] = {0.5};")
    assert [v.initial.hex() for v in tree.variables] == ["0100ffff", "0000803f", "000000000000e03f"]
    assert [v.size for v in tree.variables] == [6, 4, 8]


@pytest.mark.parametrize(
    ("text", "line", "said"),
    [
        ("", 1, "must begin with .version"),
        (HEAD + ".entry k() { ret }", 4, "expected an operand"),
        (HEAD + ".entry k() {", 4, "begins no statement"),
        (HEAD + ".entry k() { ret; } .entry k() { ret; }", 4, "k is declared twice"),
        (HEAD.replace("64", "32"), 3, "64-bit addresses"),
        (HEAD + ".global .u32 x[99999999999999];", 4, "bytes"),
        (HEAD + ".extern .global .u32 x;", 4, "defined nowhere"),
        (HEAD + "/* never closed " + "/* " * 100_000, 4, "never ends"),
        (kernel(".reg .b32 %r<999999999>;"), 6, "999999999 registers"),
        (kernel(".reg .b32 %r<5>; .reg .b64 %r<5>;"), 6, "%r is declared twice"),
        (kernel(".reg .b32 %r<5>; .reg .b64 %r3;"), 6, "%r3 is declared twice"),
        (kernel(".reg .b32 %r<20>; .reg .b64 %r1<5>;"), 6, "%r1 is declared twice"),
        (kernel("L: L: ret;"), 6, "L is declared twice"),
        (kernel("\nbra nowhere;"), 7, "unknown name nowhere"),
        (kernel(".reg .b32 %r<2>;\nmov.b32 %r1, %r2;"), 7, "%r2 is neither declared"),
        (kernel(".reg .b32 %r<2>;\nmov.b32 %r1, %tid.q;"), 7, "%tid.q is neither declared"),
        (kernel(".reg .b32 %r<2>;\nld.global.u32 %r1, [%rd7];"), 7, "unknown name %rd7"),
        (kernel(".reg .b32 %r<2>;\nsuld.b %r1, %r1;"), 7, "the instruction suld.b is not supported"),
        (
            kernel("tex.2d.v4.f32.f32 {_, _, _, _}, [a, {0, 0}];"),
            6,
            "tex.2d.v4.f32.f32 is not supported by the embedded driver: read and write plain memory instead",
        ),
        (
            kernel("cp.async.bulk.tensor.2d.global [a, {0, 0}], [a];"),
            6,
            "cp.async.bulk.tensor.2d.global is not supported by the embedded driver: compile for sm_80",
        ),
        (
            kernel("wgmma.mma_async.sync.aligned.m64n256k16.f32.f16.f16 {" + ", ".join(["%f"] * 128) + "}, 1, 1;"),
            6,
            "wgmma.mma_async.sync.aligned.m64n256k16.f32.f16.f16 is not supported by the embedded driver: compile for",
        ),
        (kernel(".reg .b32 %r<2>;\nadd.cc.u16 %r1, %r1, 1;"), 7, "this form of add.cc.u16 is not supported"),
        (kernel(".reg .f32 %f;\nadd.rna.f32 %f, %f, %f;"), 7, "this form of add.rna.f32"),
        (kernel(".reg .f32 %f;\nadd.s32 %f, %f, %f;"), 7, "%f is .f32, not .s32"),
        (kernel(".reg .b64 %d;\nadd.s32 %d, 1, 2;"), 7, "%d is .b64, not .s32"),
        (kernel(".reg .b32 %r;\nmov.b32 %r, 0d3FF0000000000000;"), 7, "constant can't be read as .b32"),
        (kernel(".reg .b16 %h;\nld.global.u32 %h, [%h];"), 7, "can't hold an address"),
        (
            kernel(".reg .pred %p; .reg .b64 %d;\nld.global.u64 %d, [%p];"),
            7,
            "%p is .pred, which can't hold an address",
        ),
        (kernel(".reg .e4m3 %h;"), 6, "the type must be one that this driver supports, not '.e4m3'"),
        (kernel("{" * 1000), 6, "blocks in one another"),
        (kernel(".shared .b8 s[49153];"), 6, "over 49152 bytes of .shared"),
        (kernel(".local .b8 s[65537];"), 6, "over 65536 bytes of .local"),
        (kernel("bar.sync 16;"), 6, "barriers are numbered 0 to 15"),
        (kernel("ret; \x01"), 6, "unexpected character"),
        (kernel(".reg .b32 %r; mov.b32 %r, " + "9" * 5000 + ";"), 6, "expected a number"),
    ],
)
def test_a_refusal_names_line_and_reason(text: str, line: int, said: str) -> None:
    error = rejection(text)
    assert said in str(error)
    assert error.line == line
    assert said in error.log


def test_debug_sections_are_skipped_however_they_are_broken_into_lines() -> None:
    sections = ".section .debug_macinfo {\t}\n.section .debug_str\n{\n.b8 1\n.b32 .debug_line\n} .section .x { {} }"
    assert [function.name for function in parse(kernel("ret;") + sections).functions] == ["k"]


def test_a_refusal_names_the_kernel() -> None:
    assert "of kernel k:" in str(rejection(kernel("nonsense.x;")))


@pytest.mark.parametrize("space", ["global", "const", "shared", "local"])
@pytest.mark.parametrize(
    ("lengths", "said"),
    [
        ("[18446744073709551620]", "does not fit 64 bits"),
        ("[0x10000000000000004]", "does not fit 64 bits"),
        ("[4][18446744073709551617]", "does not fit 64 bits"),
        ("[4294967296][4294967297]", "has 73786976312018075648 bytes"),
        ("[9223372036854775809][2]", "bytes"),
        ("[-4]", "found '-'"),
    ],
)
def test_an_array_size_never_wraps_to_a_small_one(space: str, lengths: str, said: str) -> None:
    declared = f".{space} .b32 x{lengths};"
    body = declared if space in ("shared", "local") else ""
    text = f"{HEAD}{'' if body else declared} .entry k() {{ {body} ret; }}"
    with pytest.raises(ImageRejected, match=said):
        parse(text)


@pytest.mark.parametrize(
    "text",
    [
        ".entry k() { .reg .b32 %r<18446744073709551617>; ret; }",
        ".entry k(.param .align 18446744073709551620 .b32 p) { ret; }",
        ".entry k() .maxntid 18446744073709551620 { ret; }",
        ".entry k() .reqntid 1, 18446744073709551617 { ret; }",
        ".global .align 18446744073709551620 .b32 x;",
    ],
)
def test_no_other_number_of_a_declaration_wraps_either(text: str) -> None:
    with pytest.raises(ImageRejected, match="does not fit 64 bits"):
        parse(HEAD + text)


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    "text",
    [
        kernel(".reg .b32 " + ", ".join(f"%n{k}x" for k in range(limits.MAX_REGISTERS_PER_FUNCTION + 1)) + ";"),
        HEAD + ".entry k(" + ", ".join(f".param .u64 p{k}" for k in range(600)) + ") { ret; }",
        kernel("mov.b32 " + "_," * 100_000 + "_;"),
        kernel(".reg .b32 %r; mov.b32 %r, {" + "%r," * 100_000 + "%r};"),
        kernel("ret;" * (limits.MAX_INSTRUCTIONS + 1)),
        HEAD + "".join(f".entry k{k}() {{ ret; }}\n" for k in range(limits.MAX_FUNCTIONS + 1)),
        HEAD + ".entry k() .maxntid 0, 1, 1 { ret; }",
        HEAD + ".global .align 3 .b8 x;",
        HEAD + ".section .debug_info { " + "{" * 100_000,
    ],
    ids=range(9),
)
def test_large_numbers_of_anything_are_refused_in_little_time_and_memory(text: str) -> None:
    rejection(text)


def test_more_initialisers_than_a_variable_has_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(declarations, "MAX_INITIALISERS", 1000)
    parse(HEAD + ".global .b8 x[] = {" + "1," * 999 + "1};")
    with pytest.raises(ImageRejected, match="more than 1000 initialisers"):
        parse(HEAD + ".global .b8 x[] = {" + "1," * 1000 + "1};")


def test_declared_ranges_cost_nothing() -> None:
    text = kernel("".join(f".reg .b32 %q{chr(97 + k)}<{limits.MAX_REGISTERS_PER_RANGE}>;" for k in range(26)) + "ret;")
    tracemalloc.start()
    try:
        parse(text)
        assert tracemalloc.get_traced_memory()[1] < 10_000_000
    finally:
        tracemalloc.stop()


def only_rejected(text: str) -> None:
    with suppress(ImageRejected):
        translate(parse(text))


@pytest.mark.exhaustive
@settings(max_examples=150, deadline=None)
@given(st.text(max_size=200) | st.text(alphabet='{}()[];,.:@!+-<>=%r0123456789 \nabcdefx/*"', max_size=300))
def test_noise_is_only_ever_rejected(noise: str) -> None:
    only_rejected(noise)
    only_rejected(HEAD + noise)
    only_rejected(kernel(noise))


@settings(max_examples=40, deadline=None)
@given(st.sampled_from(TEXTS), st.floats(0, 1))
def test_truncated_text_is_only_ever_rejected(text: str, part: float) -> None:
    only_rejected(text[: int(len(text) * part)])


PIECES = [
    ".",
    ";",
    ",",
    "{",
    "}",
    "[",
    "]",
    "%r1",
    "%rd1",
    "0",
    "-1",
    ".u32",
    ".f64",
    ".v4",
    "@",
    "!",
    "|",
    "+",
    "bra",
    "_",
]


@pytest.mark.exhaustive
@settings(max_examples=60, deadline=None)
@given(st.sampled_from(TEXTS), st.integers(0, 2**32), st.sampled_from(["drop", "double", "swap", "insert"]))
def test_mangled_kernels_are_only_ever_rejected(text: str, seed: int, way: str) -> None:
    rng = random.Random(seed)
    words = text.split(" ")
    for _ in range(rng.randrange(1, 4)):
        at, other = rng.randrange(len(words)), rng.randrange(len(words))
        match way:
            case "drop" if len(words) > 1:
                words.pop(at)
            case "double":
                words.insert(at, words[at])
            case "swap":
                words[at] = words[other]
            case _:
                words.insert(at, rng.choice(PIECES))
    only_rejected(" ".join(words))
