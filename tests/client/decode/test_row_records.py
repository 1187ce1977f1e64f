"""The records of rows and results match the offsets that the kernels have as constants."""

import ast
from pathlib import Path

import numpy as np
import pytest

import gpulease.client.decode.kernels as kernels
from gpulease.client.decode.row_records import ENTRY, GUIDE, PAGE, RESULT, ROW, log_probabilities


def constants() -> dict[str, float]:
    """The constants that the Triton source gives its kernels, by their names; Triton need not be there."""
    tree = ast.parse((Path(kernels.__path__[0]) / "triton_source.py").read_text())
    assigned = [node for node in tree.body if isinstance(node, ast.Assign) and isinstance(node.value, ast.Call)]
    return {ast.unparse(node.targets[0]): ast.literal_eval(node.value.args[0]) for node in assigned}  # type: ignore[attr-defined]


def test_a_row_s_words_are_where_the_kernels_read_them() -> None:
    offsets = {name: ROW.fields[name][1] for name in ROW.names or () if name != "padding"} if ROW.fields else {}
    told = constants()
    assert {name: 4 * told[name.upper()] for name in offsets} == offsets
    assert 4 * told["WORDS"] == ROW.itemsize


def test_the_words_of_a_guide_and_an_entry_are_where_the_kernels_read_them() -> None:
    told = constants()
    assert GUIDE.fields is not None
    assert ENTRY.fields is not None
    names = [name for name in GUIDE.names or () if name != "padding"]
    assert {name: 4 * told[name.upper()] for name in names} == {name: GUIDE.fields[name][1] for name in names}
    offsets = {name: ENTRY.fields[name][1] for name in ENTRY.names or ()}
    words = {"token": "ENTRY_TOKEN", "addend": "ADDEND", "divisor": "DIVISOR", "subtrahend": "SUBTRAHEND"}
    assert {name: 4 * told[words[name]] for name in offsets} == offsets
    assert (4 * told["GUIDE_WORDS"], 4 * told["ENTRY_WORDS"]) == (GUIDE.itemsize, ENTRY.itemsize)


def test_a_result_and_a_block_have_the_sizes_that_the_kernels_know() -> None:
    told = constants()
    assert 4 * told["RESULT_WORDS"] == RESULT.itemsize
    assert told["PAGE"] == PAGE


def test_log_probabilities_are_those_of_a_softmax() -> None:
    logits = np.random.default_rng(0).normal(size=(5, 40)).astype(np.float32)
    tokens = np.arange(5)
    results = np.zeros(5, RESULT)
    results["token"], results["logit"], results["top_logit"] = tokens, logits[tokens, tokens], logits.max(1)
    results["total"] = np.exp(logits - logits.max(1, keepdims=True)).sum(1)
    wide = logits.astype(np.float64)
    expected = wide[tokens, tokens] - np.log(np.exp(wide).sum(1))
    assert log_probabilities(results) == pytest.approx(expected, abs=1e-5)
