"""Reports about a decoder's work, from which a server makes metrics, audit records and pages.

Times are seconds of `time.monotonic`.
"""

from dataclasses import dataclass
from enum import StrEnum

from gpulease.client.decode.decode_errors import AdmissionReason, CompletionReason
from gpulease.client.decode.decode_requests import SamplingParameters, StepTokens


@dataclass(frozen=True, slots=True)
class ForwardRevoked:
    """A step that did not begin because a region that it names had ended ("revoked" stands for any end).

    Attributes:
        lease_id: The region's id.
        tenant_id: Its tenant.
        kernel_site: The position of the refused launch in the step's graph; None if the refusal names none.
        kv_position: The number of the step.
        flip_to_report_s: Seconds from the region's end, that is the change of its state word, to this report; None if
            unknown.
    """

    lease_id: int
    tenant_id: str
    kernel_site: int | None
    kv_position: int | None
    flip_to_report_s: float | None


@dataclass(frozen=True, slots=True)
class RebindReport:
    """The recovery of a request from the loss of its region or engine, at the first token of its replay.

    Attributes:
        tenant_id: Its tenant.
        old_request_id, new_request_id: The scheduler's ids of the request that ended and of its replay.
        prompt_tokens: Number of tokens that were computed again: the prompt's, and the tokens emitted before.
        reason: Why the old request ended.
        is_engine_scoped: Whether the whole engine was lost, rather than only the tenant's region.
        latency_s: Seconds from the old request's end to the new one's first token.
    """

    tenant_id: str
    old_request_id: str
    new_request_id: str
    prompt_tokens: int
    reason: CompletionReason
    is_engine_scoped: bool
    latency_s: float


@dataclass(frozen=True, slots=True)
class FinishedRequest:
    """A caller's request that has ended, with all of its replays.

    Attributes:
        tenant_id: Its tenant.
        request_id: Its id, as `submit` returned it.
        prompt: The prompt's tokens.
        emitted: The tokens that were emitted.
        sampling: How they were chosen.
        reason: Why it ended.
        detail: The reason in more detail; may be "".
        submitted_at, ended_at: When it was submitted, and when it ended.
        first_token_at: When its first token was emitted; None if there was none.
        compute_s: The total duration, in seconds, of all steps in which it had a row.
        gpu_s: Its share of this time. Each step's duration is divided among the requests in proportion to their rows.
        replays: How often it was replayed.
        region_id: The id of the last region in which it was computed; None if there was none.
    """

    tenant_id: str
    request_id: str
    prompt: tuple[int, ...]
    emitted: tuple[int, ...]
    sampling: SamplingParameters
    reason: CompletionReason | AdmissionReason
    detail: str
    submitted_at: float
    first_token_at: float | None
    ended_at: float
    compute_s: float
    gpu_s: float
    replays: int
    region_id: int | None


@dataclass(frozen=True, slots=True)
class PromptRefused:
    """A request that was refused before its text was tokenized.

    Attributes:
        tenant_id: Its tenant.
        reason: An AdmissionReason, or the name of an error's class.
        detail: The reason in more detail.
    """

    tenant_id: str
    reason: str
    detail: str


@dataclass(frozen=True, slots=True)
class StepReport:
    """A step that was computed.

    Attributes:
        rows: Number of its rows.
        decode_rows: Number of its rows that belong to decoding sequences; the others belong to prompts.
        tokens: The tokens that it emitted.
        took_s: Seconds from the previous step's end, or from this step's start if there was a pause, to this step's
            end.
    """

    rows: int
    decode_rows: int
    tokens: StepTokens
    took_s: float


@dataclass(frozen=True, slots=True)
class EngineRebuilt:
    """All sequences moved to another engine.

    Attributes:
        cause: Why, as a sentence.
        is_known: Whether the error's class shows that the engine was lost. If not, an unexpected error was treated as a
            loss.
        is_planned: Whether the old engine served until the new one took over.
        took_s: Seconds without an engine.
    """

    cause: str
    is_known: bool
    is_planned: bool
    took_s: float


class PrefixChange(StrEnum):
    """The kind of change to a shared prefix that `PrefixChanged` reports."""

    LOAD = "load"
    """Its blocks were computed, and prompts use them from now on."""

    REBUILD = "rebuild"
    """Its blocks were computed again, in the region of another engine."""

    END = "end"
    """Its region has ended. It is shared again when another engine is opened."""


@dataclass(frozen=True, slots=True)
class PrefixChanged:
    """A change of one of the operator's shared prefixes.

    Attributes:
        name: The prefix.
        change: What happened.
        detail: Why it ended, as a sentence; "" otherwise.
    """

    name: str
    change: PrefixChange
    detail: str = ""


class DecoderObserver:
    """Base class of observers. The decoder calls their methods in its loop, so they must not block."""

    def on_step(self, report: StepReport) -> None:
        """Called after each step that was computed."""

    def on_forward_revoked(self, report: ForwardRevoked) -> None:
        """Called when a step did not begin because a region had ended."""

    def on_rebind(self, report: RebindReport) -> None:
        """Called at the first token after a loss of a request's region or engine."""

    def on_finished(self, report: FinishedRequest) -> None:
        """Called when a caller's request has ended."""

    def on_prompt_refused(self, report: PromptRefused) -> None:
        """Called when a request is refused before it has tokens."""

    def on_engine_rebuilt(self, report: EngineRebuilt) -> None:
        """Called when another engine has taken over."""

    def on_prefix_changed(self, report: PrefixChanged) -> None:
        """Called when a shared prefix is computed, even before the decoder is open, and when its region ends."""
