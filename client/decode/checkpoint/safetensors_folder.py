"""A folder in the format of Hugging Face's transformers: config.json, and safetensors in one or several files.

The `safetensors` library checks a file's header: types, shapes, no holes, no overlaps, and that the file is complete.
Rows are then views of the mapped file.
"""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Final

from safetensors import safe_open

from gpulease.client.decode.checked_file import MAX_JSON_BYTES, Members, files_sha256, json_object, read_bytes
from gpulease.client.decode.checkpoint.hugging_face_config import GEMMA3_IMAGES, hugging_face_config
from gpulease.client.decode.checkpoint.model_tensors import (
    check_names,
    check_shape,
    fused_tensors,
    model_tensors,
    text_name,
)
from gpulease.client.decode.checkpoint.pooling import folder_pooling
from gpulease.client.decode.checkpoint.quantized_weights import FileTensor, packed_tensors, quantization_of
from gpulease.client.decode.checkpoint.rotary import Rotation, rotation_of, turned_order
from gpulease.client.decode.checkpoint.tensor_file import FileRows, TensorFile
from gpulease.client.decode.checkpoint.tensors import Tensor, TensorType, reordered_heads, row_bytes, with_one_added
from gpulease.client.decode.decode_errors import ModelRejected
from gpulease.client.decode.library_errors import rejected
from gpulease.client.decode.model_config import Family, ModelConfig
from gpulease.client.decode.text.hugging_face_text import folder_begin_token, folder_tokenizer
from gpulease.client.decode.text.tokenizer import Tokenizer
from gpulease.client.texts import quoted

WEIGHTS: Final = "model.safetensors"
INDEX: Final = "model.safetensors.index.json"

MAX_FILES: Final = 256
"""Maximum number of files of one model, so that a hostile index can't open more files than a process may have. Each
takes two descriptors, for its mapping and for reading ahead."""

TYPES: Final = {"F32": TensorType.F32, "F16": TensorType.F16, "BF16": TensorType.BF16}
"""The supported types, by safetensors' names."""

ADAPTER: Final = "adapter_config.json"
"""The file, written by peft, that shows that a folder contains an adapter."""

TURNED: Final = ("self_attn.q_proj.weight", "self_attn.k_proj.weight")
"""Suffixes of the names of tensors whose rows are rotated by positions."""


class SafetensorsFolder:
    """A model in a folder of safetensors files, as a Checkpoint."""

    def __init__(self, folder: Path) -> None:
        """Map the files, and check everything except the weights' values. Raises ModelRejected."""
        self.name = str(folder)
        self._folder = folder
        if self._has(ADAPTER):
            # transformers would apply the adapter to the model in this folder, and compute other tokens.
            raise ModelRejected(
                f"{folder / ADAPTER}: adapters (LoRA) are not supported", "Merge the adapter into its model's weights"
            )
        config = self._members("config.json")
        # Optional: older models have its keys in config.json.
        generation = self._members("generation_config.json") if self._has("generation_config.json") else None
        self.config = hugging_face_config(config, generation, folder_begin_token(folder))
        self.pooling = folder_pooling(folder)
        # Step 1: collect the tensors of all files. The index's assignment of tensors to files is not needed.
        tensors: dict[str, FileTensor] = {}
        self._opened: list[TensorFile] = []
        has_images = config.text("model_type", "") == GEMMA3_IMAGES
        for path in self._files():
            file = TensorFile(path)
            self._opened.append(file)
            for written, shape, kind, offset in _entries(file):
                if (name := text_name(written) if has_images else written) is None:
                    continue
                if name in tensors:
                    raise ModelRejected(f"{path}: tensor {quoted(name)} is in {tensors[name].file.path.name} too")
                tensors[name] = FileTensor(file, shape, kind, offset)
        quantization = quantization_of(config)
        if quantization is not None and (self.config.turned_width is not None or any(fused_tensors(self.config))):
            raise ModelRejected(
                f"{quantization.where}: the engine reads no packed weights of {self.config.family} models"
            )
        _unfuse(self.config, tensors, self.name)
        # Step 2: make the packed weights from their tensors.
        shapes, self._tensors = dict(model_tensors(self.config)), {}
        if quantization is not None:
            packed = packed_tensors(quantization, self.config, shapes, tensors)
            self._tensors = {tensor.name: tensor for tensor in packed}
        # Step 3: compare names, shapes and types with what the config requires.
        check_names(self.config, [*tensors, *self._tensors], self.name)
        for name, expected in shapes.items():
            if name in self._tensors:
                continue
            file, shape, kind, offset = tensors[name]
            check_shape(self.config, name, shape, expected, str(file.path))
            tensor = _tensor(name, shape, _type(name, kind, file), file, offset)
            if self.config.turned_width is not None and name.endswith(TURNED):
                tensor = replace(tensor, read=reordered_heads(tensor.read, turned_order(self.config)))
            if self.config.family is Family.GEMMA3 and name.endswith("norm.weight"):
                tensor = with_one_added(tensor)
            self._tensors[name] = tensor

    def tensor(self, name: str) -> Tensor:
        """Return a tensor of the model. Raises KeyError for a name that the model does not have."""
        return self._tensors[name]

    def rotation(self, positions: int) -> Rotation:
        """Return how positions rotate heads, in an engine with sequences of up to `positions` positions."""
        return rotation_of(self.config, positions)

    def sha256(self) -> str:
        """Return the digest of config.json, generation_config.json and the weights' files, sorted by name."""
        names = ("config.json", "generation_config.json", INDEX)
        return files_sha256([*(self._folder / name for name in names if self._has(name)), *self._files()])

    def tokenizer(self) -> Tokenizer:
        """Return the model's tokenizer. Raises ModelRejected if it is missing or broken."""
        return folder_tokenizer(self._folder, self.config.begin_token)

    def close(self) -> None:
        """Close the files, after which no tensor can be read."""
        for file in self._opened:
            file.close()

    def _has(self, name: str) -> bool:
        return (self._folder / name).exists()

    def _members(self, name: str) -> Members:
        path = self._folder / name
        return Members(json_object(read_bytes(path, MAX_JSON_BYTES), path), str(path))

    def _files(self) -> list[Path]:
        # One file takes precedence over an index. Without either, opening the file reports the missing file.
        if self._has(WEIGHTS) or not self._has(INDEX):
            return [self._folder / WEIGHTS]
        index = self._members(INDEX)
        places = index.object("weight_map")
        names = sorted(set(map(str, places.values.values()))) if places else []
        if not 1 <= len(names) <= MAX_FILES:
            raise ModelRejected(f"{index.where}: weight_map must name 1 to {MAX_FILES} files, not {len(names)}")
        for name in names:
            # A name with several parts could point to any file of the host.
            if Path(name).name != name or not name.endswith(".safetensors"):
                raise ModelRejected(
                    f"{index.where}: {quoted(name)} must be the name of a safetensors file in the same folder"
                )
        return [self._folder / name for name in names]


def _entries(file: TensorFile) -> Iterator[tuple[str, tuple[int, ...], str, int]]:
    """Yield name, shape, type and offset of each tensor of a file. Raises ModelRejected."""
    path, mapped = file.path, file.mapped
    # A file begins with the length of its JSON header, 8 bytes. Tensors' offsets count from the header's end.
    begin = 8 + int.from_bytes(mapped[:8], "little")
    if begin > MAX_JSON_BYTES:
        raise ModelRejected(f"{path}: broken: its header has {begin:,} bytes; it may have {MAX_JSON_BYTES:,}")
    # The library checks the header against the file's length, so entries can be trusted below.
    with rejected(ModelRejected, f"{path}: broken or truncated"), safe_open(path, framework="numpy"):
        pass
    for name, entry in json_object(mapped[8:begin], path).items():
        if name != "__metadata__":
            yield name, tuple(entry["shape"]), entry["dtype"], begin + entry["data_offsets"][0]


def _unfuse(config: ModelConfig, tensors: dict[str, FileTensor], where: str) -> None:
    """Replace each fused tensor by the model's tensors that it contains, which are runs of its rows."""
    for name, parts in fused_tensors(config):
        if name not in tensors:
            raise ModelRejected(f"{where}: tensor {name} is missing")
        file, shape, kind, offset = tensors.pop(name)
        check_shape(config, name, shape, (sum(parts.values()), config.width), str(file.path))
        size_bytes = row_bytes(_type(name, kind, file), config.width, f"{file.path}: tensor {name}")
        for part, rows in parts.items():
            if part in tensors:
                raise ModelRejected(f"{where}: tensor {part} exists twice, by itself and in {name}")
            tensors[part] = FileTensor(file, (rows, config.width), kind, offset)
            offset += rows * size_bytes


def _type(name: str, kind: str, file: TensorFile) -> TensorType:
    if kind not in TYPES:
        raise ModelRejected(f"{file.path}: tensor {name} is of type {kind}; the engine reads {', '.join(TYPES)}")
    return TYPES[kind]


def _tensor(name: str, shape: tuple[int, ...], kind: TensorType, file: TensorFile, offset: int) -> Tensor:
    rows = FileRows(file, offset, row_bytes(kind, shape[-1], f"{file.path}: tensor {name}"))
    return Tensor(name, shape, kind, rows)
