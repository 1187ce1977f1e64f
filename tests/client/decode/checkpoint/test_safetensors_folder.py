import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from safetensors.numpy import save_file

from gpulease.client.decode.checkpoint import Checkpoint, TensorType, open_model
from gpulease.client.decode.checkpoint.model_tensors import model_tensors
from gpulease.client.decode.checkpoint.tensors import rounded_to_bf16
from gpulease.client.decode.decode_errors import ModelRejected
from gpulease.client.decode.model_config import Family, ModelConfig
from helpers.made_models import (
    FOLDER_MODELS,
    GEMMA3,
    PHI3,
    QWEN2,
    Weights,
    config_json,
    fused,
    random_weights,
    write_folder,
    write_safetensors,
)


@pytest.mark.parametrize("prefix", ["language_model.model.", "model.language_model."])
def test_of_a_gemma_3_with_images_the_text_part_is_read(tmp_path: Path, prefix: str) -> None:
    weights = random_weights(GEMMA3)
    text = {key: value for key, value in config_json(GEMMA3).items() if key != "architectures"}
    says: dict[str, Any] = {"model_type": "gemma3", "eos_token_id": 1, "text_config": text}
    says["architectures"] = ["Gemma3ForConditionalGeneration"]
    named = {name.replace("model.", prefix, 1): values for name, values in weights.items()}
    images = {"vision_tower.vision_model.post_layernorm.weight", "model.multi_modal_projector.mm_soft_emb_norm.weight"}
    write_folder(tmp_path, GEMMA3, named | dict.fromkeys(images, np.zeros(7, np.float32)))
    (tmp_path / "config.json").write_text(json.dumps(says))
    checkpoint = open_model(tmp_path)
    assert checkpoint.config == GEMMA3
    check_values(checkpoint, GEMMA3, weights)
    # In a folder for text only, the names of a model with images are unknown.
    write_folder(tmp_path, GEMMA3, named)
    with pytest.raises(ModelRejected, match=r"tensor model\.embed_tokens\.weight is missing"):
        open_model(tmp_path)


SMALL: Final = replace(QWEN2, layers=1, width=32, heads=1, key_heads=1, inner_width=32, vocabulary=4)


def check_values(checkpoint: Checkpoint, config: ModelConfig, weights: Weights) -> None:
    for name, shape in model_tensors(config):
        tensor = checkpoint.tensor(name)
        assert tensor.shape == shape
        wanted = weights[name]
        if config.family is Family.GEMMA3 and name.endswith("norm.weight"):
            # The files hold each weight minus 1.
            wanted = wanted + np.float32(1)
        assert (tensor.f32(0, tensor.rows).reshape(shape) == wanted).all(), name


@pytest.mark.parametrize("config", FOLDER_MODELS.values(), ids=FOLDER_MODELS)
@pytest.mark.parametrize("files", [1, 3])
def test_a_folder_s_tensors_are_what_was_written(tmp_path: Path, config: ModelConfig, files: int) -> None:
    weights = random_weights(config)
    checkpoint = open_model(write_folder(tmp_path / "model", config, weights, files=files))
    assert checkpoint.config == config
    check_values(checkpoint, config, weights)


def test_a_closed_folder_has_no_file_open_and_leaves_views_as_they_are(tmp_path: Path) -> None:
    """No file stays open, whatever still refers to the folder: a server unloads models for as long as it runs."""

    def opened() -> list[str]:
        return [link for fd in os.listdir("/proc/self/fd") if (link := _link_of(fd)).startswith(str(tmp_path))]

    checkpoint = open_model(write_folder(tmp_path / "model", SMALL, weights := random_weights(SMALL), files=3))
    tensor = checkpoint.tensor("model.norm.weight")
    view = tensor.read(0, 1)
    before = view.copy()
    assert len(set(opened())) == 3
    checkpoint.close()
    checkpoint.close()
    assert len(set(opened())) == 1
    assert (view == before).all()
    assert weights["model.norm.weight"].size
    del view
    assert opened() == []


def _link_of(fd: str) -> str:
    try:
        return os.readlink(f"/proc/self/fd/{fd}")
    except OSError:
        return ""


@pytest.mark.parametrize("kind", ["F32", "F16", "BF16"])
def test_each_type_is_read(tmp_path: Path, kind: str) -> None:
    weights = {name: np.clip(values, -4, 4) for name, values in random_weights(SMALL).items()}
    checkpoint = open_model(write_folder(tmp_path / "model", SMALL, weights, kind=kind))
    assert checkpoint.tensor("model.norm.weight").kind is TensorType[kind]
    check_values(checkpoint, SMALL, weights)


def test_what_the_library_writes_is_read(tmp_path: Path) -> None:
    weights = random_weights(SMALL)
    write_folder(tmp_path, SMALL, weights)
    save_file(weights, tmp_path / "model.safetensors", {"format": "pt"})
    check_values(open_model(tmp_path), SMALL, weights)


def test_tensors_that_transformers_leaves_out_are_left_out(tmp_path: Path) -> None:
    weights = random_weights(SMALL)
    more = {"lm_head.weight": weights["model.embed_tokens.weight"]}
    more["model.layers.0.self_attn.rotary_emb.inv_freq"] = np.ones(16, np.float32)
    check_values(open_model(write_folder(tmp_path, SMALL, weights | more)), SMALL, weights)


@pytest.mark.parametrize(
    ("name", "values", "sentence"),
    [
        ("self_attn.qkv_proj.weight", None, "qkv_proj.weight is missing"),
        ("mlp.gate_up_proj.weight", np.zeros((1023, 256), np.float32), r"must have the shape \[1024, 256\]"),
        ("self_attn.k_proj.weight", np.zeros((64, 256), np.float32), "k_proj.weight exists twice, by itself and in"),
        ("self_attn.qkv_proj.bias", np.zeros(384, np.float32), "is not part of a phi3 model"),
    ],
)
def test_a_fused_tensor_is_there_once_with_all_its_rows(
    tmp_path: Path, name: str, values: NDArray[np.float32] | None, sentence: str
) -> None:
    weights = fused(PHI3, random_weights(PHI3)) | ({} if values is None else {f"model.layers.1.{name}": values})
    if values is None:
        del weights[f"model.layers.1.{name}"]
    write_folder(tmp_path, PHI3, random_weights(PHI3))
    write_safetensors(tmp_path / "model.safetensors", weights)
    refused(tmp_path, sentence)


def test_values_that_stay_are_behind_those_that_turn_in_each_half_of_a_head(tmp_path: Path) -> None:
    """A head has 32 values. Hugging Face pairs the first 16 with each other; the kernels pair every i with i + 16."""
    config = replace(PHI3, turned_width=16)
    weights = random_weights(config)
    write_folder(tmp_path, config, weights, says={"partial_rotary_factor": 0.5})
    checkpoint = open_model(tmp_path)
    order = [*range(8), *range(16, 24), *range(8, 16), *range(24, 32)]
    for name, tensors in (("q", order), ("k", order), ("v", list(range(32)))):
        tensor = checkpoint.tensor(f"model.layers.1.self_attn.{name}_proj.weight")
        wanted = weights[tensor.name].reshape(-1, 32, config.width)[:, tensors].reshape(-1, config.width)
        assert (tensor.bf16(0, tensor.rows) == rounded_to_bf16(wanted)).all()
        assert (tensor.bf16(7, 41) == rounded_to_bf16(wanted[7:41])).all()


def refused(folder: Path, sentence: str) -> None:
    with pytest.raises(ModelRejected, match=sentence):
        open_model(folder)


def test_a_missing_tensor_is_named(tmp_path: Path) -> None:
    weights = random_weights(SMALL)
    del weights["model.layers.0.mlp.up_proj.weight"]
    refused(write_folder(tmp_path, SMALL, weights), "tensor model.layers.0.mlp.up_proj.weight is missing")


def test_a_wrong_shape_is_named_with_its_file(tmp_path: Path) -> None:
    weights = random_weights(SMALL)
    weights["model.layers.0.mlp.up_proj.weight"] = np.ones((33, 32), np.float32)
    refused(
        write_folder(tmp_path, SMALL, weights),
        r"model.safetensors: tensor .*up_proj.weight must have the shape \[32, 32\], as in the config, not \[33, 32\]",
    )


def test_a_tensor_that_would_be_left_out_is_refused(tmp_path: Path) -> None:
    weights = random_weights(SMALL) | {"model.layers.0.self_attn.o_proj.bias": np.ones(32, np.float32)}
    refused(write_folder(tmp_path, SMALL, weights), "'model.layers.0.self_attn.o_proj.bias' is not part of a qwen2")


def test_another_type_is_named(tmp_path: Path) -> None:
    folder = write_folder(tmp_path, SMALL, random_weights(SMALL))
    save_file({n: v.astype(np.float64) for n, v in random_weights(SMALL).items()}, folder / "model.safetensors")
    refused(folder, "is of type F64; the engine reads F32, F16, BF16")


def test_a_tensor_in_two_files_is_refused(tmp_path: Path) -> None:
    weights = random_weights(SMALL)
    folder = write_folder(tmp_path, SMALL, weights, files=2)
    write_safetensors(folder / "model-00002-of-00002.safetensors", weights)
    refused(folder, "is in model-00001-of-00002.safetensors too")


@pytest.mark.parametrize(
    ("places", "sentence"),
    [
        ({"a": "../other.safetensors"}, "'../other.safetensors' must be the name"),
        ({"a": "/etc/passwd"}, "'/etc/passwd' must be the name"),
        ({"a": "model.bin"}, "'model.bin' must be the name"),
        ({"a": "model-00009-of-00001.safetensors"}, "model-00009-of-00001.safetensors: No such file"),
        ({}, "must name 1 to 256 files, not 0"),
        ({str(n): f"{n}.safetensors" for n in range(600)}, "must name 1 to 256 files, not 600"),
        ([], "weight_map must be an object, not '\\[\\]'"),
    ],
)
def test_an_index_that_names_what_it_must_not_is_refused(tmp_path: Path, places: Any, sentence: str) -> None:
    folder = write_folder(tmp_path, SMALL, {})
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))
    refused(folder, sentence)


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        (b"{", "config.json: must be JSON: "),
        (b"[]", "config.json: must be a JSON object"),
        (b"\xff\xfe{", "config.json: must be JSON: "),
        (b"[" * 100_000, "config.json: must be JSON: "),
        (b'{"hidden_size": ' + b"1" * 5000 + b"}", "config.json: must be JSON: "),
        (b" " * (17 << 20), "config.json: more than 16,777,216 bytes"),
    ],
    ids=["cut", "a list", "no UTF-8", "deep", "a long number", "long"],
)
def test_a_broken_config_is_refused(tmp_path: Path, text: bytes, sentence: str) -> None:
    (tmp_path / "config.json").write_bytes(text)
    refused(tmp_path, sentence)


def test_a_folder_with_an_adapter_is_refused_by_its_name(tmp_path: Path) -> None:
    """transformers loads an adapter beside the model. A loader that ignored it would compute other tokens."""
    write_folder(tmp_path, QWEN2, random_weights(QWEN2))
    (tmp_path / "adapter_config.json").write_text('{"peft_type": "LORA", "r": 8}')
    with pytest.raises(ModelRejected, match=r"adapter_config\.json: adapters \(LoRA\) are not supported"):
        open_model(tmp_path)


def test_what_is_not_there_is_named(tmp_path: Path) -> None:
    refused(tmp_path, "config.json: No such file or directory")
    refused(write_folder(tmp_path / "nothing", SMALL, {}), "tensor model.embed_tokens.weight is missing")
    (tmp_path / "nothing" / "model.safetensors").unlink()
    refused(tmp_path / "nothing", "model.safetensors: No such file or directory")


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, bytes]:
    folder = write_folder(tmp_path_factory.mktemp("whole"), SMALL, random_weights(SMALL))
    return folder, (folder / "model.safetensors").read_bytes()


@settings(max_examples=50, deadline=None)
@given(st.data())
def test_a_truncated_file_is_refused(whole: tuple[Path, bytes], data: st.DataObject) -> None:
    folder, content = whole
    length = data.draw(st.integers(0, len(content) - 1) | st.integers(0, 16))
    (folder / "model.safetensors").write_bytes(content[:length])
    refused(folder, "model.safetensors: (broken or )?truncated|model.safetensors: broken")


@settings(max_examples=50, deadline=None)
@given(st.binary(max_size=200), st.integers(0, 1 << 64))
def test_a_header_of_anything_is_refused(whole: tuple[Path, bytes], text: bytes, length: int) -> None:
    folder, content = whole
    for size in (length % (1 << 64), len(text)):
        (folder / "model.safetensors").write_bytes(size.to_bytes(8, "little") + text + content[-64:])
        refused(folder, "model.safetensors")


@settings(max_examples=50, deadline=None)
@given(st.data())
def test_a_header_with_changed_bytes_opens_or_is_refused(whole: tuple[Path, bytes], data: st.DataObject) -> None:
    folder, content = whole
    changed = bytearray(content)
    header = int.from_bytes(content[:8], "little")
    for _ in range(data.draw(st.integers(1, 4))):
        changed[data.draw(st.integers(0, header + 8))] = data.draw(st.integers(0, 255) | st.sampled_from(b'0123",[]'))
    (folder / "model.safetensors").write_bytes(changed)
    try:
        checkpoint = open_model(folder)
    except ModelRejected:
        return
    for name, _ in model_tensors(SMALL):
        tensor = checkpoint.tensor(name)
        tensor.bf16(0, tensor.rows)
