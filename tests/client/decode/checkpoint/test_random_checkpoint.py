from dataclasses import replace
from typing import Final

import numpy as np
import pytest

from gpulease.client.decode.checkpoint import RandomCheckpoint
from gpulease.client.decode.checkpoint.model_tensors import model_tensors
from gpulease.client.decode.checkpoint.random_checkpoint import PERIOD
from gpulease.client.decode.decode_errors import ModelRejected
from helpers.made_models import LLAMA, QWEN2

LARGE: Final = replace(LLAMA, layers=1, width=1024, heads=32, inner_width=1024)


def f32_of(checkpoint: RandomCheckpoint, name: str) -> np.ndarray[tuple[int, ...], np.dtype[np.float32]]:
    tensor = checkpoint.tensor(name)
    return tensor.f32(0, tensor.rows)


def test_every_tensor_of_the_config_is_there() -> None:
    checkpoint = RandomCheckpoint(QWEN2, 1)
    for name, shape in model_tensors(QWEN2):
        assert checkpoint.tensor(name).shape == shape
        assert f32_of(checkpoint, name).size == np.prod(shape)


def test_equal_seeds_give_equal_weights_whatever_is_read_first() -> None:
    names = [name for name, _ in model_tensors(QWEN2)]
    one, other, third = RandomCheckpoint(QWEN2, 1), RandomCheckpoint(QWEN2, 1), RandomCheckpoint(QWEN2, 2)
    values = {name: f32_of(one, name) for name in names}
    assert all((values[name] == f32_of(other, name)).all() for name in reversed(names))
    assert not any((values[name] == f32_of(third, name)).all() for name in names)


def test_weights_are_as_large_as_keeps_a_product_near_one() -> None:
    checkpoint = RandomCheckpoint(LARGE, 1)
    gate = f32_of(checkpoint, "model.layers.0.mlp.gate_proj.weight")
    assert abs(gate.mean()) < 2e-4
    assert gate.std() == pytest.approx(1024**-0.5, rel=0.01)
    norm = f32_of(checkpoint, "model.norm.weight")
    assert (norm.mean(), norm.std()) == (pytest.approx(1, abs=0.02), pytest.approx(0.1, rel=0.1))


def test_rows_are_the_same_in_whatever_parts_they_are_read_and_none_is_another(monkeypatch: pytest.MonkeyPatch) -> None:
    period = (PERIOD - 3) // 256 + 3
    monkeypatch.setattr("gpulease.client.decode.checkpoint.random_checkpoint.PERIOD", period)
    tensor = RandomCheckpoint(LLAMA, 1).tensor("model.layers.0.mlp.up_proj.weight")
    assert tensor.rows * tensor.columns > 4 * period
    whole = tensor.bf16(0, tensor.rows)
    assert all((tensor.bf16(at, at + 64) == whole[at : at + 64]).all() for at in range(0, tensor.rows, 64))
    assert len({row.tobytes() for row in whole}) == tensor.rows


def test_it_has_no_tokenizer() -> None:
    with pytest.raises(ModelRejected, match="random weights of seed 1 have no tokenizer"):
        RandomCheckpoint(LLAMA, 1).tokenizer()


def test_a_shape_that_the_engine_does_not_compute_is_refused() -> None:
    with pytest.raises(ModelRejected, match=r"heads must be .* wide, not 48"):
        RandomCheckpoint(replace(LLAMA, head_width=48), 1)
