"""Models of random packed weights in safetensors (FP8 and AWQ), and their values as the formats define them."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from gpulease.client.decode.model_config import ModelConfig
from helpers.made_models import Weights, config_json, encoded, random_weights
from helpers.safetensors_head import safetensors_head

FP8: Final[dict[str, Any]] = {
    "quant_method": "fp8",
    "fmt": "e4m3",
    "activation_scheme": "dynamic",
    "weight_block_size": [128, 128],
    "modules_to_not_convert": ["lm_head"],
}
"""`quantization_config` of Qwen3-*-FP8."""

AWQ: Final[dict[str, Any]] = {
    "quant_method": "awq",
    "bits": 4,
    "group_size": 128,
    "zero_point": True,
    "version": "gemm",
    "modules_to_not_convert": None,
}
"""`quantization_config` of Qwen2.5-*-AWQ."""

COMPRESSED: Final[dict[str, Any]] = {
    "quant_method": "compressed-tensors",
    "format": "float-quantized",
    "quantization_status": "compressed",
    "global_compression_ratio": 1.5,
    "kv_cache_scheme": None,
    "ignore": ["lm_head"],
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "input_activations": {"num_bits": 8, "type": "float", "strategy": "token", "dynamic": True},
            "output_activations": None,
            "weights": {
                "num_bits": 8,
                "type": "float",
                "strategy": "channel",
                "symmetric": True,
                "dynamic": False,
                "group_size": None,
                "block_structure": None,
                "observer": "minmax",
                "observer_kwargs": {},
            },
        }
    },
}
"""`quantization_config` that llm-compressor writes for FP8_DYNAMIC."""

PACKINGS: Final[dict[str, dict[str, Any]]] = {"fp8": FP8, "awq": AWQ}
"""Packings by the names of the kernels' layouts."""

Entries = dict[str, tuple[str, tuple[int, ...], bytes]]
"""Tensors of a file by name: type, shape and bytes."""


def _e4m3(code: int) -> float:
    """Return a code's value (OCP OFP8, 5.2): a sign, 4 exponent bits (bias 7), 3 mantissa bits; 0x7F is NaN."""
    sign, exponent, mantissa = (-1 if code & 128 else 1), code >> 3 & 15, code & 7
    if (exponent, mantissa) == (15, 7):
        return float("nan")
    return sign * (mantissa / 8 * 2.0**-6 if exponent == 0 else (1 + mantissa / 8) * 2.0 ** (exponent - 7))


E4M3: Final = np.array([_e4m3(code) for code in range(256)], np.float32)
"""The value of each code."""


def e4m3_codes(rng: np.random.Generator, rows: int, columns: int) -> NDArray[np.uint8]:
    """Return random codes with nearly normally distributed values."""
    order = np.argsort(E4M3)[:254]
    return order[np.searchsorted(E4M3[order][:-1], rng.normal(0, 1, (rows, columns)))].astype(np.uint8)


def packed_fp8(rng: np.random.Generator, module: str, rows: int, columns: int) -> tuple[Entries, NDArray[np.float32]]:
    """Return a linear's tensors in FP8, with a scale for each block of 128 rows and 128 columns, and its values."""
    return _fp8(rng, module, rows, columns, (128, 128), "weight_scale_inv")


def packed_by_rows(
    rng: np.random.Generator, module: str, rows: int, columns: int
) -> tuple[Entries, NDArray[np.float32]]:
    """Return a linear's tensors in the FP8 of compressed-tensors, with a scale for each row, and its values."""
    return _fp8(rng, module, rows, columns, (1, columns), "weight_scale")


def _fp8(
    rng: np.random.Generator, module: str, rows: int, columns: int, block: tuple[int, int], scale_name: str
) -> tuple[Entries, NDArray[np.float32]]:
    codes = e4m3_codes(rng, rows, columns)
    wanted = rng.uniform(0.5, 1.5, (-(-rows // block[0]), -(-columns // block[1]))) / np.sqrt(columns)
    kept = encoded(wanted.astype(np.float32), "BF16")
    scales = (np.frombuffer(kept, np.uint16).astype(np.uint32) << 16).view(np.float32).reshape(wanted.shape)
    values = E4M3[codes] * np.repeat(np.repeat(scales, block[0], 0), block[1], 1)[:rows, :columns]
    entries = {
        f"{module}.weight": ("F8_E4M3", codes.shape, codes.tobytes()),
        f"{module}.{scale_name}": ("BF16", scales.shape, kept),
    }
    return entries, values


def packed_awq(rng: np.random.Generator, module: str, rows: int, columns: int) -> tuple[Entries, NDArray[np.float32]]:
    """Return a linear's tensors in AWQ's layout "gemm", and its values.

    A word has 8 columns of the transposed weight. Column `order[i]` is at bit 4 i (AutoAWQ, WQLinear_GEMM.from_linear).
    """
    order = (0, 2, 4, 6, 1, 3, 5, 7)
    codes = rng.integers(0, 16, (columns, rows), np.uint32)
    zeros = rng.integers(0, 16, (columns // 128, rows), np.uint32)
    scales = (rng.uniform(0.5, 1.5, zeros.shape) / np.sqrt(columns) / 8).astype(np.float16)

    def words(values: NDArray[np.uint32]) -> NDArray[np.int32]:
        packed = np.zeros((len(values), rows // 8), np.uint32)
        for column in range(rows // 8):
            for place in range(8):
                packed[:, column] |= values[:, 8 * column + order[place]] << np.uint32(4 * place)
        return packed.view(np.int32)

    values = np.empty((rows, columns), np.float32)
    for column in range(columns):
        group = column // 128
        values[:, column] = (codes[column].astype(np.float32) - zeros[group]) * scales[group].astype(np.float32)
    entries = {}
    for part, kind, array in (
        ("qweight", "I32", words(codes)),
        ("qzeros", "I32", words(zeros)),
        ("scales", "F16", scales),
    ):
        entries[f"{module}.{part}"] = (kind, array.shape, array.tobytes())
    return entries, values


def write_entries(path: Path, entries: Entries) -> None:
    """Write a safetensors file with tensors of any type."""
    head = safetensors_head({name: (kind, shape) for name, (kind, shape, _) in entries.items()})
    path.write_bytes(head + b"".join(data for _, _, data in entries.values()))


def packed_entries(config: ModelConfig, method: str, plain: Sequence[str] = ()) -> tuple[Entries, Weights]:
    """Return a model's tensors, and their values.

    All linears of its layers are packed, except those with names that end as in `plain`.
    """
    rng = np.random.default_rng(1)
    entries: Entries = {}
    values: Weights = {}
    for name, weights in random_weights(config).items():
        if name.endswith("_proj.weight") and not name.endswith(tuple(plain)):
            pack = {"fp8": packed_fp8, "awq": packed_awq, "compressed": packed_by_rows}[method]
            its, values[name] = pack(rng, name.removesuffix(".weight"), *weights.shape)
            entries |= its
        else:
            values[name] = weights / np.float32(8 if weights.ndim > 1 else 1)
            entries[name] = ("BF16", weights.shape, encoded(values[name], "BF16"))
    return entries, values


def write_packed_folder(folder: Path, config: ModelConfig, entries: Entries, packing: Mapping[str, Any]) -> Path:
    """Write a model folder with packed weights."""
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config_json(config) | {"quantization_config": packing}))
    write_entries(folder / "model.safetensors", entries)
    return folder
