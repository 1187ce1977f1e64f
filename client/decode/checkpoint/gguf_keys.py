"""The keys of a GGUF file's metadata, and the effect of each.

The list comes from llama.cpp (LLM_KV_NAMES in llama-arch.cpp): the keys that load_hparams and llama-vocab.cpp read for
these families, and keys that make other architectures compute differently.
"""

from typing import Final

from gpulease.client.decode.file_keys import KeyTable, advice, no_effect, refused, used
from gpulease.client.decode.model_config import Family

_GENERAL: Final[KeyTable] = {
    **used("general.architecture", "general.alignment"),
    **refused("the engine supports only files that contain a model", {"general.type": ("model",)}),
    **refused("the engine supports only version 2 of this quantization", {"general.quantization_version": (2,)}),
    **refused("merge its files with llama-gguf-split --merge", {"split.count": (0, 1)}),
    **advice({"general.sampling.*": ()}),
    **no_effect("general.*", "quantize.*", "split.no", "split.tensors.count"),
}

_TOKENIZER: Final[KeyTable] = {
    **used(
        "tokenizer.ggml.model",
        "tokenizer.ggml.pre",
        "tokenizer.ggml.tokens",
        "tokenizer.ggml.token_type",
        "tokenizer.ggml.scores",
        "tokenizer.ggml.merges",
        "tokenizer.ggml.bos_token_id",
        "tokenizer.ggml.eos_token_id",
        "tokenizer.ggml.eot_token_id",
        "tokenizer.ggml.eom_token_id",
        "tokenizer.ggml.fim_pad_token_id",
        "tokenizer.ggml.fim_rep_token_id",
        "tokenizer.ggml.fim_sep_token_id",
        "tokenizer.ggml.unknown_token_id",
        "tokenizer.ggml.padding_token_id",
        "tokenizer.ggml.add_bos_token",
        "tokenizer.ggml.add_space_prefix",
        "tokenizer.chat_template",
    ),
    **refused(
        "the engine supports at most one token before a prompt, and none after it",
        {"tokenizer.ggml.add_eos_token": (False,), "tokenizer.ggml.add_sep_token": (False,)},
    ),
    **refused("the engine does not support tokens that are suppressed", {"tokenizer.ggml.suppress_tokens": ()}),
    **no_effect(
        # Named templates. A plain chat uses the one without a name.
        "tokenizer.chat_template.*",
        "tokenizer.chat_templates",
        # Ids for requests that the engine does not serve.
        "tokenizer.ggml.seperator_token_id",
        "tokenizer.ggml.cls_token_id",
        "tokenizer.ggml.mask_token_id",
        "tokenizer.ggml.fim_pre_token_id",
        "tokenizer.ggml.fim_suf_token_id",
        "tokenizer.ggml.fim_mid_token_id",
        "tokenizer.ggml.prefix_token_id",
        "tokenizer.ggml.suffix_token_id",
        "tokenizer.ggml.middle_token_id",
        # Read only for refused kinds of vocabularies.
        "tokenizer.ggml.token_type_count",
        "tokenizer.ggml.remove_extra_whitespaces",
        "tokenizer.ggml.precompiled_charsmap",
        "tokenizer.ggml.normalizer.lowercase",
        "tokenizer.ggml.normalizer.strip_accents",
        "tokenizer.huggingface.json",
        "tokenizer.rwkv.world",
    ),
}

_ARCHITECTURE: Final[KeyTable] = {
    **used(
        "context_length",
        "embedding_length",
        "block_count",
        "feed_forward_length",
        "attention.head_count",
        "attention.head_count_kv",
        "attention.key_length",
        "attention.value_length",
        "attention.layer_norm_rms_epsilon",
        "rope.dimension_count",
        "rope.freq_base",
    ),
    **refused(
        "the engine supports only Llama 3's scaling of rotary embeddings",
        {
            "rope.scaling.type": ("none", "linear"),
            # Converters write 0 for "no scaling".
            "rope.scaling.factor": (1.0, 0.0),
            "rope.scale_linear": (1.0, 0.0),
            "rope.scaling.alpha": (1.0, 0.0),
            "rope.scaling.attn_factor": (1.0,),
            "rope.scaling.yarn_attn_factor": (1.0,),
            "rope.scaling.yarn_ext_factor": (-1.0, 0.0),
            "rope.dimension_sections": (0,),
        },
    ),
    **refused(
        "the engine does not support mixtures of experts in this family",
        {"expert_count": (0,), "expert_used_count": (0,), "expert_group_count": (0,), "expert_shared_count": (0,)},
    ),
    **refused("the engine does not support sliding windows in this family", {"attention.sliding_window": (0,)}),
    **refused("the engine supports only causal attention", {"attention.causal": (True,)}),
    **refused("the engine does not support layers that predict further tokens", {"nextn_predict_layers": (0,)}),
    **refused("the engine does not support classifiers", {"classifier.output_labels": ()}),
    **refused(
        "it belongs to a related model that the engine does not support",
        {
            "attention.clamp_kqv": (0.0,),
            "attention.max_alibi_bias": (0.0,),
            "attention.output_scale": (1.0,),
            "attention.scale": (0.0,),
            "attention.temperature_length": (0,),
            "attention.temperature_scale": (),
            "attention.value_scale": (1.0,),
            "attn_logit_softcapping": (0.0,),
            "embedding_scale": (1.0,),
            "final_logit_softcapping": (0.0,),
            "hidden_activation": ("silu",),
            "logit_scale": (1.0,),
            "residual_scale": (1.0,),
            "swiglu_clamp_exp": (0.0,),
            "swiglu_clamp_shexp": (0.0,),
            "use_parallel_residual": (False,),
        },
    ),
    **no_effect(
        # Facts that the tensors contain, too, and keys that llama.cpp no longer reads.
        "vocab_size",
        "tensor_data_layout",
        # For models that embed texts; checkpoint/pooling.py reads the first one.
        "pooling_type",
        "embedding_length_out",
        # Details of norms, windows, experts and scaling. Each has an effect only together with a key that is refused
        # above.
        "attention.layer_norm_epsilon",
        "attention.sliding_window_pattern",
        "rope.dimension_count_swa",
        "rope.freq_base_swa",
        "rope.scaling.original_context_length",
        "rope.scaling.finetuned",
        "rope.scaling.yarn_log_multiplier",
        "rope.scaling.yarn_beta_fast",
        "rope.scaling.yarn_beta_slow",
        "expert_feed_forward_length",
        "expert_shared_feed_forward_length",
        "expert_gating_func",
        "expert_weights_norm",
        "expert_weights_scale",
        "leading_dense_block_count",
    ),
}
"""Keys with names that begin with the architecture's name and a dot."""

_WITH_EXPERTS: Final[KeyTable] = {
    **_ARCHITECTURE,
    **used("expert_count", "expert_used_count", "expert_feed_forward_length"),
}
"""Keys of a family with experts. llama.cpp's Qwen3-MoE reads no key for the experts' gate or shares."""

_WITH_WINDOWS: Final[KeyTable] = {
    **_ARCHITECTURE,
    **used(
        "attention.sliding_window",
        "attention.sliding_window_pattern",
        "rope.freq_base_swa",
        "rope.scaling.type",
        "rope.scaling.factor",
        "rope.scale_linear",
    ),
    # llama.cpp's graph for this model has a fixed activation.
    **no_effect("hidden_activation"),
}
"""Keys of Gemma 3."""

GGUF_FAMILIES: Final = {
    "llama": Family.LLAMA,
    "qwen2": Family.QWEN2,
    "qwen3": Family.QWEN3,
    "qwen3moe": Family.QWEN3_MOE,
    "gemma3": Family.GEMMA3,
}
"""The families that are read from GGUF files, by the architectures' names there."""

_ARCHITECTURES: Final = {Family.QWEN3_MOE: _WITH_EXPERTS, Family.GEMMA3: _WITH_WINDOWS}

GGUF_KEYS: Final[dict[Family, KeyTable]] = {
    family: {
        **_GENERAL,
        **_TOKENIZER,
        **{f"{name}.{key}": entry for key, entry in _ARCHITECTURES.get(family, _ARCHITECTURE).items()},
    }
    for name, family in GGUF_FAMILIES.items()
}
"""All keys of metadata with their effects, by family."""
