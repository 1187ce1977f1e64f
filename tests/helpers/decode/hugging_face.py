"""Hugging Face transformers in f32, as a reference for the decode engine. Needs torch."""

import importlib.util
import json
from collections import defaultdict
from pathlib import Path
from typing import Any

from gpulease.client.decode.model_config import Family, LinearScaling, LongScaling, ModelConfig, YarnScaling
from helpers.decode.agreement import Logits
from helpers.decode.made_models import F32, write_bf16_tensors
from helpers.decode.recorded import record
from helpers.made_models import fused

CLASSES = {
    Family.LLAMA: "LlamaForCausalLM",
    Family.QWEN2: "Qwen2ForCausalLM",
    Family.QWEN3: "Qwen3ForCausalLM",
    Family.QWEN3_MOE: "Qwen3MoeForCausalLM",
    Family.PHI3: "Phi3ForCausalLM",
    Family.GEMMA3: "Gemma3ForCausalLM",
}
MAX_BATCH = 64
IS_INSTALLED = all(importlib.util.find_spec(name) is not None for name in ("torch", "transformers"))


def config_json(config: ModelConfig) -> dict[str, Any]:
    # Hugging Face's name for a Llama with windows is Mistral.
    is_mistral = config.family is Family.LLAMA and bool(config.windows)
    is_gemma = config.family is Family.GEMMA3
    told: dict[str, Any] = {
        "architectures": ["MistralForCausalLM" if is_mistral else CLASSES[config.family]],
        "model_type": "mistral" if is_mistral else "gemma3_text" if is_gemma else str(config.family),
        "attention_bias": False,
        "bos_token_id": config.begin_token,
        "eos_token_id": config.end_tokens[0],
        "head_dim": config.head_width,
        "hidden_act": "silu",
        "hidden_size": config.width,
        "intermediate_size": config.inner_width,
        "max_position_embeddings": config.context,
        "num_attention_heads": config.heads,
        "num_hidden_layers": config.layers,
        "num_key_value_heads": config.key_heads,
        "rms_norm_eps": config.norm_epsilon,
        "rope_theta": config.rope_theta,
        "tie_word_embeddings": config.is_tied,
        "torch_dtype": "bfloat16",
        "vocab_size": config.vocabulary,
    }
    if config.family is Family.PHI3:
        # The class's default is a token id that these small vocabularies do not have.
        told["pad_token_id"] = config.end_tokens[0]
    if (experts := config.experts) is not None:
        told |= {
            "num_experts": experts.count,
            "num_experts_per_tok": experts.chosen,
            "moe_intermediate_size": experts.width,
            "norm_topk_prob": experts.is_normalised,
            "mlp_only_layers": list(experts.dense_layers),
            "decoder_sparse_step": 1,
        }
    if is_gemma:
        del told["hidden_act"]
        told |= {
            "hidden_activation": "gelu_pytorch_tanh",
            "query_pre_attn_scalar": int(config.score_divisor or 0),
            "rope_local_base_freq": config.local_rope_theta,
            "layer_types": [f"{'full' if window is None else 'sliding'}_attention" for window in config.windows],
        }
    if config.turned_width is not None:
        told["partial_rotary_factor"] = config.turned_width / config.head_width
    if config.windows:
        told["sliding_window"] = next(window for window in config.windows if window is not None)
        # Only Qwen's classes read these two members.
        told["use_sliding_window"] = True
        told["max_window_layers"] = config.windows.count(None)
    if isinstance(scaling := config.rope_scaling, LinearScaling):
        told["rope_scaling"] = {"rope_type": "linear", "factor": scaling.factor}
    elif isinstance(scaling, YarnScaling):
        told["rope_scaling"] = {
            "rope_type": "yarn",
            "factor": scaling.factor,
            "beta_fast": scaling.beta_fast,
            "beta_slow": scaling.beta_slow,
            "original_max_position_embeddings": scaling.original_context,
            "attention_factor": scaling.attention_factor,
            "truncate": scaling.is_truncated,
        }
    elif isinstance(scaling, LongScaling):
        told["rope_scaling"] = {
            "rope_type": "longrope",
            "short_factor": list(scaling.short),
            "long_factor": list(scaling.long),
            "original_max_position_embeddings": scaling.original_context,
            "attention_factor": scaling.attention_factor,
        }
        # Phi-3's class reads this number at this place.
        told["original_max_position_embeddings"] = scaling.original_context
    elif scaling is not None:
        told["rope_scaling"] = {
            "rope_type": "llama3",
            "factor": scaling.factor,
            "low_freq_factor": scaling.low_frequency_factor,
            "high_freq_factor": scaling.high_frequency_factor,
            "original_max_position_embeddings": scaling.original_context,
        }
    return told


def write_folder(folder: Path, config: ModelConfig, tensors: dict[str, F32]) -> None:
    """Write config.json and model.safetensors. The values must be exact in bf16, in which they are stored."""
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config_json(config)))
    write_bf16_tensors(folder / "model.safetensors", fused(config, tensors))


class Transformers:
    """A model folder, computed by transformers in f32, without TF32."""

    def __init__(self, folder: Path) -> None:
        import torch
        from transformers import AutoModelForCausalLM

        torch.backends.cuda.matmul.allow_tf32 = False
        self._device = "cuda" if torch.cuda.is_available() else "cpu"
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
        embedding = model.get_input_embeddings()
        if hasattr(embedding, "embed_scale"):
            # transformers rounds this factor for a model in bf16, which the files contain.
            embedding.embed_scale.copy_(embedding.embed_scale.to(torch.bfloat16))
        self._model = model.to(self._device).eval()

    def logits(self, token_ids: list[int]) -> Logits:
        """Return the logits [tokens, vocabulary] of every position."""
        logits: Logits = self._computed([token_ids]).logits[0].cpu().numpy()
        return logits

    def greedy(self, prompts: list[list[int]], count: int) -> list[list[int]]:
        """Return the `count` likeliest next tokens of each prompt. Prompts of the same length are computed together."""
        places = defaultdict(list)
        for place, prompt in enumerate(prompts):
            places[len(prompt)].append(place)
        outputs: list[list[int]] = [[] for _ in prompts]
        for together in places.values():
            for first in range(0, len(together), MAX_BATCH):
                batch = together[first : first + MAX_BATCH]
                for place, output in zip(batch, self._decoded([prompts[at] for at in batch], count), strict=True):
                    outputs[place] = output
        return outputs

    def _decoded(self, rows: list[list[int]], count: int) -> list[list[int]]:
        found: list[list[int]] = []
        result = self._computed(rows)
        for _ in range(count):
            chosen = result.logits[:, -1].argmax(-1)
            found.append(chosen.tolist())
            if len(found) < count:
                result = self._computed(chosen[:, None].tolist(), result.past_key_values)
        return [list(output) for output in zip(*found, strict=True)]

    def _computed(self, rows: list[list[int]], cache: Any = None) -> Any:
        import torch

        with torch.no_grad():
            return self._model(torch.tensor(rows, device=self._device), past_key_values=cache, use_cache=True)


if __name__ == "__main__":
    record(Transformers)
