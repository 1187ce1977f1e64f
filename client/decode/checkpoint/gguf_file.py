"""A model in one GGUF file, with the types and names that llama.cpp's converter writes."""

from collections.abc import Mapping
from pathlib import Path
from typing import Final

import numpy as np
from gguf import GGMLQuantizationType
from numpy.typing import NDArray

from gpulease.client.decode.checked_file import Members, file_sha256
from gpulease.client.decode.checkpoint.gguf_config import gguf_config
from gpulease.client.decode.checkpoint.gguf_header import TYPES, GgufTensor, gguf_header
from gpulease.client.decode.checkpoint.gguf_keys import GGUF_FAMILIES, GGUF_KEYS
from gpulease.client.decode.checkpoint.model_tensors import (
    EMBEDDING,
    HEAD,
    NORM,
    check_names,
    check_shape,
    layer_prefix,
    model_tensors,
)
from gpulease.client.decode.checkpoint.pooling import gguf_pooling
from gpulease.client.decode.checkpoint.rotary import MIN_DIVISOR, Rotation, rotation_of
from gpulease.client.decode.checkpoint.tensor_file import FileRows, TensorFile
from gpulease.client.decode.checkpoint.tensors import Tensor, reordered_heads, row_bytes
from gpulease.client.decode.decode_errors import ModelRejected
from gpulease.client.decode.file_keys import used_members
from gpulease.client.decode.model_config import Family
from gpulease.client.decode.text.gguf_text import gguf_tokenizer
from gpulease.client.decode.text.tokenizer import Tokenizer

TOP: Final = {"token_embd.weight": EMBEDDING, "output_norm.weight": NORM, "output.weight": HEAD}
LAYER: Final = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "ffn_gate_inp": "mlp.gate",
}
"""GGUF's and Hugging Face's names of the model's own tensors, and of a layer's tensors, after `blk.N.`."""

GEMMA_LAYER: Final = LAYER | {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
"""Like LAYER, but for Gemma 3. In GGUF files, its norms are the factors themselves."""

EXPERTS: Final = {"ffn_gate_exps": "gate_proj", "ffn_up_exps": "up_proj", "ffn_down_exps": "down_proj"}
"""Tensors of a layer that contain the tensors of all its experts, one after another, and the names for one expert."""

PERMUTED: Final = ("self_attn.q_proj.weight", "self_attn.k_proj.weight")
"""Suffixes of the names of tensors that llama.cpp's converter reorders by rows, in Llama models."""

ROTARY_DIVISORS: Final = "rope_freqs.weight"


class GgufFile:
    """A model in one GGUF file, as a Checkpoint."""

    def __init__(self, path: Path) -> None:
        """Map the file, and check everything except the weights' values. Raises ModelRejected."""
        self.name = str(path)
        self._file = TensorFile(path)
        header = gguf_header(self._file.mapped, path)
        # From here on all names are Hugging Face's, as in the rest of the package.
        is_gemma = GGUF_FAMILIES.get(str(header.metadata.get("general.architecture"))) is Family.GEMMA3
        parts = GEMMA_LAYER if is_gemma else LAYER
        entries = {_canonical(name, parts): entry for name, entry in header.tensors.items()}
        if len(entries) < len(header.tensors):
            raise ModelRejected(f"{path}: a layer's tensor occurs twice")
        if EMBEDDING not in entries or len(entries[EMBEDDING].shape) != 2:
            raise ModelRejected(f"{path}: tensor token_embd.weight must be there, and a matrix")
        # The metadata need not give the vocabulary's size, or whether the head is tied, but the tensors show both.
        self._metadata = Members(header.metadata, self.name)
        self.config = gguf_config(self._metadata, entries[EMBEDDING].shape[0], HEAD not in entries)
        self.pooling = gguf_pooling(self._metadata)
        # Llama 3's scaling is in a tensor, not in metadata. The tensor is not one of the model's weights. Gemma 3 has
        # metadata for its scaling, and `check_names` refuses such a tensor.
        divisors = None if is_gemma else entries.pop(ROTARY_DIVISORS, None)
        self._split_experts(entries)
        check_names(self.config, entries, self.name)
        self._tensors = {name: self._tensor(name, entries[name], shape) for name, shape in model_tensors(self.config)}
        self._rotation = rotation_of(self.config, 1) if divisors is None else Rotation(self._divisors_of(divisors))

    def tensor(self, name: str) -> Tensor:
        """Return a tensor of the model. Raises KeyError for a name that the model does not have."""
        return self._tensors[name]

    def rotation(self, positions: int) -> Rotation:
        """Return how positions rotate heads: by the file's divisors or factor, whatever `positions` is."""
        return self._rotation

    def sha256(self) -> str:
        """Return the file's SHA-256 in hexadecimal. Reads the whole file."""
        return file_sha256(Path(self.name))

    def tokenizer(self) -> Tokenizer:
        """Return the model's tokenizer. Raises ModelRejected if it is missing or of an unsupported kind."""
        return gguf_tokenizer(used_members(self._metadata, GGUF_KEYS[self.config.family]), self.config.begin_token)

    def close(self) -> None:
        """Close the file, after which no tensor can be read."""
        self._file.close()

    def _split_experts(self, entries: dict[str, GgufTensor]) -> None:
        """Replace each tensor of a layer that contains all experts by one tensor for each expert."""
        if self.config.experts is None:
            return
        count = self.config.experts.count
        for layer in range(self.config.layers):
            for theirs, ours in EXPERTS.items():
                entry = entries.pop(name := f"blk.{layer}.{theirs}.weight", None)
                if entry is None:
                    continue
                if len(entry.shape) != 3 or entry.shape[0] != count:
                    raise ModelRejected(
                        f"{self.name}: tensor {name} must have {count} matrices, not the shape {list(entry.shape)}"
                    )
                rows, columns = entry.shape[1:]
                # An unsupported type is refused with the first expert's tensor.
                label = f"{self.name}: tensor {name}"
                size_bytes = 0 if entry.kind is None else rows * row_bytes(entry.kind, columns, label)
                for expert in range(count):
                    part = f"{layer_prefix(layer)}mlp.experts.{expert}.{ours}.weight"
                    offset = entry.offset + expert * size_bytes
                    entries[part] = GgufTensor((rows, columns), entry.kind, entry.kind_number, offset)

    def _divisors_of(self, entry: GgufTensor) -> NDArray[np.float64]:
        half = self.config.head_width // 2
        divisors: NDArray[np.float64] = self._tensor(ROTARY_DIVISORS, entry, (half,)).f32(0, 1)[0].astype(np.float64)
        # Zero, NaN or a tiny number would break every position's rotation.
        if (invalid := divisors[~(np.isfinite(divisors) & (divisors >= MIN_DIVISOR))]).size:
            rule = f"must have finite numbers of at least {MIN_DIVISOR}"
            raise ModelRejected(f"{self.name}: tensor {ROTARY_DIVISORS} {rule}, not {invalid[0]}")
        return divisors

    def _tensor(self, name: str, entry: GgufTensor, shape: tuple[int, ...]) -> Tensor:
        check_shape(self.config, name, entry.shape, shape, self.name)
        if entry.kind is None:
            # The header's check accepts unknown types, so that this error can name the tensor.
            kinds = {kind.value: kind.name for kind in GGMLQuantizationType}
            label = f"tensor {name} is of type {kinds.get(entry.kind_number, entry.kind_number)}"
            raise ModelRejected(f"{self.name}: {label}; the engine reads {', '.join(TYPES.values())}")
        rows = FileRows(self._file, entry.offset, row_bytes(entry.kind, shape[-1], f"{self.name}: tensor {name}"))
        # The converter permutes only Llama's q and k; for Qwen, ggml rotates halves as Hugging Face does.
        if self.config.family is Family.LLAMA and name.endswith(PERMUTED):
            # In each head, the converter writes rows i and i + half next to each other, because ggml rotates adjacent
            # pairs (LlamaModel.permute).
            order = np.arange(self.config.head_width).reshape(-1, 2).T.ravel()
            return Tensor(name, shape, entry.kind, reordered_heads(rows, order))
        return Tensor(name, shape, entry.kind, rows)


def _canonical(name: str, parts: Mapping[str, str]) -> str:
    """Return a tensor's name in Hugging Face's checkpoints, or its GGUF name if it has none there."""
    if name in TOP:
        return TOP[name]
    # blk.N.PART.weight or blk.N.PART.bias; other names stay, and `check_names` refuses them.
    block, _, rest = name.removeprefix("blk.").partition(".")
    part, _, end = rest.rpartition(".")
    if name.startswith("blk.") and block.isdecimal() and part in parts and end in ("weight", "bias"):
        return f"{layer_prefix(int(block))}{parts[part]}.{end}"
    return name
