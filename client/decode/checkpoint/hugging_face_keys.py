"""The keys of config.json and generation_config.json, and the effect of each.

The lists come from transformers 5 and from 4.57, which wrote most of the existing files: PreTrainedConfig,
Gemma3TextConfig, LlamaConfig, MistralConfig, Phi3Config, Qwen2Config, Qwen3Config, Qwen3MoeConfig, RopeParameters,
GenerationConfig; and keys that make close relatives of these families compute differently.
"""

from typing import Final

from gpulease.client.decode.file_keys import Effect, KeyTable, advice, no_effect, refused, used
from gpulease.client.decode.model_config import Family

GENERATION_KEYS: Final[KeyTable] = {
    **used("eos_token_id"),
    **advice(
        {
            "do_sample": (False,),
            "temperature": (1.0,),
            "top_k": (50, 0),
            "top_p": (1.0,),
            "min_p": (0.0,),
            "top_h": (),
            "typical_p": (1.0,),
            "epsilon_cutoff": (0.0,),
            "eta_cutoff": (0.0,),
            "repetition_penalty": (1.0,),
            "encoder_repetition_penalty": (1.0,),
            "no_repeat_ngram_size": (0,),
            "max_length": (20,),
            "max_new_tokens": (),
            "max_time": (),
            "num_beams": (1,),
            "num_beam_groups": (1,),
            "diversity_penalty": (0.0,),
            "penalty_alpha": (0.0,),
            "num_return_sequences": (1,),
        }
    ),
    **refused(
        "the engine does not support tokens that are suppressed or forced",
        {
            "suppress_tokens": (),
            "begin_suppress_tokens": (),
            "bad_words_ids": (),
            "force_words_ids": (),
            "forced_bos_token_id": (),
            "forced_eos_token_id": (),
            "forced_decoder_ids": (),
            "sequence_bias": (),
            "constraints": (),
            "exponential_decay_length_penalty": (),
            "min_length": (0,),
            "min_new_tokens": (0,),
            "guidance_scale": (1.0,),
            "watermarking_config": (),
            "dola_layers": (),
        },
    ),
    **refused(
        "the engine ends a sequence only at the model's end tokens, and at the tokens and texts in a request",
        {"stop_strings": ()},
    ),
    **refused("the engine does not change a prompt", {"token_healing": (False,)}),
    **no_effect(
        # Ids for padding, and for the start of an encoder's answer. The tokenizer decides a prompt's begin token.
        "bos_token_id",
        "pad_token_id",
        "decoder_start_token_id",
        "encoder_no_repeat_ngram_size",
        # For beam search only.
        "early_stopping",
        "length_penalty",
        # How the computation is done, with the same result.
        "use_cache",
        "cache_implementation",
        "cache_config",
        "max_cache_len",
        "low_memory",
        "compile_config",
        "disable_compile",
        "continuous_batching_config",
        "prefill_chunk_size",
        "remove_invalid_values",
        "renormalize_logits",
        # Speculation gives the same tokens as decoding without it.
        "use_mtp",
        "is_assistant",
        "num_assistant_tokens",
        "num_assistant_tokens_schedule",
        "assistant_confidence_threshold",
        "assistant_early_exit",
        "assistant_ensemble_weight",
        "assistant_lookbehind",
        "target_lookbehind",
        "prompt_lookup_num_tokens",
        "max_matching_ngram_size",
        "speculation_type",
        # Additional outputs, and where the file comes from.
        "output_attentions",
        "output_hidden_states",
        "output_scores",
        "output_logits",
        "return_dict_in_generate",
        "transformers_version",
        "_from_model_config",
        "_commit_hash",
        "generation_kwargs",
        "trust_remote_code",
    ),
}
"""Keys of generation_config.json. Older files have them in config.json."""

_COMMON: Final[KeyTable] = {
    **GENERATION_KEYS,
    **used(
        "model_type",
        "architectures",
        "hidden_size",
        "num_hidden_layers",
        "num_attention_heads",
        "num_key_value_heads",
        "head_dim",
        "intermediate_size",
        "vocab_size",
        "max_position_embeddings",
        "original_max_position_embeddings",
        "rope_theta",
        "rope_scaling",
        "rope_parameters",
        "rms_norm_eps",
        "tie_word_embeddings",
        "eos_token_id",
    ),
    **refused("the engine supports only the activation SiLU in this family", {"hidden_act": ("silu", "swish")}),
    **refused("the engine does not support these biases", {"mlp_bias": (False,)}),
    # If it is false, transformers computes attention in both directions, in all of these families.
    **refused("the engine supports only causal attention", {"is_causal": (True,)}),
    **refused(
        "the engine supports only full attention in all layers of this family", {"layer_types": ("full_attention",)}
    ),
    **refused(
        "the engine supports only rotary embeddings of whole heads in this family", {"partial_rotary_factor": (1.0,)}
    ),
    # Which tensors are packed, and how: quantized_weights.py.
    **used("quantization_config"),
    **refused(
        "the engine supports only weights that are packed as GGUF, FP8 or AWQ",
        {"compression_config": (), "quantization": ()},
    ),
    **refused(
        "the engine supports only decoders with all of their heads",
        {"is_encoder_decoder": (False,), "add_cross_attention": (False,), "pruned_heads": ()},
    ),
    **refused("the engine supports only layers with the same configuration", {"per_layer_config": ()}),
    **refused(
        "it belongs to a related model that the engine does not support",
        {
            "attention_multiplier": (),
            "attn_logit_softcapping": (),
            "clip_qkv": (),
            "dim_model_base": (),
            "embedding_multiplier": (1.0,),
            "final_logit_softcapping": (),
            "logit_scale": (1.0,),
            "logits_scaling": (1.0,),
            "no_rope_layers": (1,),
            "num_experts": (0,),
            "num_local_experts": (0,),
            "query_pre_attn_scalar": (),
            "residual_multiplier": (1.0,),
            "rope_interleaved": (False,),
            "scale_depth": (),
            "scale_emb": (1.0,),
            "use_mrope": (False,),
            "use_qk_norm": (False,),
        },
    ),
    **no_effect(
        # Training.
        "attention_dropout",
        "initializer_range",
        "hidden_dropout",
        "attn_pdrop",
        "embd_pdrop",
        "resid_pdrop",
        "gradient_checkpointing",
        "output_router_logits",
        # How the computation is done. The slices of linears (pretraining_tp) add up to the same sums.
        "pretraining_tp",
        "chunk_size_feed_forward",
        "torch_dtype",
        "dtype",
        "torchscript",
        "use_bfloat16",
        "attn_implementation",
        "_attn_implementation",
        "_attn_implementation_autoset",
        "_attn_implementation_internal",
        "experts_implementation",
        "_experts_implementation_internal",
        "return_dict",
        "tf_legacy_loss",
        # Heads for other tasks, encoders, other models.
        "id2label",
        "label2id",
        "num_labels",
        "problem_type",
        "finetuning_task",
        "task_specific_params",
        "is_decoder",
        "cross_attention_hidden_size",
        "tie_encoder_decoder",
        "tie_last_hidden_states",
        "sep_token_id",
        "prefix",
        "tokenizer_class",
        # Its origin. transformers runs the model's own code (auto_map) only if the caller permits it
        # (trust_remote_code).
        "auto_map",
        "name_or_path",
        "_name_or_path",
        "is_llama_config",
        "transformers.js_config",
        "unsloth_fixed",
        "unsloth_version",
    ),
}

_WINDOW: Final = ("sliding_window", "max_window_layers")

_QWEN: Final[KeyTable] = {
    # Without this flag, transformers' Qwen2Config and Qwen3Config ignore the other three.
    **used("use_sliding_window", "layer_types", *_WINDOW),
}

_WITH_BIASES: Final = refused("the engine does not support these biases", {"attention_bias": (False,)})

CONFIG_KEYS: Final[dict[str, KeyTable]] = {
    # LlamaConfig ignores windows, even if the file has these keys.
    Family.LLAMA: {**_COMMON, **_WITH_BIASES, **no_effect("use_sliding_window", *_WINDOW)},
    # Qwen2 always has biases of q, k and v, and no others; no key says so.
    Family.QWEN2: {**_COMMON, **_QWEN, **no_effect("attention_bias")},
    Family.QWEN3: {**_COMMON, **_QWEN, **_WITH_BIASES},
    # Its class has windows either in all layers or in none.
    Family.QWEN3_MOE: {
        **_COMMON,
        **_WITH_BIASES,
        **used(
            "use_sliding_window",
            "sliding_window",
            "num_experts",
            "num_local_experts",
            "num_experts_per_tok",
            "moe_intermediate_size",
            "norm_topk_prob",
            "decoder_sparse_step",
            "mlp_only_layers",
        ),
        **refused("the engine does not support shared experts", {"shared_expert_intermediate_size": (0,)}),
        **no_effect("max_window_layers", "router_aux_loss_coef"),
    },
    # MistralConfig has a window without a switch, and its class has no biases, whatever the file says.
    "mistral": {**_COMMON, **used("sliding_window"), **no_effect("attention_bias", "use_sliding_window", _WINDOW[1])},
    # The same is true of Phi3Config.
    Family.PHI3: {
        **_COMMON,
        **used("sliding_window", "partial_rotary_factor"),
        **no_effect("attention_bias", "use_sliding_window", _WINDOW[1]),
    },
    # The `model_type` of Gemma 3 without images.
    "gemma3_text": {
        **_COMMON,
        **_WITH_BIASES,
        **used(
            "sliding_window",
            "sliding_window_pattern",
            "layer_types",
            "query_pre_attn_scalar",
            "rope_local_base_freq",
        ),
        **refused(
            "the engine supports only the activation GELU (tanh) in this family",
            {"hidden_activation": ("gelu_pytorch_tanh",)},
        ),
        **refused("the engine supports only causal attention", {"use_bidirectional_attention": (False,)}),
        # Gemma 2's, which Gemma 3's class still applies.
        **refused(
            "the engine does not support caps of logits", {"attn_logit_softcapping": (), "final_logit_softcapping": ()}
        ),
        # Its class has `hidden_activation` instead, and reads only the pattern without the underscore. No scaling here
        # needs the original context.
        **no_effect(
            "original_max_position_embeddings",
            "hidden_act",
            "mlp_bias",
            "use_sliding_window",
            _WINDOW[1],
            "_sliding_window_pattern",
        ),
    },
}
"""Keys of config.json, by the `model_type` that reads them."""

IMAGE_MODEL_KEYS: Final[KeyTable] = {
    **{key: entry for key, entry in _COMMON.items() if entry.effect is not Effect.USED},
    **used("model_type", "architectures", "text_config", "eos_token_id", "tie_word_embeddings"),
    **refused("the engine does not support packed weights of models with images", {"quantization_config": ()}),
    # The parts for images, and the tokens that they replace.
    **no_effect(
        "vision_config",
        "mm_tokens_per_image",
        "boi_token_index",
        "eoi_token_index",
        "image_token_index",
        "boi_token_id",
        "eoi_token_id",
        "image_token_id",
    ),
}
"""Keys of config.json of a Gemma 3 that reads images, around `text_config`."""

ROPE_KEYS: Final[KeyTable] = {
    **used(
        "rope_theta",
        "rope_type",
        "type",
        "factor",
        "low_freq_factor",
        "high_freq_factor",
        "original_max_position_embeddings",
        "attention_factor",
        "beta_fast",
        "beta_slow",
        "long_factor",
        "short_factor",
        "mscale",
        "mscale_all_dim",
        "truncate",
    ),
    **refused("the engine supports only rotary embeddings of whole heads", {"partial_rotary_factor": (1.0,)}),
    **no_effect(
        "finetuned",
        # Parts of a head for the axes of an image. On each axis, a text's position is the same.
        "mrope_section",
    ),
}
"""Keys of config.json's rope_parameters, or rope_scaling."""

LAYERED_ROPE_KEYS: Final[KeyTable] = {
    **used("rope_theta", "rope_type", "type", "factor"),
    **refused("the engine supports only rotary embeddings of whole heads", {"partial_rotary_factor": (1.0,)}),
    **no_effect("finetuned"),
}
"""Keys of the objects that Gemma 3's rope_parameters have for each kind of layers."""

PHI3_ROPE_KEYS: Final[KeyTable] = {**ROPE_KEYS, **used("partial_rotary_factor")}
"""Keys of rope_parameters, or rope_scaling, of a Phi-3, which rotates parts of heads."""
