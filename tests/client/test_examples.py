"""The examples do what they show, on the embedded driver."""

import contextlib
import io
import json
from pathlib import Path

import pytest

from gpulease.client.examples import burst, pipeline, right_size, solver
from helpers.daemon import Daemon
from helpers.nvrtc import needs_nvrtc

NOTEBOOK = Path(__file__).parents[2] / "client" / "examples" / "progress.ipynb"


@pytest.fixture(autouse=True)
def _address(shared_daemon: Daemon, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GPULEASE_ADDRESS", shared_daemon.address)


@needs_nvrtc
def test_a_solver_finds_the_solution() -> None:
    assert solver.run() < 1e-3


@needs_nvrtc
def test_a_pipeline_sums_each_batch() -> None:
    assert pipeline.run() < 1e-5


@needs_nvrtc
def test_bursts_of_a_caller_end_with_it() -> None:
    assert burst.run() == (5 * 20, 2)


def test_a_job_gets_the_size_that_it_needs() -> None:
    generous, right, result = right_size.run()
    assert 2 << 20 <= right < generous == 256 << 20
    assert result == pytest.approx(((1 << 18) - 1) * (1 << 17), rel=1e-3)


def test_a_notebook_prints_what_it_keeps() -> None:
    """Each cell runs, in order; a line that is drawn over counts as it stands at the end."""
    names: dict[str, object] = {}
    for cell in json.loads(NOTEBOOK.read_text())["cells"]:
        if cell["cell_type"] == "code":
            said = io.StringIO()
            with contextlib.redirect_stdout(said):
                exec(compile("".join(cell["source"]), "a cell", "exec"), names)
            kept = "".join(text for output in cell["outputs"] for text in output["text"])
            assert [line.rpartition("\r")[2] for line in said.getvalue().split("\n")] == kept.split("\n")
