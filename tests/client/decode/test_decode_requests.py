from typing import Any

import pytest

from gpulease.client.decode.decode_errors import AdmissionReason, CompletionReason, RequestRejected
from gpulease.client.decode.decode_requests import (
    MAX_SEED,
    MAX_TEMPERATURE,
    MAX_TOP_K,
    MAX_WAIT_S,
    MIN_TEMPERATURE,
    PromptRequest,
    SamplingParameters,
    TenantConfig,
)


@pytest.mark.parametrize(
    "values",
    [
        {},
        {"temperature": 0},
        {"temperature": MIN_TEMPERATURE},
        {"temperature": MAX_TEMPERATURE},
        {"temperature": 1},
        {"top_p": 1e-9},
        {"top_p": 1},
        {"top_k": MAX_TOP_K},
        {"seed": MAX_SEED},
    ],
)
def test_sampling_parameters_that_can_be_computed_with_are_taken(values: dict[str, Any]) -> None:
    assert SamplingParameters(**values) == SamplingParameters(**values)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("temperature", -0.5),
        ("temperature", MIN_TEMPERATURE / 2),
        ("temperature", MAX_TEMPERATURE * 1.01),
        ("temperature", float("nan")),
        ("temperature", float("inf")),
        ("temperature", 10**400),
        ("temperature", "1"),
        ("temperature", True),
        ("temperature", None),
        ("top_p", 0),
        ("top_p", 1.01),
        ("top_p", float("nan")),
        ("top_p", None),
        ("top_k", -1),
        ("top_k", MAX_TOP_K + 1),
        ("top_k", 1.0),
        ("top_k", False),
        ("seed", -1),
        ("seed", MAX_SEED + 1),
        ("seed", 0.5),
    ],
)
def test_sampling_parameters_that_cannot_be_computed_with_are_refused_by_name(name: str, value: Any) -> None:
    with pytest.raises(RequestRejected, match=f"^{name} must be .*, not "):
        SamplingParameters(**{name: value})


def test_greedy_sampling_has_an_inverse_temperature_of_zero() -> None:
    assert SamplingParameters().inverse_temperature == 0
    assert SamplingParameters(temperature=0.5).inverse_temperature == 2


def request(**values: Any) -> PromptRequest:
    given = {"tenant_id": "a", "request_id": "r", "token_ids": (1,), "sampling": SamplingParameters()}
    return PromptRequest(**{**given, "max_emitted_tokens": 1, **values})


@pytest.mark.parametrize(
    ("values", "told"),
    [
        ({"token_ids": ()}, "at least one token"),
        ({"request_id": ""}, "id must have 1 to 256 characters, not 0"),
        ({"request_id": "x" * 257}, "id must have 1 to 256 characters, not 257"),
        ({"max_emitted_tokens": 0}, "max_emitted_tokens must be .*, not 0"),
        ({"max_emitted_tokens": 2**31}, "max_emitted_tokens"),
        ({"max_emitted_tokens": 1.5}, "max_emitted_tokens"),
        ({"wait_s": -1}, "wait_s must be .*, not -1"),
        ({"wait_s": MAX_WAIT_S + 1}, "wait_s"),
        ({"wait_s": float("nan")}, "wait_s"),
    ],
)
def test_a_request_that_cannot_be_one_is_refused(values: dict[str, Any], told: str) -> None:
    with pytest.raises(RequestRejected, match=told):
        request(**values)


@pytest.mark.parametrize(
    ("prompt", "most", "positions", "blocks"), [(1, 1, 1, 1), (16, 1, 16, 1), (16, 2, 17, 2), (1, 32, 32, 2)]
)
def test_the_last_emitted_token_takes_no_position(prompt: int, most: int, positions: int, blocks: int) -> None:
    found = request(token_ids=(1,) * prompt, max_emitted_tokens=most)
    assert (found.positions, found.blocks) == (positions, blocks)


@pytest.mark.parametrize(
    "values",
    [
        {"id": ""},
        {"max_concurrent": 0},
        {"max_blocks": 0},
        {"max_blocks": 2**20 + 1},
        {"weight": 0},
        {"weight": -1.0},
        {"weight": float("nan")},
        {"weight": float("inf")},
        {"max_waiting": -1},
    ],
)
def test_a_tenant_out_of_range_is_refused(values: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="tenant"):
        TenantConfig(**{"id": "a", "max_concurrent": 1, "max_blocks": 1, **values})


def test_reasons_are_told_by_the_contract_s_words() -> None:
    assert {str(reason) for reason in CompletionReason} == {
        "EndOfSequence",
        "MaxTokensReached",
        "Revoked",
        "Expired",
        "EngineError",
        "Cancelled",
        "Preempted",
        "DeadlineExceeded",
    }
    assert {str(reason) for reason in AdmissionReason} == {
        "PoolExhausted",
        "QuotaExceeded",
        "TooLarge",
        "RebindLimited",
    }
