"""Quantised weights of safetensors: their values by the definition of each format, and which are refused."""

from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import numpy as np
import pytest

from gpulease.client.decode.checked_file import Members
from gpulease.client.decode.checkpoint import TensorType, open_model
from gpulease.client.decode.checkpoint.model_tensors import model_tensors
from gpulease.client.decode.checkpoint.quantized_weights import quantization_of
from gpulease.client.decode.checkpoint.tensors import PACKED, plane_bytes, rounded_to_bf16
from gpulease.client.decode.decode_errors import ModelRejected
from gpulease.client.decode.model_config import MAX_LAYERS, Experts
from helpers.made_models import LLAMA, PHI3, QWEN2, QWEN3_MOE, random_weights, write_folder
from helpers.packed_models import AWQ, COMPRESSED, FP8, PACKINGS, Entries, packed_entries, write_packed_folder
from helpers.safetensors_head import ITEM_BYTES

ONE_LAYER: Final = {
    # The last block of 128 rows and the last of 128 columns are incomplete.
    "fp8": replace(QWEN2, layers=1, width=160, heads=5, key_heads=1, inner_width=288),
    "awq": replace(QWEN2, layers=1, width=128, heads=4, key_heads=2, inner_width=384),
}
ONE_LAYER["compressed"] = ONE_LAYER["fp8"]
DOWN: Final = "model.layers.0.mlp.down_proj"
KINDS: Final = {"fp8": TensorType.FP8, "awq": TensorType.AWQ, "compressed": TensorType.FP8}
SAID: Final = PACKINGS | {"compressed": COMPRESSED}


@pytest.mark.parametrize("method", SAID)
def test_values_are_those_of_the_format_s_definition(tmp_path: Path, method: str) -> None:
    config = ONE_LAYER[method]
    entries, values = packed_entries(config, method)
    checkpoint = open_model(write_packed_folder(tmp_path, config, entries, SAID[method]))
    for name, shape in model_tensors(config):
        tensor = checkpoint.tensor(name)
        assert tensor.shape == shape
        assert (tensor.kind is KINDS[method]) == name.endswith("_proj.weight")
        assert (tensor.bf16(0, tensor.rows).reshape(shape) == rounded_to_bf16(values[name])).all(), name


@pytest.mark.parametrize("method", SAID)
def test_experts_are_packed_and_their_router_is_not(tmp_path: Path, method: str) -> None:
    config = replace(QWEN3_MOE, experts=Experts(count=3, chosen=2, width=128, is_normalised=True), layers=1)
    entries, values = packed_entries(config, method)
    # The modules that Qwen3-30B-A3B-FP8 lists.
    said = SAID[method] | {
        "ignore" if method == "compressed" else "modules_to_not_convert": ["lm_head", "model.layers.0.mlp.gate"]
    }
    checkpoint = open_model(write_packed_folder(tmp_path, config, entries, said))
    for name, kind in (("mlp.gate", TensorType.BF16), ("mlp.experts.2.down_proj", KINDS[method])):
        tensor = checkpoint.tensor(f"model.layers.0.{name}.weight")
        assert tensor.kind is kind
        assert (tensor.bf16(0, tensor.rows) == rounded_to_bf16(values[tensor.name])).all()


@pytest.mark.parametrize("method", SAID)
def test_some_rows_are_those_of_the_whole(tmp_path: Path, method: str) -> None:
    config = ONE_LAYER[method]
    checkpoint = open_model(write_packed_folder(tmp_path, config, packed_entries(config, method)[0], SAID[method]))
    tensor = checkpoint.tensor("model.layers.0.mlp.up_proj.weight")
    whole = tensor.planes(0, tensor.rows)
    assert tuple(plane.nbytes // tensor.rows for plane in whole) == plane_bytes(tensor.kind, tensor.columns)
    for begin, end in ((0, 1), (5, 11), (120, 137), (tensor.rows - 3, tensor.rows)):
        for part, plane in zip(tensor.planes(begin, end), whole, strict=True):
            assert part.tobytes() == plane[begin:end].tobytes()


@pytest.mark.parametrize("method", SAID)
def test_modules_that_config_json_lists_are_plain(tmp_path: Path, method: str) -> None:
    config = ONE_LAYER[method]
    entries, values = packed_entries(config, method, ["down_proj.weight"])
    member = "ignore" if method == "compressed" else "modules_to_not_convert"
    said = SAID[method] | {member: ["lm_head", "down_proj"]}
    tensor = open_model(write_packed_folder(tmp_path, config, entries, said)).tensor(f"{DOWN}.weight")
    assert tensor.kind is TensorType.BF16
    assert (tensor.bf16(0, tensor.rows) == rounded_to_bf16(values[tensor.name])).all()
    # An entry stands for whole parts of a name between dots, not for the beginning of a part.
    for listed in ([], ["model.layers.0.mlp.down"], ["0.mlp.down_proj.weight"]):
        refused(tmp_path, method, entries, f"{DOWN} is not packed in the files, but not in", **{member: listed})


@pytest.mark.parametrize("method", SAID)
@pytest.mark.parametrize("listed", [DOWN, "model.layers.0"])
def test_a_module_that_is_packed_although_it_is_listed_is_refused(tmp_path: Path, method: str, listed: str) -> None:
    entries, _ = packed_entries(ONE_LAYER[method], method)
    member = "ignore" if method == "compressed" else "modules_to_not_convert"
    sentence = rf"model\.layers\.0\.\S+ is packed in the files, but in {member}"
    refused(tmp_path, method, entries, sentence, **{member: [listed]})


def test_a_long_list_of_modules_is_searched_by_each_name_s_parts() -> None:
    """A file of 16 MiB may list a million names, and a model has thousands of tensors: all pairs would take an hour."""
    said = FP8 | {"modules_to_not_convert": [*(["odd"] * 1_000_000), "layers.7.mlp"]}
    found = quantization_of(Members({"quantization_config": said}, "config.json"))
    assert found is not None
    names = [name for name, _ in model_tensors(replace(LLAMA, layers=MAX_LAYERS)) if name.endswith("_proj.weight")]
    plain = [name for name in names if not found.is_packed(name)]
    assert plain == [f"model.layers.7.mlp.{part}_proj.weight" for part in ("gate", "up", "down")]


def group(**said: Any) -> dict[str, Any]:
    return {"group_0": COMPRESSED["config_groups"]["group_0"] | said}


def weights(**said: Any) -> dict[str, Any]:
    return group(weights=COMPRESSED["config_groups"]["group_0"]["weights"] | said)


def refused(folder: Path, method: str, entries: Entries, sentence: str, **said: Any) -> None:
    packing = {key: value for key, value in (SAID[method] | said).items() if value != "left out"}
    with pytest.raises(ModelRejected, match=sentence):
        open_model(write_packed_folder(folder, ONE_LAYER[method], entries, packing))


@pytest.mark.parametrize(
    ("method", "said", "sentence"),
    [
        (
            "fp8",
            {"quant_method": "gptq"},
            "quantization_config: quant_method must be one of fp8, awq, compressed-tensors, not 'gptq'",
        ),
        ("fp8", {"quant_method": "left out"}, "quantization_config: quant_method is missing"),
        ("fp8", {"weight_block_size": [64, 128]}, r"weight_block_size must be \[128, 128\], not '\[64, 128\]'"),
        ("fp8", {"weight_block_size": "left out"}, r"weight_block_size must be \[128, 128\], not 'None'"),
        ("fp8", {"activation_scheme": "static"}, "activation_scheme must be dynamic, not 'static'"),
        ("fp8", {"fmt": "e5m2"}, "fmt must be e4m3, not 'e5m2'"),
        ("fp8", {"scale_fmt": "ue8m0"}, "scale_fmt must be float, not 'ue8m0'"),
        ("fp8", {"kv_cache_scheme": None}, "quantization_config: 'kv_cache_scheme' is not a known member"),
        (
            "fp8",
            {"modules_to_not_convert": [7]},
            r"modules_to_not_convert must be a list of modules' names, not '\[7\]'",
        ),
        ("fp8", {"modules_to_not_convert": "lm_head"}, "modules_to_not_convert must be a list, not 'lm_head'"),
        ("awq", {"bits": 8}, "bits must be 4, not '8'"),
        ("awq", {"group_size": 64}, "group_size must be 128, not '64'"),
        ("awq", {"zero_point": False}, "zero_point must be True, not 'False'"),
        ("awq", {"zero_point": 1}, "zero_point must be True, not '1'"),
        ("awq", {"version": "gemv"}, "version must be gemm or GEMM, not 'gemv'"),
        ("awq", {"do_fuse": True}, "do_fuse must be False, not 'True'"),
        ("awq", {"desc_act": False}, "quantization_config: 'desc_act' is not a known member"),
        ("compressed", {"format": "pack-quantized"}, "format must be float-quantized, not 'pack-quantized'"),
        ("compressed", {"kv_cache_scheme": {"num_bits": 8}}, "kv_cache_scheme must be null, not "),
        ("compressed", {"ignore": ["re:.*lm_head"]}, r"ignore must be a list of modules' names, not .*re:"),
        ("compressed", {"config_groups": "left out"}, "config_groups must have one group, for all linears"),
        ("compressed", {"config_groups": {"a": {}, "b": {}}}, "config_groups must have one group, for all linears"),
        ("compressed", {"config_groups": {"a": {"weights": None}}}, "config_groups: weights of the group are missing"),
        ("compressed", {"config_groups": group(targets=["Linear", "q"])}, r"targets must be \['Linear'\], not "),
        (
            "compressed",
            {"config_groups": weights(strategy="tensor")},
            "weights: strategy must be channel, not 'tensor'",
        ),
        ("compressed", {"config_groups": weights(symmetric=False)}, "weights: symmetric must be True, not 'False'"),
        ("compressed", {"config_groups": weights(odd=1)}, "weights: 'odd' is not a known member"),
    ],
)
def test_what_the_engine_does_not_compute_is_refused_by_name(
    tmp_path: Path, method: str, said: dict[str, Any], sentence: str
) -> None:
    refused(tmp_path, method, {}, sentence, **said)


@pytest.mark.parametrize(
    ("method", "change", "sentence"),
    [
        ("fp8", {f"{DOWN}.weight_scale_inv": None}, f"{DOWN} is not packed in the files, but not in"),
        ("fp8", {f"{DOWN}.weight": None}, f"tensor {DOWN}.weight is missing"),
        (
            "fp8",
            {f"{DOWN}.weight_scale_inv": ("F32", (2, 2))},
            r"scale_inv must have the shape \[2, 3\], .* not \[2, 2\]",
        ),
        ("fp8", {f"{DOWN}.weight_scale_inv": ("F16", (2, 3))}, "scale_inv must be of type F32 or BF16, not F16"),
        ("fp8", {f"{DOWN}.weight": ("F8_E5M2", (160, 288))}, "down_proj.weight must be of type F8_E4M3, not F8_E5M2"),
        ("fp8", {f"{DOWN}.input_scale": ("F32", (1,))}, f"'{DOWN}.input_scale' is not part of a qwen2 model"),
        ("fp8", {"lm_head.weight_scale_inv": ("F32", (1, 2))}, "'lm_head.weight_scale_inv' is not part of"),
        ("compressed", {f"{DOWN}.weight_scale": ("F32", (1,))}, r"scale must have the shape \[160, 1\], .* not \[1\]"),
        ("compressed", {f"{DOWN}.input_scale": ("F32", (1,))}, f"'{DOWN}.input_scale' is not part of a qwen2 model"),
        ("awq", {f"{DOWN}.qzeros": None}, f"tensor {DOWN}.qzeros is missing"),
        (
            "awq",
            {f"{DOWN}.qweight": ("I32", (384, 128))},
            r"qweight must have the shape \[384, 16\], .* not \[384, 128\]",
        ),
        ("awq", {f"{DOWN}.scales": ("BF16", (3, 128))}, "down_proj.scales must be of type F16, not BF16"),
        ("awq", {f"{DOWN}.weight": ("F16", (128, 384))}, f"tensor {DOWN}.weight exists twice, packed and plain"),
        ("awq", {f"{DOWN}.bias": ("F16", (128,))}, f"'{DOWN}.bias' is not part of a qwen2 model"),
    ],
)
def test_a_tensor_that_is_not_the_format_s_is_named(
    tmp_path: Path, method: str, change: dict[str, tuple[str, tuple[int, ...]] | None], sentence: str
) -> None:
    entries, _ = packed_entries(ONE_LAYER[method], method)
    for name, entry in change.items():
        entries.pop(name, None)
        if entry is not None:
            kind, shape = entry
            entries[name] = (kind, shape, bytes(int(np.prod(shape)) * ITEM_BYTES[kind]))
    refused(tmp_path, method, entries, sentence)


def test_columns_that_are_no_groups_of_awq_are_refused(tmp_path: Path) -> None:
    config = replace(LLAMA, layers=1, width=160, heads=5, key_heads=1)
    entries, _ = packed_entries(config, "fp8")
    for name in [name for name in entries if name.endswith("proj.weight")]:
        weight = entries.pop(name)
        entries |= {f"{name.removesuffix('weight')}{part}": weight for part in ("qweight", "qzeros", "scales")}
    with pytest.raises(ModelRejected, match=r"qweight must have a multiple of 128 rows, not 160"):
        open_model(write_packed_folder(tmp_path, config, entries, AWQ))


def test_packed_weights_without_the_member_are_named(tmp_path: Path) -> None:
    entries, _ = packed_entries(ONE_LAYER["fp8"], "fp8")
    folder = write_packed_folder(tmp_path, ONE_LAYER["fp8"], entries, {})
    with pytest.raises(ModelRejected, match="weight_scale_inv' is not part of a qwen2 model"):
        open_model(folder)


def test_packed_weights_of_fused_tensors_are_refused(tmp_path: Path) -> None:
    folder = write_folder(tmp_path, PHI3, random_weights(PHI3), says={"quantization_config": FP8})
    with pytest.raises(ModelRejected, match="quantization_config: the engine reads no packed weights of phi3 models"):
        open_model(folder)


def test_both_types_are_packed_on_the_card() -> None:
    assert {kind: str(PACKED[kind]) for kind in set(KINDS.values())} == {TensorType.FP8: "fp8", TensorType.AWQ: "awq"}
    assert FP8["quant_method"] == "fp8"
