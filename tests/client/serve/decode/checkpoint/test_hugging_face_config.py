from typing import Any, Final

import pytest

from gpulease.client.serve.decode.checked_file import Members
from gpulease.client.serve.decode.checkpoint.hugging_face_config import hugging_face_config
from gpulease.client.serve.decode.decode_errors import ModelRejected
from gpulease.client.serve.decode.model_config import Family, ModelConfig, RopeScaling
from helpers.made_models import LLAMA, MODELS, config_json

STRETCHED: Final = {
    "rope_type": "llama3",
    "factor": 32.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


def read(said: dict[str, Any], generation: dict[str, Any] | None = None) -> ModelConfig:
    more = None if generation is None else Members(generation, "generation_config.json")
    return hugging_face_config(Members(said, "config.json"), more, None)


@pytest.mark.parametrize("config", MODELS.values(), ids=MODELS)
def test_a_config_is_read_back(config: ModelConfig) -> None:
    assert read(config_json(config)) == config


def test_what_a_config_leaves_out_is_as_in_transformers() -> None:
    """The config.json of SmolLM2-135M, without what nobody reads."""
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


@pytest.mark.parametrize(
    "says",
    [
        {"rope_theta": 5e5, "rope_scaling": STRETCHED},
        {"rope_theta": None, "rope_parameters": STRETCHED | {"rope_theta": 5e5}},
    ],
    ids=["rope_scaling", "rope_parameters"],
)
def test_llama_3_s_stretching_is_read_where_either_version_writes_it(says: dict[str, Any]) -> None:
    config = read(config_json(LLAMA) | says)
    assert config.rope_theta == 5e5
    assert config.rope_scaling == RopeScaling(32.0, 1.0, 4.0, 8192)


@pytest.mark.parametrize(
    ("says", "sentence"),
    [
        ({"model_type": "gemma2"}, "model_type 'gemma2' is none of llama, qwen2, qwen3"),
        ({"model_type": None}, "model_type '' is none of"),
        ({"architectures": ["LlamaForSequenceClassification"]}, "architectures .*Classification"),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu' is not silu"),
        ({"attention_bias": True}, "attention_bias is true"),
        ({"mlp_bias": True}, "mlp_bias is true"),
        ({"use_sliding_window": True, "sliding_window": 4096}, "a sliding window is in use"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "a sliding window is in use"),
        ({"rope_scaling": {"type": "yarn", "factor": 4.0}}, "rope_type 'yarn' is neither"),
        ({"rope_scaling": STRETCHED | {"factor": 0.5}}, "factor 0.5"),
        ({"rope_scaling": STRETCHED | {"high_freq_factor": 1.0}}, "from 1.0 to 1.0"),
        ({"rope_scaling": STRETCHED | {"original_max_position_embeddings": 0}}, "embeddings is 0"),
        ({"rope_scaling": {"rope_type": "llama3"}}, "rope_scaling: factor is missing"),
        ({"rope_scaling": "llama3"}, "rope_scaling is 'llama3', no object"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor is not 1"),
        ({"quantization_config": {"quant_method": "gptq"}}, "quantization_config is there"),
        ({"hidden_size": None}, "hidden_size is missing"),
        ({"hidden_size": "256"}, "hidden_size is '256', no integer"),
        ({"hidden_size": True}, "hidden_size is 'True', no integer"),
        ({"num_attention_heads": 0, "head_dim": None}, "no multiple of 0 heads"),
        ({"num_attention_heads": 7, "head_dim": None}, "no multiple of 7 heads"),
        ({"head_dim": 80}, "heads are 80 wide"),
        ({"num_hidden_layers": 10**9}, "layers is 1000000000"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps is 'nan', no number"),
        ({"rope_theta": 10**400}, "rope_theta is '1000.*, no number"),
        ({"tie_word_embeddings": "no"}, "tie_word_embeddings is 'no', no boolean"),
        ({"eos_token_id": ["a"]}, "eos_token_id is .* no token"),
        ({"eos_token_id": 64}, "token 64 is none of the vocabulary's 64"),
    ],
)
def test_what_the_engine_does_not_compute_is_refused(says: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ModelRejected, match=f"config.json: .*{sentence}"):
        read(config_json(LLAMA) | says)


def test_an_error_shows_a_file_s_own_text_cut() -> None:
    with pytest.raises(ModelRejected) as caught:
        read({"model_type": "x\n" * 10_000})
    assert len(str(caught.value)) < 400
    assert "\n" not in str(caught.value)
