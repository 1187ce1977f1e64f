"""The packaged kernels: each matches its manifest, is exact, and is what its source compiles to."""

import ast
import importlib
import json
import re
from pathlib import Path
from typing import Any

import pytest

import gpulease.client.decode.kernels as kernels
from gpulease.client.decode.engine.kernel_library import manifest
from gpulease.client.decode.model_config import HEAD_WIDTHS, MAX_SHARE

FOLDER = Path(kernels.__path__[0])
NAMES = sorted(path.stem for path in FOLDER.glob("*.ptx"))


def ptx(name: str) -> str:
    return (FOLDER / f"{name}.ptx").read_text()


def inexact() -> re.Pattern[str]:
    """The build's pattern of instructions that are not exact, without importing it, and so Triton."""
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


@pytest.mark.parametrize("name", NAMES)
def test_a_file_has_the_kernel_that_the_manifest_says(name: str) -> None:
    facts, text = manifest().kernels[name], ptx(name)
    assert re.findall(r"\.visible \.entry (\w+)\(", text) == [facts.kernel]
    # Triton puts two pointers behind the parameters.
    assert len(re.findall(r"^\s*\.param ", text, re.MULTILINE)) == len(facts.parameters) + 2
    assert re.findall(r"\.reqntid (\d+)", text) == [str(facts.threads)]
    assert (facts.shared_bytes > 0) == (".extern .shared" in text)


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


@pytest.mark.parametrize("name", NAMES)
def test_every_instruction_is_exact(name: str) -> None:
    assert inexact().findall(ptx(name)) == []


def test_no_file_tells_of_the_machine_that_compiled_it() -> None:
    assert [name for name in NAMES if re.search(r"\.(loc|file)\b|/\w+/\w+\.py", ptx(name))] == []


@pytest.mark.exhaustive
def test_the_source_compiles_to_the_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    triton = pytest.importorskip("triton")
    told: dict[str, Any] = json.loads((FOLDER / "manifest.json").read_text())
    if triton.__version__ != told["triton"]:
        pytest.skip(f"Triton {triton.__version__} is installed; the files are {told['triton']}'s")
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "cache"))
    build = importlib.import_module("gpulease.client.decode.kernels.build")
    (tmp_path / "built").mkdir()
    build.build(tmp_path / "built")
    built = {path.name: path.read_text() for path in (tmp_path / "built").iterdir()}
    assert built == {path.name: path.read_text() for path in FOLDER.iterdir() if path.suffix in {".ptx", ".json"}}
