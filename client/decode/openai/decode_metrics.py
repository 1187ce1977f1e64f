"""The metrics of a decode server, in Prometheus' text format.

    gpulease_decode_tokens_total{tenant, kind}             counter: tokens computed; kind: prompt, emitted, replayed
    gpulease_decode_gpu_seconds_total{tenant}              counter: seconds of steps, divided by the tenants' rows
    gpulease_decode_rows_total{kind}                       counter: rows of steps; kind: decode, prompt
    gpulease_decode_step_seconds                           histogram: duration of a step
    gpulease_decode_first_token_seconds{tenant}            histogram: from a request to its first token
    gpulease_decode_inter_token_seconds{tenant}            histogram: between two tokens, including replays
    gpulease_decode_rebind_seconds{tenant, scope}          histogram: from a loss to the request's next token
    gpulease_decode_forward_revoked_seconds                histogram: from a region's end to the refused step's report
    gpulease_decode_forward_revoked_total{tenant}          counter: steps not begun because a region had ended
    gpulease_decode_requests_total{tenant, reason}         counter: requests that ended or were refused
    gpulease_decode_engine_rebuild_seconds{kind}           histogram: without an engine; kind: planned, known, unknown
    gpulease_decode_waiting{tenant}                        gauge: requests that wait for their admission
    gpulease_decode_coming{tenant}                         gauge: requests with prompts that are being parsed
    gpulease_decode_text_processes_replaced                gauge: replaced processes for parsing prompts, so far
    gpulease_decode_live_sequences{tenant}                 gauge: sequences in progress
    gpulease_decode_live_tenants                           gauge: tenants with a sequence in progress
    gpulease_decode_blocks{tenant}                         gauge: blocks of the tenant's region; 0 without a region
    gpulease_decode_blocks_used{tenant}                    gauge: blocks that sequences in progress use
    gpulease_decode_blocks_kept{tenant}                    gauge: unused blocks, kept so that prompts can reuse them
    gpulease_decode_reused_prompt_tokens_total{tenant}     counter: tokens of prompts that were not computed again
    gpulease_decode_evicted_blocks_total{tenant}           counter: kept blocks that were evicted to make room
    gpulease_decode_without_engine_seconds                 gauge: since the engine was lost; 0 with an engine
    gpulease_decode_prefix_requests_total{prefix}          counter: requests that began with the shared prefix
    gpulease_decode_prefix_reused_tokens_total{prefix}     counter: tokens of prompts not computed because of it
    gpulease_decode_prefix_bytes{prefix}                   gauge: memory of its region; 0 once the region has ended
    gpulease_decode_prefix_changes_total{prefix, kind}     counter; kind: load, rebuild (by another engine), end

`scope` says what was lost: region or engine.
"""

import time
from bisect import bisect_left
from collections import Counter as Counts
from collections.abc import Callable, Iterable, Iterator
from itertools import repeat
from typing import Final

from prometheus_client import Counter, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from gpulease.client.decode.decode_reports import (
    DecoderObserver,
    EngineRebuilt,
    FinishedRequest,
    ForwardRevoked,
    PrefixChange,
    PrefixChanged,
    PromptRefused,
    RebindReport,
    StepReport,
)
from gpulease.client.decode.scheduler.tenant_state import TenantState
from gpulease.client.decode.supervisor.decoder import Decoder
from gpulease.client.http.server_metrics import ServerMetrics

STEP_BUCKETS_S: Final = (0.0002, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 5)
WAIT_BUCKETS_S: Final = (0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 30, 60)
REBIND_BUCKETS_S: Final = (0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 30)
FLIP_BUCKETS_S: Final = (0.00002, 0.00005, 0.0001, 0.0002, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.05, 0.2, 1)

UNKNOWN_TENANT: Final = "other"
"""The label of all tenants that are not in the settings, so that the settings bound the number of series."""

MAX_FOLLOWED: Final = 65_536
"""Maximum number of sequences for which the time of the last token is kept. This limits the memory if the ends of
sequences are not reported."""


class GapHistogram(Collector):
    """A histogram of times between tokens. One call counts many sequences with the same gap.

    prometheus_client's `Histogram` takes one observation per call, and locks each time. A step has a hundred
    observations.
    """

    def __init__(self, tenants: Iterable[str]) -> None:
        self._counts = {tenant: [0] * (len(STEP_BUCKETS_S) + 1) for tenant in tenants}
        self._sums = dict.fromkeys(self._counts, 0.0)

    def observe(self, tenant: str, gap_s: float, count: int) -> None:
        """Count `count` gaps of `gap_s` seconds each."""
        # The first bucket with a bound of at least the gap; the last one is +Inf.
        self._counts[tenant][bisect_left(STEP_BUCKETS_S, gap_s)] += count
        self._sums[tenant] += gap_s * count

    def collect(self) -> Iterator[Metric]:
        """Yield the metric family. As Prometheus requires, its buckets are cumulative."""
        help_text = "Time between two tokens of a sequence."
        family = HistogramMetricFamily("gpulease_decode_inter_token_seconds", help_text, labels=["tenant"])
        for tenant, counts in self._counts.items():
            buckets, total = [], 0
            for bound, count in zip((*map(str, map(float, STEP_BUCKETS_S)), "+Inf"), counts, strict=True):
                total += count
                buckets.append((bound, float(total)))
            family.add_metric([tenant], buckets, self._sums[tenant])
        yield family


class TenantGauges(Collector):
    """The gauges that are read from the decoder at each scrape."""

    def __init__(self, decoder: Callable[[], Decoder | None], clock: Callable[[], float]) -> None:
        self._decoder, self._clock = decoder, clock

    def collect(self) -> Iterator[Metric]:
        """Yield the metric families. Without a decoder, the families with the label `tenant` are empty."""
        decoder = self._decoder()
        tenants = {} if decoder is None else decoder.scheduler.tenants
        values: dict[str, tuple[str, Callable[[TenantState], float]]] = {
            "waiting": ("Requests that wait to be admitted.", lambda state: len(state.waiting)),
            "live_sequences": ("Sequences in progress.", lambda state: len(state.live)),
            "blocks": ("Blocks of the tenant's region.", lambda state: state.region_blocks),
            "blocks_used": ("Blocks that sequences in progress use.", lambda state: state.blocks.used),
            "blocks_kept": (
                "Blocks that are kept so that later prompts can reuse them.",
                lambda state: state.blocks.cached,
            ),
        }
        for name, (help_text, value) in values.items():
            family = GaugeMetricFamily(f"gpulease_decode_{name}", help_text, labels=["tenant"])
            for tenant, state in tenants.items():
                family.add_metric([tenant], value(state))
            yield family
        totals: dict[str, tuple[str, Callable[[TenantState], float]]] = {
            "gpu_seconds": (
                "Seconds in which the engine worked, divided among tenants by their rows.",
                lambda it: it.gpu_s,
            ),
            "reused_prompt_tokens": (
                "Tokens of prompts that did not have to be computed again.",
                lambda it: it.reused_tokens,
            ),
            "evicted_blocks": ("Kept blocks that were evicted to make room.", lambda it: it.evictions),
        }
        for name, (help_text, value) in totals.items():
            counter = CounterMetricFamily(f"gpulease_decode_{name}", help_text, labels=["tenant"])
            for tenant, state in tenants.items():
                counter.add_metric([tenant], value(state))
            yield counter
        coming = GaugeMetricFamily("gpulease_decode_coming", "Prompts that are being parsed.", labels=["tenant"])
        for tenant in tenants:
            coming.add_metric([tenant], 0 if decoder is None else decoder.prompts.coming[tenant])
        yield coming
        replaced = 0 if decoder is None else decoder.prompts.replaced
        yield GaugeMetricFamily(
            "gpulease_decode_text_processes_replaced",
            "Processes for parsing prompts that were replaced.",
            value=replaced,
        )
        live_tenants = sum(bool(state.live) for state in tenants.values())
        yield GaugeMetricFamily(
            "gpulease_decode_live_tenants", "Tenants with a sequence in progress.", value=live_tenants
        )
        outage = None if decoder is None else decoder.outage
        outage_s = 0.0 if outage is None else self._clock() - outage.since
        yield GaugeMetricFamily(
            "gpulease_decode_without_engine_seconds",
            "Seconds since the engine was lost; 0 while there is an engine.",
            value=outage_s,
        )


class PrefixUses(Collector):
    """The metrics of shared prefixes that are read from the decoder at each scrape."""

    def __init__(self, decoder: Callable[[], Decoder | None]) -> None:
        self._decoder = decoder

    def collect(self) -> Iterator[Metric]:
        """Yield the metric families. They are empty without a decoder or a shared prefix."""
        decoder, names = self._decoder(), ["prefix"]
        requests = CounterMetricFamily(
            "gpulease_decode_prefix_requests", "Requests that began with the prefix.", labels=names
        )
        reused = CounterMetricFamily(
            "gpulease_decode_prefix_reused_tokens",
            "Tokens that did not have to be computed because of the prefix.",
            labels=names,
        )
        region_bytes = GaugeMetricFamily("gpulease_decode_prefix_bytes", "Memory of the prefix's region.", labels=names)
        for prefix in () if decoder is None else decoder.prefixes:
            requests.add_metric([prefix.name], prefix.requests)
            reused.add_metric([prefix.name], prefix.reused_tokens)
            region_bytes.add_metric([prefix.name], prefix.region_bytes)
        yield from (requests, reused, region_bytes)


class DecodeMetrics(ServerMetrics, DecoderObserver):
    """The metrics of one decode server; an observer of its decoder.

    Args:
        tenants: The tenants of the settings.
        decoder: Returns the decoder; None while there is none.
        clock: Monotonic seconds.
        on_gap: Called with a tenant, a time between two tokens in seconds, and the number of the tenant's sequences
            with that time.
    """

    def __init__(
        self,
        tenants: Iterable[str],
        decoder: Callable[[], Decoder | None] = lambda: None,
        clock: Callable[[], float] = time.monotonic,
        on_gap: Callable[[str, float, int], None] = lambda *_: None,
    ) -> None:
        super().__init__()
        self._clock, self._on_gap = clock, on_gap
        self._tenants = dict.fromkeys([*tenants, UNKNOWN_TENANT])
        # The time of each sequence's last token, by the id of the sequence's original request.
        self._last: dict[str, float] = {}
        registry, by_tenant = self.registry, ("tenant",)

        def histogram(name: str, help_text: str, buckets: tuple[float, ...], labels: tuple[str, ...] = ()) -> Histogram:
            return Histogram(f"gpulease_decode_{name}_seconds", help_text, labels, buckets=buckets, registry=registry)

        def counter(name: str, help_text: str, labels: tuple[str, ...]) -> Counter:
            return Counter(f"gpulease_decode_{name}", help_text, labels, registry=registry)

        tokens = counter("tokens", "Tokens computed.", ("tenant", "kind"))
        rows = counter("rows", "Rows that steps computed.", ("kind",))
        self._requests = counter("requests", "Requests that ended or were refused.", ("tenant", "reason"))
        revoked = counter("forward_revoked", "Steps that were not started because a region had ended.", by_tenant)
        self._step = histogram("step", "A step.", STEP_BUCKETS_S)
        first = histogram("first_token", "Time from a request to its first token.", WAIT_BUCKETS_S, by_tenant)
        rebind = histogram("rebind", "Time from a loss to the next token.", REBIND_BUCKETS_S, ("tenant", "scope"))
        self._flip = histogram(
            "forward_revoked",
            "Time from the change of a region's state word to the report of the refused step.",
            FLIP_BUCKETS_S,
        )
        rebuild = histogram("engine_rebuild", "Time without an engine.", REBIND_BUCKETS_S, ("kind",))
        # Create all series at the start: for a series that first appears with the value 1, `increase` would be 0.
        kinds = ("prompt", "emitted", "replayed")
        self._tokens = {(name, kind): tokens.labels(name, kind) for name in self._tenants for kind in kinds}
        self._rows = {kind: rows.labels(kind) for kind in ("decode", "prompt")}
        self._revoked = {name: revoked.labels(name) for name in self._tenants}
        self._first = {name: first.labels(name) for name in self._tenants}
        scopes = ("region", "engine")
        self._rebind = {(name, scope): rebind.labels(name, scope) for name in self._tenants for scope in scopes}
        self._rebuild = {kind: rebuild.labels(kind) for kind in ("planned", "known", "unknown")}
        self._gaps = GapHistogram(self._tenants)
        registry.register(self._gaps)
        self._prefix_changes = counter("prefix_changes", "Loads and ends of shared prefixes.", ("prefix", "kind"))
        # These collectors read their values at each scrape, so no event needs to update them.
        registry.register(TenantGauges(decoder, clock))
        registry.register(PrefixUses(decoder))

    def on_step(self, report: StepReport) -> None:
        """Count a step's rows, its tokens, and the times since the previous tokens."""
        now, last, tokens = self._clock(), self._last, report.tokens
        # These sequences got their first token in this step, so their whole prompt or replay was computed.
        for request in tokens.requests[bisect_left(tokens.rows, report.decode_rows) :]:
            self._count_prompt(request.tenant_id, len(request.token_ids), is_replay=request.replayed_tokens > 0)
        # A replay continues a sequence under its original id, so the gap includes the time of the replay.
        names = [request.continues or request.request_id for request in tokens.requests]
        # Sequences of a tenant that got their previous token in the same step have the same gap.
        tenants = [request.tenant_id for request in tokens.requests]
        gaps = Counts(zip(tenants, map(last.get, names, repeat(0.0)), strict=True))
        last.update(dict.fromkeys(names, now))
        for (tenant_id, before), count in gaps.items():
            tenant = self._label(tenant_id)
            self._tokens[tenant, "emitted"].inc(count)
            if before:
                self._gaps.observe(tenant, now - before, count)
                self._on_gap(tenant_id, now - before, count)
        # If there are too many entries, drop all: at worst, one gap per sequence is not measured.
        if len(last) > MAX_FOLLOWED:
            last.clear()
        self._rows["decode"].inc(report.decode_rows)
        self._rows["prompt"].inc(report.rows - report.decode_rows)
        self._step.observe(report.took_s)

    def on_forward_revoked(self, report: ForwardRevoked) -> None:
        """Count a step that did not begin because a region had ended."""
        self._revoked[self._label(report.tenant_id)].inc()
        # The time is unknown if the daemon is on another host, because the hosts' clocks can't be compared.
        if report.flip_to_report_s is not None:
            self._flip.observe(report.flip_to_report_s)

    def on_rebind(self, report: RebindReport) -> None:
        """Measure the time from a loss until the request continues."""
        scope = "engine" if report.is_engine_scoped else "region"
        self._rebind[self._label(report.tenant_id), scope].observe(report.latency_s)

    def on_finished(self, report: FinishedRequest) -> None:
        """Count a request's end, and the time to its first token."""
        self._last.pop(report.request_id, None)
        tenant = self._label(report.tenant_id)
        self._requests.labels(tenant, report.reason.value).inc()
        if report.first_token_at is not None:
            self._first[tenant].observe(report.first_token_at - report.submitted_at)

    def on_prompt_refused(self, report: PromptRefused) -> None:
        """Count a request that was refused before it had tokens."""
        self._requests.labels(self._label(report.tenant_id), report.reason).inc()

    def on_engine_rebuilt(self, report: EngineRebuilt) -> None:
        """Measure the time without an engine, by the cause of the change to another engine."""
        kind = "planned" if report.is_planned else "known" if report.is_known else "unknown"
        self._rebuild[kind].observe(report.took_s)

    def on_prefix_changed(self, report: PrefixChanged) -> None:
        # A prefix's first change is its load, so create its series for all kinds then. The operator chooses the names,
        # so their number is limited.
        for change in PrefixChange:
            self._prefix_changes.labels(report.name, change).inc(change is report.change)

    def _count_prompt(self, tenant_id: str, tokens: int, *, is_replay: bool) -> None:
        self._tokens[self._label(tenant_id), "replayed" if is_replay else "prompt"].inc(tokens)

    def _label(self, tenant_id: str) -> str:
        return tenant_id if tenant_id in self._tenants else UNKNOWN_TENANT
