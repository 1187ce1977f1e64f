from dataclasses import replace
from typing import Any

import pytest

from gpulease.client.decode.decode_errors import ModelRejected
from gpulease.client.decode.model_config import MAX_LAYERS, check_config, check_positions
from gpulease.client.errors import InvalidRequest
from helpers.made_models import FOLDER_MODELS, LLAMA


@pytest.mark.parametrize("config", FOLDER_MODELS.values(), ids=FOLDER_MODELS)
def test_a_model_that_the_engine_computes_is_taken(config: Any) -> None:
    check_config(config, "a file")


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"head_width": 112}, "heads must be 32, 64, 80, 96, 128, 256 wide, not 112"),
        ({"heads": 34, "key_heads": 2}, "34 query heads on 2 key heads"),
        ({"heads": 9, "key_heads": 2}, "9 query heads on 2 key heads"),
        ({"width": 255}, "hidden size must be a multiple of 32, not 255"),
        ({"inner_width": 500}, "inner size must be a multiple of 32, not 500"),
        ({"layers": 0}, "layers must be 1 to 1024, not 0"),
        ({"layers": MAX_LAYERS + 1}, "layers must be 1 to 1024, not 1025"),
        ({"key_heads": 0}, "key heads must be 1 to .*, not 0"),
        ({"vocabulary": 1 << 40}, "vocabulary must be 1 to"),
        ({"rope_theta": 0.0}, "base must be at least 1 and finite, not 0.0"),
        ({"rope_theta": 1e-300}, "base must be at least 1 and finite, not 1e-300"),
        ({"local_rope_theta": 0.5}, "base must be at least 1 and finite, not 0.5"),
        ({"score_divisor": 1e-300}, "query_pre_attn_scalar must be 1 to 16777216, not 1e-300"),
        ({"score_divisor": 1e300}, "query_pre_attn_scalar must be 1 to 16777216, not 1e\\+300"),
        ({"norm_epsilon": -1.0}, "rms_norm_eps.* must be at least 1.175e-38 and below 1, not -1"),
        ({"norm_epsilon": 0.0}, "attention.layer_norm_rms_epsilon.* must be at least 1.175e-38 and below 1, not 0"),
        ({"norm_epsilon": 1e-46}, "rms_norm_eps.* must be at least 1.175e-38 and below 1, not 1e-46"),
        ({"end_tokens": (3, 64)}, "token 64 is not in the vocabulary of 64"),
        ({"windows": (None, 0)}, "sliding_window must be at least 1, not 0"),
        ({"windows": (5,)}, "1 windows must be as many as the 2 layers"),
        ({"begin_token": -1}, "token -1 is not in the vocabulary"),
    ],
)
def test_a_model_that_the_engine_does_not_compute_is_refused(changes: dict[str, Any], says: str) -> None:
    with pytest.raises(ModelRejected, match=f"a file: .*{says}"):
        check_config(replace(LLAMA, **changes), "a file")


def test_positions_beyond_the_model_s_context_are_refused() -> None:
    check_positions(LLAMA, LLAMA.context)
    with pytest.raises(InvalidRequest, match="positions is 129; the model's own context has 128"):
        check_positions(LLAMA, LLAMA.context + 1)


def test_a_window_counts_in_its_layer_if_sequences_exceed_it() -> None:
    config = replace(LLAMA, windows=(None, 48))
    assert [config.window(layer, 49) for layer in range(2)] == [None, 48]
    assert config.window(1, 48) is LLAMA.window(1, 49) is None
