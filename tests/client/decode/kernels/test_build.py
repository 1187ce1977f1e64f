"""The packaged kernels: each matches its manifest, computes exactly, and is the output of its source."""

import ast
import re
from pathlib import Path

import pytest

from gpulease.client.decode.engine.kernel_library import manifest
from gpulease.client.decode.model_config import HEAD_WIDTHS, MAX_SHARE
from helpers.decode.built_kernels import COMPARED, FEW, FOLDER, builder, differing, digest, told

NAMES = sorted(path.stem for path in FOLDER.glob("*.ptx"))


def ptx(name: str) -> str:
    return (FOLDER / f"{name}.ptx").read_text()


def inexact() -> re.Pattern[str]:
    """Return the build's pattern of inexact instructions. Does not import the build, which imports Triton."""
    tree = ast.parse((FOLDER / "build.py").read_text())
    (call,) = [
        node.value
        for node in tree.body
        if isinstance(node, ast.AnnAssign)
        and ast.unparse(node.target) == "INEXACT"
        and isinstance(node.value, ast.Call)
    ]
    return re.compile(ast.literal_eval(call.args[0]))


def test_the_manifest_names_the_files() -> None:
    assert sorted(manifest().kernels) == NAMES
    assert NAMES


def test_a_file_has_the_kernel_that_the_manifest_says() -> None:
    for name in NAMES:
        facts, text = manifest().kernels[name], ptx(name)
        assert re.findall(r"\.visible \.entry (\w+)\(", text) == [facts.kernel], name
        # Triton adds two pointers after the parameters.
        assert len(re.findall(r"^\s*\.param ", text, re.MULTILINE)) == len(facts.parameters) + 2, name
        assert re.findall(r"\.reqntid (\d+)", text) == [str(facts.threads)], name
        assert (facts.shared_bytes > 0) == (".extern .shared" in text), name


def test_kernels_are_there_for_every_width_and_share_that_a_model_may_have() -> None:
    for width in HEAD_WIDTHS:
        assert f"rope_append_{width}" in NAMES
        for kind in (f"{width}", f"window_{width}"):
            for name in (f"attend_{kind}", f"attend_whole_{kind}", f"attend_prompt_{kind}", f"combine_{kind}"):
                assert manifest().kernels[name].constants["SPLIT"] == manifest().split
    assert manifest().heads >= MAX_SHARE


@pytest.mark.parametrize("instruction", ["ex2.approx.f32 a, b;", "div.full.f32 a, b, c;", "fma.rn.f32 a, b, c, d;"])
def test_an_inexact_instruction_is_found(instruction: str) -> None:
    assert inexact().search(f"\t{instruction}")


def test_every_instruction_is_exact() -> None:
    found = {name: set(instructions) for name in NAMES if (instructions := inexact().findall(ptx(name)))}
    # The source of the gates contains fused sums (`quotient`), and so does that of weights in FP8 (`exp2_fp8`).
    fused = {name for name in NAMES if re.search(r"silu|gelu|attend\w*_fp8", name)}
    assert found == {name: {"fma.rn.f32"} for name in fused}


def test_no_kernel_with_wgmma_calls_a_function() -> None:
    """The driver compiles a division to a call. In a function with calls it runs wgmma instructions one by one."""
    assert [
        name
        for name in NAMES
        if "wgmma" in ptx(name) and re.search(r"\b(?:div|sqrt|rcp)\.r[nzmp]\.|\bcall\b", ptx(name))
    ] == []


def test_no_file_tells_of_the_machine_that_compiled_it() -> None:
    assert [name for name in NAMES if re.search(r"\.(loc|file)\b|/\w+/\w+\.py", ptx(name))] == []


@pytest.mark.exhaustive
def test_the_source_compiles_to_the_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Compare all kernels, or only a few where all were compared before (helpers/decode/built_kernels.py)."""
    triton = pytest.importorskip("triton")
    found = told()
    if triton.__version__ != found["triton"]:
        pytest.skip(f"Triton {triton.__version__} is installed; the files are {found['triton']}'s")
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "cache"))
    build = builder()
    jobs = build.jobs()
    assert (found["split"], found["heads"], sorted(found["kernels"])) == (build.SPLIT, build.HEADS, sorted(jobs))
    has_been_compared = digest(jobs) == COMPARED.read_text().strip()
    assert differing(build, NAMES[:: FEW if has_been_compared else 1]) == []
