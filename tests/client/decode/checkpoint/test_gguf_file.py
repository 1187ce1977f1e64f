import math
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import numpy as np
import pytest
from gguf import GGMLQuantizationType, GGUFReader
from gguf.quants import dequantize, quantize

from gpulease.client.decode.checked_file import Members
from gpulease.client.decode.checkpoint import TensorType, open_model
from gpulease.client.decode.checkpoint.gguf_config import gguf_config
from gpulease.client.decode.checkpoint.model_tensors import model_tensors
from gpulease.client.decode.checkpoint.tensors import BLOCKS, rounded_to_bf16
from gpulease.client.decode.decode_errors import ModelRejected
from gpulease.client.decode.model_config import LinearScaling, ModelConfig
from gpulease.client.decode.text.gguf_special_tokens import CONTROL
from helpers.made_models import (
    ALL_EXPERTS,
    GEMMA3,
    LLAMA,
    MODELS,
    QWEN2,
    QWEN3,
    gguf_metadata,
    gguf_name,
    permuted,
    random_weights,
    write_folder,
    write_gguf,
)

SMALL: Final = replace(QWEN2, layers=1, width=32, heads=1, key_heads=1, inner_width=32, vocabulary=4)


GEMMA: Final = replace(GEMMA3, end_tokens=(), score_divisor=32.0, rope_scaling=LinearScaling(4.0))
GGUF_MODELS: Final = MODELS | {"qwen3_moe": ALL_EXPERTS, "gemma3": GEMMA}


@pytest.mark.parametrize("config", GGUF_MODELS.values(), ids=GGUF_MODELS)
@pytest.mark.parametrize("kind", [TensorType.BF16, TensorType.F32])
def test_a_file_has_the_values_of_the_folder_it_was_made_of(
    tmp_path: Path, config: ModelConfig, kind: TensorType
) -> None:
    weights = random_weights(config)
    scaling: Any = config.rope_scaling and {"rope_type": "linear", "factor": 4.0}
    folder = open_model(write_folder(tmp_path / "folder", config, weights, says={"rope_scaling": scaling}))
    file = open_model(write_gguf(tmp_path / "a.gguf", config, weights, kind=kind))
    assert file.config == replace(folder.config, end_tokens=()) == config
    assert (file.rotation(64).divisors == folder.rotation(64).divisors).all()
    for name, _ in model_tensors(config):
        ours, theirs = file.tensor(name), folder.tensor(name)
        assert ours.shape == theirs.shape
        if kind is TensorType.F32 or len(ours.shape) > 1:
            assert (ours.f32(0, ours.rows) == theirs.f32(0, theirs.rows)).all(), name


def test_a_gemma_3_s_metadata_is_read_as_llama_cpp_does(tmp_path: Path) -> None:
    def read(**says: Any) -> ModelConfig:
        told = {f"gemma3.{key.replace('__', '.')}": value for key, value in says.items()}
        return open_model(write_gguf(tmp_path / "a.gguf", config, weights, says=told)).config

    config = replace(GEMMA, layers=7, windows=(24, None) * 3 + (24,))
    weights = random_weights(config)
    assert read() == config
    left_out = read(attention__sliding_window_pattern=None, rope__freq_base_swa=None, rope__scaling__factor=None)
    windows = (*[24] * 5, None, 24)
    assert left_out == replace(config, windows=windows, local_rope_theta=1e4, rope_scaling=None)
    assert read(attention__sliding_window=None) == replace(config, windows=())
    assert read(rope__scaling__type="none") == replace(config, rope_scaling=None)
    for says, sentence in (
        ({"rope__scaling__type": "yarn"}, "rope.scaling.type must be none or linear, not 'yarn'"),
        ({"rope__scaling__factor": 0.5}, "rope.scaling.factor must be at least 1"),
        ({"attention__sliding_window_pattern": 0}, "sliding_window_pattern must be at least 1, not 0"),
        ({"final_logit_softcapping": 30.0}, "final_logit_softcapping is '30.0'"),
    ):
        with pytest.raises(ModelRejected, match=sentence):
            read(**says)


def test_the_scores_of_gemma_3_27b_have_another_divisor() -> None:
    said = gguf_metadata(replace(GEMMA, layers=62, width=672, heads=4, key_heads=2, windows=(24, None) * 31))
    found = gguf_config(Members(said | {"general.architecture": "gemma3"}, "a.gguf"), 64, is_tied=True)
    assert (found.score_divisor, found.head_width) == (168.0, 32)


def test_experts_without_a_width_of_their_own_share_the_layer_s(tmp_path: Path) -> None:
    assert ALL_EXPERTS.experts is not None
    config = replace(ALL_EXPERTS, layers=1, inner_width=128)
    says = {"qwen3moe.expert_feed_forward_length": None}
    assert open_model(write_gguf(tmp_path / "a.gguf", config, random_weights(config), says=says)).config == config


@pytest.mark.parametrize(
    ("says", "sentence"),
    [
        ({"expert_count": 5}, r"blk.0.ffn_gate_exps.weight must have 5 matrices, not the shape \[6, 64, 256\]"),
        ({"expert_count": None}, "expert_count is missing"),
        ({"expert_used_count": 7}, "experts of a row must be 1 to 6, not 7"),
        ({"expert_shared_count": 1}, "expert_shared_count is '1'"),
    ],
)
def test_what_a_file_may_not_say_of_experts(tmp_path: Path, says: dict[str, Any], sentence: str) -> None:
    config = replace(ALL_EXPERTS, layers=1)
    told = {f"qwen3moe.{key}": value for key, value in says.items()}
    with pytest.raises(ModelRejected, match=sentence):
        open_model(write_gguf(tmp_path / "a.gguf", config, random_weights(config), says=told))


@pytest.mark.parametrize("kind", BLOCKS)
def test_a_llama_s_q_and_k_are_in_hugging_face_s_order_in_every_type(tmp_path: Path, kind: TensorType) -> None:
    weights = random_weights(LLAMA)
    path = write_gguf(tmp_path / "a.gguf", LLAMA, weights, kind=kind)
    stored = {t.name: dequantize(t.data, t.tensor_type) for t in GGUFReader(path).tensors}
    checkpoint = open_model(path)
    for name, heads in (("q", LLAMA.heads), ("k", LLAMA.key_heads)):
        tensor = checkpoint.tensor(f"model.layers.1.self_attn.{name}_proj.weight")
        assert tensor.kind is kind
        values = tensor.f32(0, tensor.rows)
        assert (permuted(values, heads) == stored[f"blk.1.attn_{name}.weight"]).all()
        assert (tensor.f32(37, 50) == values[37:50]).all()


def test_a_qwen_s_rows_are_left_as_they_are(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "a.gguf", QWEN3, random_weights(QWEN3), kind=TensorType.Q8_0)
    stored = {t.name: t.data for t in GGUFReader(path).tensors}
    tensor = open_model(path).tensor("model.layers.0.self_attn.q_proj.weight")
    assert (tensor.read(0, tensor.rows) == stored["blk.0.attn_q.weight"]).all()


@pytest.mark.parametrize("kind", [TensorType.Q4_0, TensorType.Q4_1, TensorType.Q5_0, TensorType.Q8_0])
def test_values_are_those_that_were_quantised(tmp_path: Path, kind: TensorType) -> None:
    weights = random_weights(QWEN2)
    tensor = open_model(write_gguf(tmp_path / "a.gguf", QWEN2, weights, kind=kind)).tensor("model.embed_tokens.weight")
    number = GGMLQuantizationType[kind.name]
    wanted = dequantize(quantize(weights["model.embed_tokens.weight"], number), number)
    assert (tensor.bf16(0, tensor.rows) == rounded_to_bf16(wanted)).all()


def test_rotary_divisors_are_the_file_s(tmp_path: Path) -> None:
    divisors = np.linspace(1, 8, LLAMA.head_width // 2).astype(np.float32)
    path = write_gguf(tmp_path / "a.gguf", LLAMA, random_weights(LLAMA), more=[("rope_freqs.weight", divisors)])
    assert (open_model(path).rotation(128).divisors == divisors).all()
    assert (open_model(write_gguf(tmp_path / "b.gguf", LLAMA, random_weights(LLAMA))).rotation(128).divisors == 1).all()


def test_tokens_that_begin_and_end_are_read(tmp_path: Path) -> None:
    at = "tokenizer.ggml."
    says = {
        f"{at}model": "gpt2",
        f"{at}tokens": ["<|endoftext|>", "a", "<|im_end|>", "<|im_start|>"],
        f"{at}token_type": [CONTROL, 1, 1, CONTROL],
        f"{at}bos_token_id": 3,
        f"{at}eos_token_id": 1,
        f"{at}eot_token_id": 2,
    }
    weights = random_weights(SMALL)
    config = open_model(write_gguf(tmp_path / "a.gguf", SMALL, weights, says=says)).config
    assert (config.begin_token, config.end_tokens) == (None, (1, 2, 0))
    for changes, begin in (
        ({f"{at}add_bos_token": True}, 3),
        ({f"{at}model": "llama"}, 3),
        ({f"{at}model": "llama", f"{at}add_bos_token": False}, None),
        ({f"{at}pre": "llama-bpe"}, 3),
    ):
        path = write_gguf(tmp_path / "b.gguf", SMALL, weights, says=says | changes)
        assert open_model(path).config.begin_token == begin


@pytest.mark.parametrize(
    ("says", "begin", "end"),
    [
        ({"model": "llama"}, 1, (2,)),
        ({"model": "llama", "bos_token_id": 3, "eos_token_id": 0}, 3, (0,)),
        ({"model": "gpt2", "eos_token_id": 0}, None, (0,)),
        (
            {"model": "gpt2", "eos_token_id": 0, "tokens": ["a", "<reponame>", "</s>", "<|file_sep|>"]},
            None,
            (0, 1, 2, 3),
        ),
        ({"model": "gpt2", "eos_token_id": 0, "fim_rep_token_id": 3, "tokens": ["a", "<reponame>"]}, None, (0, 3)),
    ],
)
def test_special_tokens_are_found_as_llama_cpp_finds_them(
    tmp_path: Path, says: dict[str, Any], begin: int | None, end: tuple[int, ...]
) -> None:
    said = {f"tokenizer.ggml.{key}": value for key, value in ({"tokens": ["a", "b", "c", "d"]} | says).items()}
    config = open_model(write_gguf(tmp_path / "a.gguf", SMALL, random_weights(SMALL), says=said)).config
    assert (config.begin_token, config.end_tokens) == (begin, end)


@pytest.mark.parametrize(
    ("says", "missing"),
    [({}, "eos"), ({"eos_token_id": 0, "add_bos_token": True}, "bos"), ({"eos_token_id": 0, "pre": "llama3"}, "bos")],
)
def test_a_special_token_that_no_key_names_is_missed(tmp_path: Path, says: dict[str, Any], missing: str) -> None:
    said = {f"tokenizer.ggml.{key}": value for key, value in ({"model": "gpt2", "tokens": ["a", "b"]} | says).items()}
    refused(write_gguf(tmp_path / "a.gguf", SMALL, random_weights(SMALL), says=said), f"{missing}_token_id is missing")


def refused(path: Path, sentence: str) -> None:
    with pytest.raises(ModelRejected, match=sentence):
        open_model(path)


@pytest.mark.parametrize(
    ("says", "sentence"),
    [
        (
            {"general.architecture": "gemma"},
            "general.architecture must be one of llama, qwen2, qwen3, qwen3moe, gemma3, not 'gemma'",
        ),
        ({"qwen2.block_count": None}, "qwen2.block_count is missing"),
        ({"qwen2.block_count": "many"}, "qwen2.block_count must be an integer, not 'many'"),
        ({"qwen2.block_count": 2}, "tensor model.layers.1.input_layernorm.weight is missing"),
        ({"qwen2.attention.head_count_kv": [1, 1]}, r"head_count_kv must be an integer, not '\[1, 1\]'"),
        (
            {"qwen2.attention.key_length": 64},
            r"tensor .* must have the shape \[64, 32\], as in the config, not \[32, 32\]",
        ),
        ({"qwen2.attention.value_length": 64}, "value_length is 64, and heads are 32 wide"),
        ({"qwen2.rope.dimension_count": 16}, "rope.dimension_count is 16"),
        ({"qwen2.expert_count": 8}, "expert_count is '8'; the engine does not support mixtures"),
        ({"qwen2.attention.sliding_window": 4096}, "sliding_window is '4096'"),
        ({"qwen2.rope.scaling.type": "yarn", "qwen2.rope.scaling.factor": 4.0}, "rope.scaling.type is 'yarn'"),
        ({"qwen2.rope.scale_linear": 2.0}, "rope.scale_linear is '2.0'; .* only Llama 3's scaling"),
        ({"split.count": 3}, "split.count is '3'; merge its files"),
        ({"tokenizer.ggml.eos_token_id": 4}, "token 4 is not in the vocabulary of 4"),
    ],
)
def test_what_the_engine_does_not_compute_is_refused(tmp_path: Path, says: dict[str, Any], sentence: str) -> None:
    says = {"qwen2.attention.value_length": None} | says
    refused(write_gguf(tmp_path / "a.gguf", SMALL, random_weights(SMALL), says=says), f"a.gguf: .*{sentence}")


def test_a_type_that_is_not_read_is_named(tmp_path: Path) -> None:
    weights = random_weights(SMALL)
    path = write_gguf(tmp_path / "a.gguf", SMALL, weights)
    content = bytearray(path.read_bytes())
    name = gguf_name("model.layers.0.mlp.up_proj.weight").encode()
    # After the name come the number of dimensions (4 bytes), two dimensions (8 bytes each), and the type.
    content[content.index(name) + len(name) + 4 + 16] = 10
    path.write_bytes(content)
    refused(path, "tensor model.layers.0.mlp.up_proj.weight is of type Q2_K; the engine reads F32, F16, Q4_0")


def test_a_tensor_that_would_be_left_out_is_refused(tmp_path: Path) -> None:
    more = [("blk.0.attn_output.bias", np.ones(32, np.float32))]
    refused(
        write_gguf(tmp_path / "a.gguf", SMALL, random_weights(SMALL), more=more), "o_proj.bias' is not part of a qwen2"
    )


@pytest.mark.parametrize("divisor", [0.0, math.nan, 1e-38])
def test_divisors_that_frequencies_can_t_have_are_refused(tmp_path: Path, divisor: float) -> None:
    divisors = np.ones(16, np.float32)
    divisors[3] = divisor
    path = write_gguf(tmp_path / "a.gguf", LLAMA, random_weights(LLAMA), more=[("rope_freqs.weight", divisors)])
    refused(path, "tensor rope_freqs.weight must have finite numbers of at least 0.25, not")


def test_a_gemma_3_has_no_tensor_of_divisors(tmp_path: Path) -> None:
    more = [("rope_freqs.weight", np.ones(GEMMA.head_width // 2, np.float32))]
    path = write_gguf(tmp_path / "a.gguf", GEMMA, random_weights(GEMMA), more=more)
    refused(path, "rope_freqs.weight' is not part of a gemma3")


def test_a_path_of_neither_kind_is_refused(tmp_path: Path) -> None:
    refused(tmp_path / "nothing", "nothing: the file or folder does not exist")
    (tmp_path / "model.bin").write_bytes(b"x")
    refused(tmp_path / "model.bin", "must be a folder with config.json and safetensors, or a .gguf file")
    (tmp_path / "empty.gguf").write_bytes(b"")
    refused(tmp_path / "empty.gguf", "truncated: it is empty")
