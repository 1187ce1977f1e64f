"""The metrics of a decode server: what a scrape shows after a decoder's reports."""

import re
from dataclasses import replace
from pathlib import Path

from prometheus_client import CollectorRegistry

import gpulease.client.decode
from gpulease.client.decode.decode_errors import AdmissionReason, CompletionReason
from gpulease.client.decode.decode_reports import (
    EngineRebuilt,
    FinishedRequest,
    ForwardRevoked,
    RebindReport,
    StepReport,
)
from gpulease.client.decode.decode_requests import PromptRequest, SamplingParameters, StepTokens
from gpulease.client.decode.openai import decode_metrics
from gpulease.client.decode.openai.decode_metrics import MAX_FOLLOWED, DecodeMetrics

REQUEST = PromptRequest("ann", "one", (1, 2, 3), SamplingParameters(), 8)
FINISHED = FinishedRequest(
    "ann", "one", (1, 2, 3), (4,), SamplingParameters(), CompletionReason.CANCELLED, "", 1.0, 1.25, 2.0, 0.5, 0.1, 0, 7
)


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def step(*tokens: tuple[PromptRequest, int], rows: int = 4, decode_rows: int = 1) -> StepReport:
    requests, positions = [request for request, _ in tokens], [position for _, position in tokens]
    # A prompt's first token comes from a row after those of the sequences that decode.
    begun = (decode_rows * (position == len(request.token_ids)) for request, position in tokens)
    places = [row + behind for row, behind in enumerate(begun)]
    return StepReport(rows, decode_rows, StepTokens(requests, [9] * len(tokens), positions, places), 0.003)


def value(kept: CollectorRegistry, name: str, **labels: str) -> float | None:
    return kept.get_sample_value(f"gpulease_decode_{name}", labels)


def test_tokens_are_counted_by_tenant_and_kind() -> None:
    metrics = DecodeMetrics(["ann", "bob"])
    bobs = replace(REQUEST, tenant_id="bob", request_id="two")
    replay = replace(REQUEST, request_id="", continues="one", attempt=1, token_ids=(1, 2, 3, 9), replayed_tokens=1)
    metrics.on_step(step((REQUEST, 3), (bobs, 3)))
    metrics.on_step(step((bobs, 4)))
    metrics.on_step(step((replay, 4)))
    found = {
        (name, kind): value(metrics.registry, "tokens_total", tenant=name, kind=kind)
        for name in ("ann", "bob")
        for kind in ("prompt", "emitted", "replayed")
    }
    assert list(found.values()) == [3, 2, 4, 3, 2, 0]
    assert value(metrics.registry, "rows_total", kind="decode") == 3
    assert value(metrics.registry, "rows_total", kind="prompt") == 9
    assert value(metrics.registry, "step_seconds_count") == 3


def test_gaps_between_tokens_go_on_through_a_replay() -> None:
    clock = Clock()
    metrics = DecodeMetrics(["ann"], clock=clock)
    replay = replace(REQUEST, request_id="", continues="one", attempt=1, token_ids=(1, 2, 3, 9), replayed_tokens=1)
    metrics.on_step(step((REQUEST, 3)))
    assert value(metrics.registry, "inter_token_seconds_count", tenant="ann") == 0, "no gap before the first token"
    clock.now += 0.004
    metrics.on_step(step((replay, 4)))
    clock.now += 0.5
    metrics.on_step(step((replay, 5)))
    found = [
        value(metrics.registry, "inter_token_seconds_bucket", tenant="ann", le=le) for le in ("0.002", "0.005", "+Inf")
    ]
    assert found == [0, 1, 2]
    total = value(metrics.registry, "inter_token_seconds_sum", tenant="ann")
    assert total is not None
    assert abs(total - 0.504) < 1e-9


def test_an_ended_sequence_is_not_followed_any_more() -> None:
    metrics = DecodeMetrics(["ann"])
    metrics.on_step(step((REQUEST, 3)))
    metrics.on_finished(FINISHED)
    assert metrics._last == {}
    many = [(replace(REQUEST, request_id=str(number)), 3) for number in range(MAX_FOLLOWED + 1)]
    metrics.on_step(step(*many))
    assert len(metrics._last) <= MAX_FOLLOWED


def test_ends_losses_and_rebuilds_are_counted() -> None:
    metrics = DecodeMetrics(["ann"])
    metrics.on_finished(FINISHED)
    metrics.on_finished(replace(FINISHED, reason=AdmissionReason.POOL_EXHAUSTED, first_token_at=None))
    metrics.on_forward_revoked(ForwardRevoked(7, "ann", None, 3, 0.0004))
    metrics.on_forward_revoked(ForwardRevoked(7, "ann", None, 3, None))
    metrics.on_rebind(RebindReport("ann", "one", "one~1", 4, CompletionReason.REVOKED, False, 0.03))
    metrics.on_rebind(RebindReport("ann", "one", "one~2", 4, CompletionReason.ENGINE_ERROR, True, 0.3))
    for is_known, is_planned in ((True, True), (True, False), (False, False)):
        metrics.on_engine_rebuilt(EngineRebuilt("", is_known, is_planned, 1.5))
    kept = metrics.registry
    assert value(kept, "requests_total", tenant="ann", reason="Cancelled") == 1
    assert value(kept, "requests_total", tenant="ann", reason="PoolExhausted") == 1
    assert value(kept, "first_token_seconds_sum", tenant="ann") == 0.25
    assert value(kept, "first_token_seconds_count", tenant="ann") == 1
    assert value(kept, "forward_revoked_total", tenant="ann") == 2
    assert value(kept, "forward_revoked_seconds_count") == 1
    for scope in ("region", "engine"):
        assert value(kept, "rebind_seconds_count", tenant="ann", scope=scope) == 1
    for kind in ("planned", "known", "unknown"):
        assert value(kept, "engine_rebuild_seconds_count", kind=kind) == 1


def test_every_family_is_described() -> None:
    """An operator finds each name of a scrape in the page that the manual names."""
    described = set(re.findall(r"gpulease_decode_\w+", str(decode_metrics.__doc__)))
    counted = {family.name + "_total" * (family.type == "counter") for family in DecodeMetrics([]).registry.collect()}
    assert {name for name in counted if name.startswith("gpulease_decode_")} == described
    page = Path(gpulease.client.decode.__path__[0]) / "README.md"
    assert set(re.findall(r"gpulease_decode_\w+", page.read_text())) <= described


def test_an_unknown_tenant_gets_no_series_of_its_own() -> None:
    metrics = DecodeMetrics(["ann"])
    for number in range(50):
        metrics.on_finished(replace(FINISHED, tenant_id=f"made-up-{number}"))
    assert b"made-up" not in metrics.text()
    assert value(metrics.registry, "requests_total", tenant="other", reason="Cancelled") == 50
