"""The engine against the numpy reference on the same numbers: logits within bf16's error, the same greedy tokens."""

from dataclasses import replace
from pathlib import Path

import pytest
from gguf import GGMLQuantizationType as Type
from tokenizers import Tokenizer

from gpulease.client.decode.checkpoint import Checkpoint, open_model
from gpulease.client.decode.engine.forward_pass import StepLimits
from gpulease.client.decode.model_config import ModelConfig
from helpers.daemon import Daemon
from helpers.decode.agreement import compare_scorers
from helpers.decode.engine_rig import running
from helpers.decode.engine_scorer import EngineScorer
from helpers.decode.gguf_files import kept_tensors, write_gguf
from helpers.decode.hugging_face import write_folder
from helpers.decode.made_models import (
    F32,
    FOLDER_MODELS,
    SCALED_MODELS,
    SMALL_LLAMA,
    TINY_FOLDER,
    random_tensors,
    rounded_to_bf16,
    tiny_model,
)
from helpers.decode.prompts import prompts
from helpers.decode.reference import Reference

LIMITS = StepLimits(max_rows=16, tables=6, positions=128)
MAX_TINY_ERROR = 0.25
"""Bound for logits with a deviation of 3.3. The reference itself, with bf16 between its linears, is off by 0.11."""

MAX_SMALL_ERROR = 0.1
"""Bound for logits with a deviation of 1. The reference itself, with the same rounding, is off by 0.04."""


def check(
    daemon: Daemon,
    checkpoint: Checkpoint,
    reference: Reference,
    asked: list[list[int]],
    count: int,
    max_error: float,
    limits: StepLimits = LIMITS,
) -> None:
    with running(daemon.address, checkpoint, limits) as rig:
        logits, greedy = compare_scorers(reference, EngineScorer(rig), asked, count, are_close=reference.are_close)
    print(logits, greedy, sep="\n")
    assert logits.worst_error < max_error
    assert logits.decided > 0.75 * logits.positions
    assert logits.decided_differing == greedy.wrong == 0


def small(config: ModelConfig, kind: Type = Type.F32) -> tuple[dict[str, F32], Reference]:
    """Random tensors of a shape, and the reference of what a reader makes of them: bf16 of what a file kept."""
    tensors = random_tensors(config)
    read = {name: rounded_to_bf16(tensor) for name, tensor in kept_tensors(tensors, kind).items()}
    return tensors, Reference(config, read)


def test_the_tiny_model_is_the_reference_s(daemon: Daemon) -> None:
    asked = prompts(Tokenizer.from_file(str(TINY_FOLDER / "tokenizer.json")), 6)
    check(daemon, open_model(TINY_FOLDER), Reference(*tiny_model()), asked, 12, MAX_TINY_ERROR)


@pytest.mark.exhaustive
@pytest.mark.parametrize(("name", "positions"), [("linear", 128), ("yarn", 128), ("longrope", 128), ("longrope", 144)])
def test_scaled_rotary_embeddings_are_the_reference_s(
    name: str, positions: int, daemon: Daemon, tmp_path: Path
) -> None:
    config = SCALED_MODELS[name]
    tensors, reference = small(config)
    reference.is_long = positions > 128
    write_folder(tmp_path, config, tensors)
    limits = replace(LIMITS, positions=positions)
    check(daemon, open_model(tmp_path), reference, [[7], [*range(1, 40)]], 6, MAX_SMALL_ERROR, limits)


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", FOLDER_MODELS)
def test_every_family_is_the_reference_s(name: str, daemon: Daemon, tmp_path: Path) -> None:
    config = FOLDER_MODELS[name]
    tensors, reference = small(config)
    write_folder(tmp_path, config, tensors)
    check(daemon, open_model(tmp_path), reference, [[7], [*range(1, 40)], [5, 300, 5]], 6, MAX_SMALL_ERROR)


@pytest.mark.exhaustive
@pytest.mark.parametrize("kind", [Type.F16, Type.Q8_0, Type.Q4_0, Type.Q4_K], ids=lambda kind: kind.name)
def test_a_gguf_whose_weights_stay_packed_or_become_bf16_is_the_reference_s(
    kind: Type, daemon: Daemon, tmp_path: Path
) -> None:
    """Q8_0 and Q4_K stay packed. Every kind is read with the values of gguf (checkpoint/test_gguf_file.py)."""
    tensors, reference = small(SMALL_LLAMA, kind)
    write_gguf(tmp_path / "model.gguf", SMALL_LLAMA, tensors, kind)
    check(daemon, open_model(tmp_path / "model.gguf"), reference, [[7], [*range(1, 40)]], 6, MAX_SMALL_ERROR)
