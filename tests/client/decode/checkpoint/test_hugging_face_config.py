import math
from copy import deepcopy
from dataclasses import replace
from typing import Any, Final

import pytest

from gpulease.client.decode.checked_file import Members
from gpulease.client.decode.checkpoint.hugging_face_config import hugging_face_config
from gpulease.client.decode.decode_errors import ModelRejected
from gpulease.client.decode.model_config import (
    Experts,
    Family,
    LinearScaling,
    LongScaling,
    ModelConfig,
    RopeScaling,
    YarnScaling,
)
from helpers.made_models import FOLDER_MODELS, GEMMA3, LLAMA, PHI3, QWEN2, QWEN3, QWEN3_MOE, config_json

STRETCHED: Final = {
    "rope_type": "llama3",
    "factor": 32.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
YARN: Final = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}
LONG: Final = {
    "type": "longrope",
    "short_factor": [1.0] * 16,
    "long_factor": [2.0] * 16,
    "original_max_position_embeddings": 64,
}
OLDER: Final = {"type" if key == "rope_type" else key: value for key, value in STRETCHED.items()}


def read(said: dict[str, Any], generation: dict[str, Any] | None = None) -> ModelConfig:
    more = None if generation is None else Members(generation, "generation_config.json")
    return hugging_face_config(Members(said, "config.json"), more, None)


@pytest.mark.parametrize("config", FOLDER_MODELS.values(), ids=FOLDER_MODELS)
def test_a_config_is_read_back(config: ModelConfig) -> None:
    assert read(config_json(config)) == config


def test_what_a_config_leaves_out_is_as_in_transformers() -> None:
    """Read the config.json of SmolLM2-135M without the keys that have no effect."""
    config = read(
        {
            "model_type": "llama",
            "hidden_size": 576,
            "intermediate_size": 1536,
            "num_hidden_layers": 30,
            "num_attention_heads": 9,
            "vocab_size": 49152,
            "max_position_embeddings": 8192,
            "eos_token_id": 2,
            "rope_scaling": None,
        },
        {"eos_token_id": [2, 0]},
    )
    assert config == ModelConfig(
        family=Family.LLAMA,
        layers=30,
        width=576,
        heads=9,
        key_heads=9,
        head_width=64,
        inner_width=1536,
        vocabulary=49152,
        context=8192,
        rope_theta=10_000.0,
        norm_epsilon=1e-6,
        is_tied=False,
        end_tokens=(2, 0),
    )


# Each spelling of rotary embeddings, and the base and the stretching that transformers reads.
ROTARY: Final[dict[str, tuple[dict[str, Any], float, bool]]] = {
    "beside": ({"rope_theta": 1e6}, 1e6, False),
    "inside": ({"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}}, 1e6, False),
    "inside and beside": ({"rope_theta": 2e6, "rope_parameters": {"rope_theta": 1e6}}, 1e6, False),
    "beside parameters without one": ({"rope_theta": 1e6, "rope_parameters": {"rope_type": "default"}}, 1e6, False),
    "beside no parameters": ({"rope_theta": 1e6, "rope_parameters": None}, 1e6, False),
    "beside empty parameters": ({"rope_theta": 1e6, "rope_parameters": {}}, 1e6, False),
    "inside rope_scaling": ({"rope_scaling": {"rope_type": "default", "rope_theta": 1e6}}, 1e6, False),
    "nowhere": ({"rope_parameters": {"rope_type": "default"}}, 10_000.0, False),
    "stretched, inside rope_scaling": ({"rope_scaling": STRETCHED | {"rope_theta": 5e5}}, 5e5, True),
    "stretched, beside rope_scaling": ({"rope_theta": 5e5, "rope_scaling": STRETCHED}, 5e5, True),
    "stretched, inside": ({"rope_parameters": STRETCHED | {"rope_theta": 5e5}}, 5e5, True),
    "stretched, beside": ({"rope_theta": 5e5, "rope_parameters": STRETCHED}, 5e5, True),
    "stretched, of an older name": ({"rope_theta": 5e5, "rope_scaling": OLDER}, 5e5, True),
    "rope_scaling goes first": (
        {"rope_theta": 5e5, "rope_scaling": STRETCHED, "rope_parameters": {"rope_theta": 1e6}},
        5e5,
        True,
    ),
    "empty rope_scaling does not": ({"rope_scaling": {}, "rope_parameters": {"rope_theta": 1e6}}, 1e6, False),
}


@pytest.mark.parametrize("name", ROTARY)
def test_each_spelling_of_rotary_embeddings_gives_its_base(name: str) -> None:
    says, theta, is_stretched = ROTARY[name]
    config = read(config_json(LLAMA) | {"rope_theta": None} | says)
    assert config.rope_theta == theta
    assert config.rope_scaling == (RopeScaling(32.0, 1.0, 4.0, 8192) if is_stretched else None)


@pytest.mark.parametrize("name", ROTARY)
def test_transformers_gives_each_spelling_the_same_base(name: str) -> None:
    transformers = pytest.importorskip("transformers", minversion="5")
    says, theta, is_stretched = ROTARY[name]
    its = transformers.LlamaConfig(**deepcopy(says)).rope_parameters
    assert (its["rope_theta"], its["rope_type"]) == (theta, "llama3" if is_stretched else "default")


def test_stretching_counts_from_the_length_that_transformers_takes() -> None:
    plain = {key: value for key, value in STRETCHED.items() if key != "original_max_position_embeddings"}
    for says, length in (
        ({"rope_scaling": STRETCHED, "original_max_position_embeddings": 64}, 64),
        ({"rope_scaling": STRETCHED}, 8192),
        ({"rope_scaling": plain}, 128),
    ):
        scaling = read(config_json(LLAMA) | says).rope_scaling
        assert isinstance(scaling, RopeScaling)
        assert scaling.original_context == length


def test_stretching_leaves_the_context_as_the_file_says_it() -> None:
    assert read(config_json(LLAMA) | {"rope_scaling": STRETCHED}).context == LLAMA.context


def test_end_tokens_are_those_of_generation_config_where_it_names_some() -> None:
    said = config_json(LLAMA) | {"eos_token_id": 2}
    assert read(said).end_tokens == (2,)
    assert read(said, {"eos_token_id": [5, 7]}).end_tokens == (5, 7)
    assert read(said, {"temperature": 0.6}).end_tokens == (2,)


def test_what_a_qwen_leaves_out_is_as_in_transformers() -> None:
    said = config_json(QWEN3) | {"num_attention_heads": 64}
    config = read({key: value for key, value in said.items() if key not in ("head_dim", "num_key_value_heads")})
    assert (config.head_width, config.key_heads) == (128, 32)
    assert read(said | {"num_key_value_heads": None}).key_heads == 64


def test_qwen_2_s_biases_are_there_whatever_the_file_says() -> None:
    said = config_json(QWEN2)
    assert read(said | {"attention_bias": False}) == read(said | {"attention_bias": True}) == read(said)


@pytest.mark.parametrize(
    ("says", "sentence"),
    [
        (
            {"model_type": "gemma2"},
            "must be one of llama, qwen2, qwen3, qwen3_moe, mistral, phi3, gemma3_text, gemma3, not 'gemma2'",
        ),
        ({"model_type": "gemma3n_text"}, "model_type must be .* not 'gemma3n_text'"),
        ({"model_type": "qwen2_moe"}, "model_type must be .* not 'qwen2_moe'"),
        ({"model_type": None}, "model_type must be one of .*, not ''"),
        ({"architectures": ["LlamaForSequenceClassification"]}, "architectures .*Classification"),
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu'; the engine supports only the activation SiLU"),
        ({"attention_bias": True}, "attention_bias is 'True'"),
        ({"mlp_bias": True}, "mlp_bias is 'True'"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "layer_types is .*only full attention"),
        ({"rope_scaling": {"type": "su"}}, "rope_type must be one of default, .*, not 'su'"),
        ({"rope_scaling": {"type": "dynamic"}}, "rope_scaling: factor is missing"),
        ({"rope_scaling": {"type": "dynamic", "factor": 0.5}}, "factor must be at least 1, not 0.5"),
        ({"rope_scaling": {"type": "yarn"}}, "rope_scaling: factor is missing"),
        ({"rope_scaling": YARN | {"beta_slow": 33.0}}, "beta_slow must be above 0, and at most beta_fast, not 33.0"),
        ({"rope_scaling": YARN | {"beta_fast": "32"}}, "beta_fast must be a number, not '32'"),
        ({"rope_scaling": YARN | {"attention_factor": 0}}, "attention_factor must be above 0, and at most 1000"),
        ({"rope_scaling": LONG | {"attention_factor": 1e308}}, "at most 1000.0, not '1e.308'"),
        ({"rope_scaling": YARN | {"mscale": 1e308, "mscale_all_dim": 1e-300}}, "at most 1000.0, not '1.386"),
        ({"rope_scaling": YARN | {"mscale": -1.0}}, "mscale and mscale_all_dim must not be negative"),
        ({"rope_scaling": YARN | {"truncate": "no"}}, "truncate must be true or false, not 'no'"),
        ({"rope_scaling": YARN | {"original_max_position_embeddings": 0}}, "must be at least 1, not 0"),
        ({"rope_theta": 1.0, "rope_scaling": YARN}, "rope_theta must be above 1 for yarn, not 1.0"),
        (
            {"rope_scaling": {"type": "longrope"}},
            "short_factor must have 16 numbers, one for each rotated pair of .*, not 0",
        ),
        ({"rope_scaling": LONG | {"long_factor": [1.0] * 15}}, "long_factor must have 16 numbers, .*, not 15"),
        ({"rope_scaling": LONG | {"long_factor": 2.0}}, "long_factor must be a list, not '2.0'"),
        ({"rope_scaling": LONG | {"long_factor": ["2"] * 16}}, "long_factor must be a number, not '2'"),
        (
            {"rope_scaling": LONG | {"short_factor": [0.0] * 16}},
            "short_factor must have numbers of at least 0.25, not 0.0",
        ),
        ({"rope_scaling": LONG | {"long_factor": [1.0] * 15 + [1e-308]}}, "at least 0.25, not 1e-308"),
        ({"rope_scaling": LONG | {"original_max_position_embeddings": 1}}, "must be at least 2, not 1"),
        ({"rope_scaling": LONG | {"factor": 0.5}}, "factor must be at least 1, not 0.5"),
        ({"rope_scaling": {"type": "linear", "factor": 0.5}}, "factor must be at least 1, not 0.5"),
        ({"rope_scaling": {"type": "linear"}}, "factor is missing"),
        ({"rope_scaling": STRETCHED | {"factor": 0.5}}, "factor must be at least 1, not 0.5"),
        (
            {"rope_scaling": STRETCHED | {"high_freq_factor": 1.0}},
            "low_freq_factor must be above 0 and below high_freq_factor, not 1.0 and 1.0",
        ),
        ({"rope_scaling": STRETCHED | {"original_max_position_embeddings": 0}}, "embeddings must be at least 1, not 0"),
        ({"rope_scaling": {"rope_type": "llama3"}}, "rope_scaling: factor is missing"),
        ({"rope_scaling": "llama3"}, "rope_scaling must be an object, not 'llama3'"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor is '0.5'"),
        ({"rope_parameters": {"rope_theta": 1e6, "partial_rotary_factor": 0.5}}, "partial_rotary_factor is '0.5'"),
        ({"rope_parameters": {"full_attention": {"rope_theta": 1e6}}}, "'full_attention' is an object"),
        ({"rope_theta": "1000000.0"}, "rope_theta must be a number, not '1000000.0'"),
        (
            {"compression_config": {"format": "int-quantized"}},
            "compression_config is .*packed as GGUF, FP8 or AWQ",
        ),
        ({"hidden_size": None}, "hidden_size is missing"),
        ({"hidden_size": "256"}, "hidden_size must be an integer, not '256'"),
        ({"hidden_size": True}, "hidden_size must be an integer, not 'True'"),
        ({"num_attention_heads": 0, "head_dim": None}, "must be a multiple of 0 heads"),
        ({"num_attention_heads": 7, "head_dim": None}, "must be a multiple of 7 heads"),
        ({"head_dim": 112}, "heads must be .* wide, not 112"),
        ({"num_hidden_layers": 10**9}, "layers must be 1 to 1024, not 1000000000"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps must be a number, not 'nan'"),
        ({"rope_theta": 10**400}, "rope_theta must be a number, not '1000"),
        # With false, transformers computes attention in both directions.
        ({"is_causal": False}, "is_causal is 'False'; the engine supports only causal attention"),
        # Integers that exceed every float, in members that the rules of rotary embeddings compute with.
        ({"head_dim": 10**400}, "head_dim must be an integer, not '1000"),
        ({"hidden_size": 10**400, "head_dim": None}, "hidden_size must be an integer, not '1000"),
        ({"max_position_embeddings": 10**400, "rope_scaling": LONG}, "max_position_embeddings must be an integer"),
        ({"original_max_position_embeddings": 10**400, "rope_scaling": STRETCHED}, "original_max.* must be an integer"),
        ({"tie_word_embeddings": "no"}, "tie_word_embeddings must be true or false, not 'no'"),
        ({"eos_token_id": ["a"]}, "eos_token_id must be a token id, not"),
        ({"eos_token_id": 64}, "token 64 is not in the vocabulary of 64"),
    ],
)
def test_what_the_engine_does_not_compute_is_refused(says: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ModelRejected, match=f"config.json: .*{sentence}"):
        read(config_json(LLAMA) | says)


MISTRAL_SAYS: Final = config_json(LLAMA) | {"model_type": "mistral", "architectures": ["MistralForCausalLM"]}


@pytest.mark.parametrize(
    ("says", "window"),
    [
        ({"sliding_window": None}, None),
        ({"sliding_window": 10**6}, 10**6),
        ({"sliding_window": 48}, 48),
        ({}, 4096),
    ],
)
def test_a_mistral_is_a_llama_with_its_window(says: dict[str, Any], window: int | None) -> None:
    assert read(MISTRAL_SAYS | says) == replace(LLAMA, windows=() if window is None else (window, window))


WINDOWED: Final = {"use_sliding_window": True, "sliding_window": 48, "max_window_layers": 1}


@pytest.mark.parametrize(
    ("says", "windows"),
    [
        ({"sliding_window": 48, "max_window_layers": 0}, ()),
        (WINDOWED, (None, 48)),
        (WINDOWED | {"max_window_layers": 2}, ()),
        (WINDOWED | {"max_window_layers": None}, ()),
        (WINDOWED | {"sliding_window": None}, ()),
        ({"use_sliding_window": True, "max_window_layers": 0}, (4096, 4096)),
        (WINDOWED | {"layer_types": ["sliding_attention", "full_attention"]}, (48, None)),
        (WINDOWED | {"layer_types": ["full_attention", "full_attention"]}, ()),
    ],
)
@pytest.mark.parametrize("config", [QWEN2, QWEN3])
def test_a_qwen_s_windows_are_those_of_some_layers(
    config: ModelConfig, says: dict[str, Any], windows: tuple[int | None, ...]
) -> None:
    assert read(config_json(config) | says) == replace(config, windows=windows)


@pytest.mark.parametrize(
    ("says", "sentence"),
    [
        ({"layer_types": ["full_attention", "sliding_attention"]}, "must be without sliding_attention if use_sliding"),
        (WINDOWED | {"layer_types": ["full_attention"]}, "layer_types must be 2 of full_attention and sliding_attent"),
        (WINDOWED | {"layer_types": ["full_attention", "chunked_attention"]}, "layer_types must be 2 of full_attent"),
        (WINDOWED | {"sliding_window": 0}, "sliding_window must be at least 1, not 0"),
        (
            WINDOWED | {"sliding_window": None, "layer_types": ["full_attention", "sliding_attention"]},
            "sliding_window must be a number of positions if layer_types has sliding_attention",
        ),
    ],
)
def test_what_a_qwen_may_not_say_of_windows(says: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ModelRejected, match=sentence):
        read(config_json(QWEN3) | says)


PHI3_LONG: Final = {"type": "su", "short_factor": [1.0] * 16, "long_factor": [2.0] * 16}


def test_what_a_phi_3_leaves_out_is_as_in_transformers() -> None:
    left_out = ("rms_norm_eps", "num_key_value_heads", "head_dim", "rope_theta")
    said = {key: value for key, value in config_json(PHI3).items() if key not in left_out}
    assert read(said) == replace(PHI3, norm_epsilon=1e-5, key_heads=8)


def test_a_phi_3_turns_parts_of_heads() -> None:
    said = config_json(PHI3)
    turned = replace(PHI3, turned_width=24)
    assert read(said | {"partial_rotary_factor": 0.75}) == turned
    assert read(said | {"rope_parameters": {"partial_rotary_factor": 0.75}, "partial_rotary_factor": 0.5}) == turned
    assert read(said | {"partial_rotary_factor": 1.0}) == PHI3


def test_a_phi_3_s_original_context_is_next_to_its_scaling() -> None:
    said = config_json(PHI3) | {"max_position_embeddings": 8192, "rope_scaling": PHI3_LONG | {"factor": 2.0}}
    for original, told in (({}, 4096), ({"original_max_position_embeddings": 2048}, 2048)):
        for kind in ("su", "yarn", "longrope"):
            scaling = read(said | original | {"rope_scaling": PHI3_LONG | {"type": kind}}).rope_scaling
            assert isinstance(scaling, LongScaling)
            assert scaling.original_context == told
            assert math.isclose(scaling.attention_factor, math.sqrt(1 + math.log(8192 / told) / math.log(told)))


@pytest.mark.parametrize(
    ("says", "sentence"),
    [
        (
            {"rope_scaling": {"type": "linear", "factor": 2.0}},
            "rope_type must be one of default, longrope, not 'linear",
        ),
        ({"rope_scaling": {"type": "su"}}, "short_factor must have 16 numbers"),
        ({"sliding_window": 0}, "sliding_window must be at least 1, not 0"),
        ({"partial_rotary_factor": 1.5}, "partial_rotary_factor must be above 0, and at most 1, not 1.5"),
        ({"partial_rotary_factor": 0.1}, "must rotate an even number of the 32 values of a head, not 3"),
        ({"partial_rotary_factor": 0.5, "rope_scaling": PHI3_LONG}, "short_factor must have 8 numbers, .*, not 16"),
    ],
)
def test_what_a_phi_3_may_not_say(says: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ModelRejected, match=sentence):
        read(config_json(PHI3) | says)


GEMMA3_SAYS: Final = config_json(GEMMA3) | {"eos_token_id": 1}
GLOBAL: Final = {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6}


def test_what_a_gemma_3_leaves_out_is_as_in_transformers() -> None:
    left_out = (
        "num_key_value_heads", "head_dim", "eos_token_id", "rope_theta", "rope_local_base_freq", "layer_types",
        "sliding_window", "query_pre_attn_scalar", "tie_word_embeddings", "rms_norm_eps", "hidden_activation",
    )  # fmt: skip
    said = {key: value for key, value in GEMMA3_SAYS.items() if key not in left_out} | {"num_hidden_layers": 13}
    assert read(said) == replace(
        GEMMA3,
        layers=13,
        key_heads=4,
        head_width=256,
        rope_theta=1e6,
        local_rope_theta=1e4,
        norm_epsilon=1e-6,
        score_divisor=256.0,
        windows=(*(4096,) * 5, None, *(4096,) * 5, None, 4096),
    )


@pytest.mark.parametrize(
    "says",
    [
        {"rope_theta": 1e6, "rope_scaling": {"rope_type": "linear", "factor": 8.0}},
        {"rope_parameters": {"full_attention": GLOBAL, "sliding_attention": {"rope_theta": 5e3}}},
        {"rope_local_base_freq": 5e3, "rope_parameters": {"full_attention": GLOBAL, "sliding_attention": None}},
        {"rope_theta": 1e6, "rope_parameters": {"full_attention": {"type": "linear", "factor": 8}}},
    ],
)
def test_each_spelling_of_a_gemma_3_s_rotary_embeddings(says: dict[str, Any]) -> None:
    said = {key: value for key, value in GEMMA3_SAYS.items() if key != "rope_theta"}
    if "sliding_attention" in says.get("rope_parameters", {}) and "rope_local_base_freq" not in says:
        del said["rope_local_base_freq"]
    assert read(said | says) == replace(GEMMA3, rope_theta=1e6, rope_scaling=LinearScaling(8.0))


def test_a_gemma_3_s_embedding_is_scaled_by_the_root_of_its_width_as_bf16() -> None:
    assert read(GEMMA3_SAYS | {"hidden_size": 1152}).embedding_scale == 34.0
    assert read(GEMMA3_SAYS | {"hidden_size": 3840}).embedding_scale == 62.0


@pytest.mark.parametrize(
    ("says", "sentence"),
    [
        ({"architectures": ["Gemma3ForConditionalGeneration"]}, "is not .Gemma3ForCausalLM."),
        (
            {"final_logit_softcapping": 30.0},
            "final_logit_softcapping is '30.0'; the engine does not support caps of logits",
        ),
        (
            {"attn_logit_softcapping": 50.0},
            "attn_logit_softcapping is '50.0'; the engine does not support caps of logits",
        ),
        (
            {"hidden_activation": "gelu"},
            "hidden_activation is 'gelu'; the engine supports only the activation GELU .tanh.",
        ),
        (
            {"use_bidirectional_attention": True},
            "use_bidirectional_attention is 'True'; the engine supports only causal",
        ),
        ({"attention_bias": True}, "attention_bias is 'True'"),
        ({"query_pre_attn_scalar": 0}, "query_pre_attn_scalar must be 1 to 16777216, not 0.0"),
        ({"query_pre_attn_scalar": "256"}, "query_pre_attn_scalar must be a number"),
        ({"layer_types": ["full_attention"]}, "layer_types must be 2 of full_attention and sliding_attention"),
        ({"layer_types": None, "sliding_window_pattern": 0}, "sliding_window_pattern must be at least 1, not 0"),
        ({"sliding_window": None}, "sliding_window must be a number of positions if layer_types has sliding"),
        ({"rope_local_base_freq": -1.0}, "base must be at least 1 and finite, not -1.0"),
        ({"rope_scaling": {"type": "linear", "factor": 8.0}}, "rope_type is missing; versions of transformers read"),
        ({"rope_scaling": STRETCHED}, "rope_type must be one of default, linear, not 'llama3'"),
        ({"rope_scaling": {"rope_type": "linear"}}, "factor is missing"),
        ({"rope_parameters": GLOBAL}, "'rope_type' must be in full_attention or sliding_attention"),
        (
            {"rope_parameters": {"sliding_attention": {"rope_type": "linear", "factor": 2.0}}},
            "rope_type of sliding_attention must be default, not 'linear'",
        ),
        (
            {"rope_parameters": {"full_attention": {"partial_rotary_factor": 0.5}}},
            "partial_rotary_factor is '0.5'; the engine supports only rotary embeddings of whole heads",
        ),
        ({"num_experts": 8}, "num_experts is '8'"),
    ],
)
def test_what_a_gemma_3_may_not_say(says: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ModelRejected, match=sentence):
        read(GEMMA3_SAYS | says)


IMAGES_SAYS: Final = {
    "model_type": "gemma3",
    "architectures": ["Gemma3ForConditionalGeneration"],
    "text_config": {key: value for key, value in GEMMA3_SAYS.items() if key not in ("architectures", "eos_token_id")},
    "vision_config": {"model_type": "siglip_vision_model"},
    "mm_tokens_per_image": 256,
    "eos_token_id": [1, 6],
}


def test_the_text_part_of_a_gemma_3_with_images_is_read() -> None:
    assert read(IMAGES_SAYS) == replace(GEMMA3, end_tokens=(1, 6))
    # The members in the config.json of Gemma 3 4B. The class in transformers has defaults for the others.
    left_out = {"hidden_size": 2560, "intermediate_size": 10240, "num_hidden_layers": 34, "sliding_window": 1024}
    scaling = {"rope_scaling": {"factor": 8.0, "rope_type": "linear"}}
    found = read(IMAGES_SAYS | {"text_config": left_out | scaling | {"model_type": "gemma3_text"}})
    assert (found.heads, found.key_heads, found.head_width, found.vocabulary) == (8, 4, 256, 262208)
    assert (found.context, found.rope_scaling, found.embedding_scale) == (131072, LinearScaling(8.0), 50.5)
    assert found.windows == tuple(None if layer % 6 == 5 else 1024 for layer in range(34))


@pytest.mark.parametrize(
    ("says", "sentence"),
    [
        ({"text_config": None}, "text_config is missing"),
        ({"text_config": {"model_type": "gemma2"}}, "text_config: model_type must be gemma3_text, not 'gemma2'"),
        ({"text_config": {"final_logit_softcapping": 30.0}}, "text_config: final_logit_softcapping is '30.0'"),
        ({"tie_word_embeddings": False}, "text_config: tie_word_embeddings must be False, as next to it"),
        ({"quantization_config": {"quant_method": "fp8"}}, "does not support packed weights of models with images"),
    ],
)
def test_what_a_gemma_3_with_images_may_not_say(says: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ModelRejected, match=sentence):
        read(IMAGES_SAYS | says)


MOE_SAYS: Final = config_json(QWEN3_MOE)


def test_what_a_qwen3_moe_leaves_out_is_as_in_transformers() -> None:
    left_out = (
        "num_experts", "num_experts_per_tok", "moe_intermediate_size", "norm_topk_prob", "decoder_sparse_step",
        "mlp_only_layers", "num_key_value_heads", "head_dim", "rms_norm_eps",
    )  # fmt: skip
    said = {key: value for key, value in MOE_SAYS.items() if key not in left_out}
    experts = Experts(128, 8, 768, is_normalised=False)
    assert read(said) == replace(QWEN3_MOE, key_heads=4, head_width=32, norm_epsilon=1e-6, experts=experts)


@pytest.mark.parametrize(
    ("says", "dense"),
    [
        ({"decoder_sparse_step": 1}, ()),
        ({"decoder_sparse_step": 1, "mlp_only_layers": [2, 0, 0, 99]}, (0, 2)),
        ({"decoder_sparse_step": 2, "mlp_only_layers": None}, (0, 2)),
        ({"decoder_sparse_step": 2, "mlp_only_layers": [1]}, None),
        ({"decoder_sparse_step": 4}, None),
        ({"num_experts": 0}, None),
    ],
)
def test_layers_without_experts_are_those_of_transformers(says: dict[str, Any], dense: tuple[int, ...] | None) -> None:
    assert QWEN3_MOE.experts is not None
    wanted = None if dense is None else replace(QWEN3_MOE.experts, dense_layers=dense)
    assert read(MOE_SAYS | says) == replace(QWEN3_MOE, experts=wanted)


def test_a_qwen3_moe_s_window_is_that_of_all_layers() -> None:
    windowed = MOE_SAYS | {"use_sliding_window": True, "sliding_window": 48, "max_window_layers": 1}
    assert read(windowed) == replace(QWEN3_MOE, windows=(48,) * 3)
    assert read(windowed | {"use_sliding_window": False}) == QWEN3_MOE


@pytest.mark.parametrize(
    ("says", "sentence"),
    [
        ({"num_local_experts": 7}, "num_experts is 6, and num_local_experts 7"),
        ({"num_experts": 257}, "experts must be 1 to 256, not 257"),
        ({"num_experts": -1}, "experts must be 1 to 256, not -1"),
        ({"num_experts_per_tok": 7}, "experts of a row must be 1 to 6, not 7"),
        ({"num_experts_per_tok": 0}, "experts of a row must be 1 to 6, not 0"),
        ({"num_experts": 64, "num_experts_per_tok": 17}, "experts of a row must be 1 to 16, not 17"),
        ({"moe_intermediate_size": 100}, "experts' inner size must be a multiple of 32, not 100"),
        ({"moe_intermediate_size": 0}, "experts' inner size must be 1 to"),
        ({"norm_topk_prob": 1}, "norm_topk_prob must be true or false"),
        ({"decoder_sparse_step": 0}, "decoder_sparse_step must be at least 1, not 0"),
        ({"mlp_only_layers": ["0"]}, "mlp_only_layers must be numbers of layers"),
        ({"mlp_only_layers": 3}, "mlp_only_layers must be a list"),
        (
            {"shared_expert_intermediate_size": 512},
            "shared_expert_intermediate_size is '512'; the engine does not support shared",
        ),
        ({"attention_bias": True}, "attention_bias is 'True'"),
        ({"architectures": ["Qwen3ForCausalLM"]}, "is not .Qwen3MoeForCausalLM."),
    ],
)
def test_what_a_qwen3_moe_may_not_say(says: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ModelRejected, match=sentence):
        read(MOE_SAYS | says)


def test_what_a_mistral_leaves_out_is_as_in_transformers() -> None:
    said = MISTRAL_SAYS | {"num_attention_heads": 16}
    left_out = {key: value for key, value in said.items() if key != "num_key_value_heads"}
    assert read(left_out).key_heads == 8
    assert read(said | {"num_key_value_heads": None}).key_heads == 16
    assert read(said | {"attention_bias": True}) == read(said)


@pytest.mark.parametrize(
    ("says", "sentence"),
    [
        ({"sliding_window": 0}, "sliding_window must be at least 1, not 0"),
        ({"sliding_window": "4096"}, "sliding_window must be an integer"),
        ({"architectures": ["LlamaForCausalLM"]}, "is not .MistralForCausalLM."),
        (
            {"layer_types": ["sliding_attention"]},
            "the engine supports only full attention in all layers of this family",
        ),
    ],
)
def test_what_a_mistral_may_not_say(says: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ModelRejected, match=sentence):
        read(MISTRAL_SAYS | says)


def test_a_linear_scaling_is_read() -> None:
    says = {"rope_scaling": {"rope_type": "linear", "factor": 4}}
    assert read(config_json(LLAMA) | says) == replace(LLAMA, rope_scaling=LinearScaling(4.0))


def test_a_dynamic_scaling_begins_where_sequences_end() -> None:
    """The scaling applies only beyond max_position_embeddings, and no sequence is longer."""
    assert read(config_json(LLAMA) | {"rope_scaling": {"rope_type": "dynamic", "factor": 4.0}}) == LLAMA


@pytest.mark.parametrize(
    ("says", "scaling"),
    [
        (YARN, YarnScaling(4.0, 32.0, 1.0, 32, 0.1 * math.log(4) + 1)),
        (YARN | {"beta_fast": 0, "mscale": 1.0}, YarnScaling(4.0, 32.0, 1.0, 32, 0.1 * math.log(4) + 1)),
        (YARN | {"beta_fast": 8, "beta_slow": 2, "attention_factor": 1.5}, YarnScaling(4.0, 8.0, 2.0, 32, 1.5)),
        (YARN | {"mscale": 1.0, "mscale_all_dim": 1.0}, YarnScaling(4.0, 32.0, 1.0, 32, 1.0)),
        (YARN | {"truncate": False, "attention_factor": 1.0}, YarnScaling(4.0, 32.0, 1.0, 32, 1.0, False)),
        (YARN | {"truncate": None, "attention_factor": 1.0}, YarnScaling(4.0, 32.0, 1.0, 32, 1.0, False)),
        ({"type": "yarn", "factor": 1.0}, YarnScaling(1.0, 32.0, 1.0, 128, 1.0)),
        (LONG, LongScaling((1.0,) * 16, (2.0,) * 16, 64, math.sqrt(1 + math.log(2) / math.log(64)))),
        (LONG | {"factor": 64.0}, LongScaling((1.0,) * 16, (2.0,) * 16, 64, math.sqrt(2))),
        (LONG | {"attention_factor": 1.25}, LongScaling((1.0,) * 16, (2.0,) * 16, 64, 1.25)),
    ],
)
def test_a_scaling_is_read_with_its_attention_factor(says: dict[str, Any], scaling: YarnScaling | LongScaling) -> None:
    found = read(config_json(LLAMA) | {"rope_scaling": says}).rope_scaling
    assert isinstance(found, YarnScaling | LongScaling)
    assert math.isclose(found.attention_factor, scaling.attention_factor)
    assert replace(found, attention_factor=scaling.attention_factor) == scaling


def test_an_error_shows_a_file_s_own_text_cut() -> None:
    with pytest.raises(ModelRejected) as caught:
        read({"model_type": "x\n" * 10_000})
    assert len(str(caught.value)) < 400
    assert "\n" not in str(caught.value)
