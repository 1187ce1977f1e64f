"""Packed weights in safetensors: their declaration in config.json, and their tensors as rows of packed planes.

There are three formats, read as in transformers: FP8 in blocks (its FineGrainedFP8Config, the files of Qwen3-*-FP8),
FP8 by rows (compressed-tensors' "float-quantized") and AWQ (its AwqConfig, in AutoAWQ's layout "gemm"). The engine
computes with the weights' values rounded to bf16. It does not quantise activations, as some other servers do with FP8,
so its results are closer to the unpacked model's.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from gpulease.client.decode.checked_file import Members, quoted_value
from gpulease.client.decode.checkpoint.model_tensors import check_shape
from gpulease.client.decode.checkpoint.tensor_file import FileRows, TensorFile
from gpulease.client.decode.checkpoint.tensors import GROUP, Tensor, TensorType, row_bytes
from gpulease.client.decode.decode_errors import ModelRejected
from gpulease.client.decode.model_config import ModelConfig
from gpulease.client.texts import quoted

FP8: Final = "fp8"
AWQ: Final = "awq"
COMPRESSED: Final = "compressed-tensors"

Accepted = Mapping[str, tuple[Any, ...]]
"""The members of an object, and the values that the engine supports; () for any value. A member is required unless its
values include None."""

_ACCEPTED: Final[dict[str, Accepted]] = {
    FP8: {
        "weight_block_size": ([GROUP, GROUP],),
        "activation_scheme": ("dynamic",),
        "fmt": ("e4m3", None),
        "scale_fmt": ("float", None),
        # Whether transformers unpacks the weights when it loads them.
        "dequantize": (True, False, None),
        "modules_to_not_convert": (),
    },
    AWQ: {
        "bits": (4,),
        "group_size": (GROUP,),
        "zero_point": (True,),
        "version": ("gemm", "GEMM", None),
        "format": ("gemm", "GEMM", None),
        # The kernels that compute with the weights, and the modules that these fuse.
        "backend": ("autoawq", "auto", None),
        "do_fuse": (False, None),
        "fuse_max_seq_len": (None,),
        "modules_to_fuse": (None,),
        "exllama_config": (None,),
        "modules_to_not_convert": (),
    },
    COMPRESSED: {
        "format": ("float-quantized",),
        "quantization_status": ("compressed", None),
        "kv_cache_scheme": (None,),
        "sparsity_config": ({}, None),
        "transform_config": ({}, None),
        "config_groups": (),
        "ignore": (),
        "global_compression_ratio": (),
        "version": (),
    },
}
"""By `quant_method`, the members of quantization_config."""

_GROUP_MEMBERS: Final[Accepted] = {
    "targets": (["Linear"],),
    "weights": (),
    # How other engines quantise the inputs of a linear.
    "input_activations": (),
    "output_activations": (None,),
    "format": ("float-quantized", None),
}
_WEIGHT_MEMBERS: Final[Accepted] = {
    "num_bits": (8,),
    "type": ("float",),
    "strategy": ("channel",),
    "symmetric": (True,),
    "dynamic": (False, None),
    "group_size": (None,),
    "block_structure": (None,),
    "actorder": (None,),
    "zp_dtype": (None,),
    "scale_dtype": (None,),
    # How the scales were chosen.
    "observer": (),
    "observer_kwargs": (),
}
"""Members of the only group of `config_groups`, and of its `weights`."""

_EXCEPTIONS: Final = {FP8: "modules_to_not_convert", AWQ: "modules_to_not_convert", COMPRESSED: "ignore"}
"""The member that lists the modules that are not packed."""

_AWQ_ORDER: Final = (0, 2, 4, 6, 1, 3, 5, 7)
"""The columns whose values are at bits 0, 4, 8 and so on of a word of 8 columns (AutoAWQ,
WQLinear_GEMM.from_linear)."""

_SCALES: Final = {"F32": TensorType.F32, "BF16": TensorType.BF16}
"""Types of FP8's scales."""


class FileTensor(NamedTuple):
    """A tensor as a file's header describes it; `kind` is safetensors' name of its type."""

    file: TensorFile
    shape: tuple[int, ...]
    kind: str
    offset: int


@dataclass(frozen=True, slots=True)
class Quantization:
    """Which linears of a model are packed, and how.

    Attributes:
        method: FP8, AWQ or COMPRESSED.
        exceptions: Names of modules that are not packed: whole names, or parts between dots.
        where: The member of config.json, for errors.
    """

    method: str
    exceptions: frozenset[str]
    where: str

    def is_packed(self, name: str) -> bool:
        """Return whether a tensor of the model is a linear's weight that must be packed."""
        # Both libraries leave the model's head unpacked, even if it is not listed.
        if not name.endswith("_proj.weight"):
            return False
        # Look up the name's few parts rather than scan the list: the list may have millions of names, and a model has
        # thousands of tensors.
        words = name.removesuffix(".weight").split(".")
        runs = (".".join(words[i:j]) for i in range(len(words)) for j in range(i + 1, len(words) + 1))
        return self.exceptions.isdisjoint(runs)


def quantization_of(members: Members) -> Quantization | None:
    """Return config.json's description of packed weights; None if it has none.

    Raises ModelRejected for a format, a member or a value that the engine does not support.
    """
    packing = members.object("quantization_config")
    if packing is None or not packing.values:
        return None
    method = packing.text("quant_method")
    if method not in _ACCEPTED:
        raise ModelRejected(
            f"{packing.where}: quant_method must be one of {', '.join(_ACCEPTED)}, not {quoted(method)}"
        )
    _check_members(packing, _ACCEPTED[method], "quant_method")
    if method == COMPRESSED:
        _check_groups(packing)
    exceptions = packing.items(_EXCEPTIONS[method])
    # compressed-tensors' names may be patterns, which begin with this prefix.
    if not all(isinstance(name, str) and name and not name.startswith("re:") for name in exceptions):
        raise ModelRejected(
            f"{packing.where}: {_EXCEPTIONS[method]} must be a list of modules' names, not {quoted_value(exceptions)}"
        )
    return Quantization(method, frozenset(exceptions), packing.where)


def _check_groups(packing: Members) -> None:
    groups = packing.object("config_groups")
    if groups is None or len(groups.values) != 1:
        raise ModelRejected(f"{packing.where}: config_groups must have one group, for all linears")
    group = groups.object(next(iter(groups.values)))
    weights = None if group is None else group.object("weights")
    if group is None or weights is None:
        raise ModelRejected(f"{groups.where}: weights of the group are missing")
    _check_members(group, _GROUP_MEMBERS)
    _check_members(weights, _WEIGHT_MEMBERS)


def _check_members(members: Members, accepted: Accepted, *others: str) -> None:
    # Unlike elsewhere, an unknown member is refused: it could change how the weights' bytes are read.
    for name in members.values:
        if name not in accepted and name not in others:
            raise ModelRejected(f"{members.where}: {quoted(name)} is not a known member")
    for name, values in accepted.items():
        value = members.values.get(name)
        if values and not any(
            type(value) is type(allowed_value) and value == allowed_value for allowed_value in values
        ):
            allowed = " or ".join(str(allowed_value) for allowed_value in values if allowed_value is not None) or "null"
            raise ModelRejected(f"{members.where}: {name} must be {allowed}, not {quoted_value(value)}")


def packed_tensors(
    quantization: Quantization,
    config: ModelConfig,
    shapes: Mapping[str, tuple[int, ...]],
    tensors: dict[str, FileTensor],
) -> Iterator[Tensor]:
    """Take the tensors of packed weights out of `tensors`, and yield the weights that they contain.

    Args:
        quantization: The description of the weights in config.json.
        config: The model's shape.
        shapes: The shape of each of the model's tensors, by name.
        tensors: The tensors of all files. A weight that is not packed stays.

    Raises ModelRejected for a weight that is packed although config.json says otherwise, or has a wrong shape or type.
    """
    for name, shape in shapes.items():
        parts = _PARTS[quantization.method]
        module = name.removesuffix(".weight")
        has_parts = any(f"{module}.{part}" in tensors for part in parts[1:])
        is_packed = quantization.is_packed(name)
        if has_parts != is_packed:
            listed = "in" if not is_packed else "not in"
            packed = "packed" if has_parts else "not packed"
            raise ModelRejected(
                f"{quantization.where}: {module} is {packed} in the files, but {listed}"
                f" {_EXCEPTIONS[quantization.method]}"
                if name.endswith("_proj.weight")
                else f"{quantization.where}: tensor {name} is packed; only linears of layers may be packed"
            )
        if not is_packed:
            continue
        consumed = []
        for part in parts:
            if (entry := tensors.pop(f"{module}.{part}", None)) is None:
                raise ModelRejected(f"{quantization.where}: tensor {module}.{part} is missing")
            consumed.append(entry)
        # AWQ's tensors have other names than a plain weight, so a file could have both.
        if name in tensors:
            raise ModelRejected(f"{quantization.where}: tensor {name} exists twice, packed and plain")
        if quantization.method == AWQ:
            yield _awq_tensor(config, name, shape, *consumed)
        else:
            # Each scale belongs to a block of rows and columns; for FP8 by rows, to one row with all of its columns.
            block = (GROUP, GROUP) if quantization.method == FP8 else (1, shape[1])
            yield _fp8_tensor(config, name, shape, block, f"{module}.{parts[1]}", *consumed)


_PARTS: Final = {
    FP8: ("weight", "weight_scale_inv"),
    AWQ: ("qweight", "qzeros", "scales"),
    COMPRESSED: ("weight", "weight_scale"),
}
"""The tensors of a packed weight."""


def _fp8_tensor(
    config: ModelConfig,
    name: str,
    shape: tuple[int, ...],
    block: tuple[int, int],
    scale_name: str,
    weight: FileTensor,
    scale: FileTensor,
) -> Tensor:
    rows, columns = shape
    check_shape(config, name, weight.shape, shape, str(weight.file.path))
    _check_kind(name, weight, "F8_E4M3")
    # The last block of rows or columns may be smaller.
    blocks = (-(-rows // block[0]), -(-columns // block[1]))
    check_shape(config, scale_name, scale.shape, blocks, str(scale.file.path))
    _check_kind(scale_name, scale, *_SCALES)
    kind = _SCALES[scale.kind]
    scale_bytes = row_bytes(kind, blocks[1], scale_name)
    scales = Tensor(scale_name, blocks, kind, FileRows(scale.file, scale.offset, scale_bytes))
    groups = -(-columns // GROUP)

    def scale_rows(begin: int, end: int) -> NDArray[np.uint8]:
        # Give each row its block's scales, because in a linear of several tensors, blocks may end at any row.
        first = begin // block[0]
        of_blocks = scales.f32(first, -(-end // block[0]))
        of_rows = of_blocks[np.arange(begin, end) // block[0] - first]
        return np.repeat(of_rows, groups // blocks[1], 1).view(np.uint8)

    return Tensor(name, shape, TensorType.FP8, FileRows(weight.file, weight.offset, columns), (scale_rows,))


def _awq_tensor(
    config: ModelConfig, name: str, shape: tuple[int, ...], weight: FileTensor, zeros: FileTensor, scales: FileTensor
) -> Tensor:
    rows, columns = shape
    module = name.removesuffix("weight")
    if columns % GROUP:
        raise ModelRejected(
            f"{weight.file.path}: tensor {module}qweight must have a multiple of {GROUP} rows, not {columns}"
        )
    if rows % 8:
        raise ModelRejected(
            f"{weight.file.path}: tensor {module}qweight has columns of 8 values, but {rows} are needed"
        )
    groups = columns // GROUP
    # AWQ's tensors are transposed: their rows are the linear's columns.
    for part, entry, expected, kind in (
        ("qweight", weight, (columns, rows // 8), "I32"),
        ("qzeros", zeros, (groups, rows // 8), "I32"),
        ("scales", scales, (groups, rows), "F16"),
    ):
        check_shape(config, module + part, entry.shape, expected, str(entry.file.path))
        _check_kind(module + part, entry, kind)
    scale_file = FileRows(scales.file, scales.offset, rows * 2)

    def values(begin: int, end: int) -> NDArray[np.uint8]:
        # Two values per byte: columns i and i + 32 of each group of 64, as linear_awq reads them.
        halves = _awq_rows(weight, columns, rows, begin, end).reshape(end - begin, -1, 2, 32)
        packed = halves[:, :, 0] | halves[:, :, 1] << np.uint8(4)
        return packed.reshape(end - begin, -1)

    def scale_rows(begin: int, end: int) -> NDArray[np.uint8]:
        halves = scale_file(0, groups).view(np.float16)[:, begin:end]
        return np.ascontiguousarray(halves.T).view(np.uint8)

    def zero_rows(begin: int, end: int) -> NDArray[np.uint8]:
        return _awq_rows(zeros, groups, rows, begin, end)

    return Tensor(name, shape, TensorType.AWQ, values, (scale_rows, zero_rows))


def _awq_rows(entry: FileTensor, count: int, width: int, begin: int, end: int) -> NDArray[np.uint8]:
    """Return columns [begin, end) of `count` rows of `width` values in words, transposed: a byte for each value."""
    words = FileRows(entry.file, entry.offset, width // 2)(0, count).view(np.uint32)
    # Read only the words that contain the wanted columns.
    first, last = begin // 8, -(-end // 8)
    part = words[:, first:last].T
    values = np.empty((last - first, 8, count), np.uint8)
    for place, column in enumerate(_AWQ_ORDER):
        values[:, column] = (part >> np.uint32(4 * place)) & np.uint32(15)
    return values.reshape(-1, count)[begin - 8 * first : end - 8 * first]


def _check_kind(name: str, entry: FileTensor, *kinds: str) -> None:
    if entry.kind not in kinds:
        raise ModelRejected(f"{entry.file.path}: tensor {name} must be of type {' or '.join(kinds)}, not {entry.kind}")
