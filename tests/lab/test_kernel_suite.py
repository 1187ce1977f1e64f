"""Every case of the kernel suite has its expected outcome, and the document has the table of the outcomes."""

import json
from pathlib import Path
from typing import ClassVar

import pytest
from click.testing import CliRunner

from helpers.daemon import Daemon

from . import kernel_suite
from .kernel_cases.trial import Case
from .kernel_suite import cases, main, run_all, table_of

DOCUMENT = Path(__file__).parents[2] / "client" / "kernels" / "SUITE.md"
FOUND, LACKING = cases()
FEW = {"slices", "transpose", "prints", "warpgroup_product", "saxpy", "add"}
needs_compilers = pytest.mark.skipif(bool(LACKING), reason="pip install '.[cuda-c,triton,numba]'")


@pytest.fixture(scope="module", autouse=True)
def _compilers() -> None:
    # Compile once before: NVVM starts a thread when it first compiles, and keeps it.
    cuda = pytest.importorskip("numba.cuda", reason="pip install '.[cuda-c,triton,numba]'")
    cuda.compile_ptx(lambda x: None, (cuda.types.float32,), cc=(8, 0))


def check(daemon: Daemon, names: set[str]) -> None:
    lines = list(run_all([case for case in FOUND if case.name in names], daemon.address))
    expected = {
        (case.tool, case.name): "refused" if "cpu" in case.refused_by else "ok" for case in FOUND if case.name in names
    }
    assert {(line["tool"], line["kernel"]): line["outcome"] for line in lines} == expected, lines


@needs_compilers
class TestFew:
    names: ClassVar[set[str]] = FEW

    def test_each_case_does_what_it_is_expected_to(self, daemon: Daemon) -> None:
        check(daemon, self.names)


@pytest.mark.exhaustive
class TestAll(TestFew):
    names: ClassVar[set[str]] = {case.name for case in FOUND}

    def test_there_are_many(self) -> None:
        assert len(self.names) >= 80


@needs_compilers
def test_the_document_has_each_tool_and_feature() -> None:
    text = DOCUMENT.read_text()
    for case in FOUND:
        for feature in case.features or ("plain",):
            assert f"| {case.tool} | {feature} |" in text, "PYTHONPATH=.dev python -m tests.lab.kernel_suite --table"
        if "cpu" in case.refused_by:
            assert f"- {case.tool}, `{case.name}`, on the embedded driver: " in text


def test_a_wrong_result_is_told(daemon: Daemon, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GPULEASE_ADDRESS", daemon.address)
    wrong = Case("arrays", "wrong", (), lambda t: [(t.session.array([1.0]).numpy(), [2.0])])
    breaks, empty = Case("arrays", "breaks", (), lambda t: [(1 // 0, 1)]), Case("arrays", "empty", (), lambda t: [])
    monkeypatch.setattr(kernel_suite, "cases", lambda: ([wrong, breaks, empty], ["numba_cases"]))
    done = CliRunner().invoke(main, [])
    *lines, lacking, counts = done.output.splitlines()
    assert [json.loads(line)["outcome"] for line in lines] == ["wrong", "failed", "failed"]
    assert done.exit_code == 1
    assert (lacking, counts) == ("numba_cases: left out, its compiler is not installed", "2 failed, 1 wrong")
    assert CliRunner().invoke(main, ["--only", "nothing"]).exit_code == 2


def test_the_table_counts_by_driver() -> None:
    line = {
        "tool": "PTX",
        "kernel": "k",
        "features": ["f"],
        "driver": "cpu",
        "outcome": "ok",
        "said": "",
        "launch_ms": 2,
    }
    other = line | {"driver": "cuda", "outcome": "refused", "said": "sync: earlier launch 9 failed: no; this sync"}
    text = table_of([line, line], [other])
    assert "| PTX | f | 2 ok, 2.0 ms | 1 refused |" in text
    assert "- PTX, `k`, on a card: no\n" in text
