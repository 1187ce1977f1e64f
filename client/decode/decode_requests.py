"""The scheduler's input and output: tenants, requests, their sampling, events and reasons."""

import math
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from gpulease.client.decode.decode_errors import RequestRejected
from gpulease.client.decode.row_records import PAGE

MIN_TEMPERATURE: Final = 1e-3
"""Lowest temperature above 0: below it the kernels' f32 reciprocal, times a logit, overflows."""

MAX_TEMPERATURE: Final = 100.0
"""Highest temperature: all tokens are nearly alike there, so a higher one is a mistake in its unit."""

MAX_TOP_K: Final = 2**31 - 1
"""Highest top_k: a row's record holds it in 32 signed bits."""

MAX_SEED: Final = 2**64 - 1
"""Highest seed: a row's record holds it in 64 bits."""

MAX_POSITIONS: Final = 2**31 - 1
"""Most positions of a sequence: a row's record holds them in 32 signed bits."""

MAX_REQUEST_ID_CHARACTERS: Final = 256
"""Longest id of a request: ids are logged, audited and sent back, so a longer one would fill disks."""

MAX_WAIT_S: Final = 3600.0
"""Longest time in seconds that a request may wait: a place in a queue must not be held forever."""

DEFAULT_WEIGHT: Final = 1.0
DEFAULT_MAX_WAITING: Final = 64

MAX_BLOCKS_PER_TENANT: Final = 2**20
"""Most blocks of a region: their free list is made at once, 8 bytes each."""


@dataclass(frozen=True, slots=True)
class SamplingParameters:
    """Parameters of a request's sampling: how its tokens are chosen from their logits.

    Equal parameters give equal tokens for equal logits, in any batch: a token's random number depends on the seed and
    its position alone. Raises RequestRejected if a value can't be computed with.

    Attributes:
        temperature: Divides the logits; 0 takes the highest one (greedy), else MIN_TEMPERATURE to MAX_TEMPERATURE.
        top_p: Keeps the fewest tokens that have this much of the probability; above 0, 1 keeps all.
        top_k: Keeps so many of the highest logits; 0 keeps all.
        seed: The seed of the random numbers, 64 bits without a sign.
    """

    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int = 0

    def __post_init__(self) -> None:
        if not _is_number(self.temperature):
            raise RequestRejected(f"temperature must be a number, not {self.temperature!r}")
        if self.temperature != 0 and not MIN_TEMPERATURE <= self.temperature <= MAX_TEMPERATURE:
            most = f"{MIN_TEMPERATURE:g} to {MAX_TEMPERATURE:g}"
            raise RequestRejected(f"temperature must be 0 (the likeliest token) or {most}, not {self.temperature!r}")
        if not _is_number(self.top_p) or not 0 < self.top_p <= 1:
            raise RequestRejected(f"top_p must be a number above 0, up to 1 (all tokens), not {self.top_p!r}")
        _check_integer("top_k", self.top_k, 0, MAX_TOP_K)
        _check_integer("seed", self.seed, 0, MAX_SEED)

    @property
    def inverse_temperature(self) -> float:
        """Return the reciprocal of the temperature, 0 for greedy sampling, as a row's record has it."""
        return 1 / self.temperature if self.temperature else 0.0


@dataclass(frozen=True, slots=True)
class TenantConfig:
    """Limits of one tenant's use of the engine. Raises ValueError if a number is out of its range.

    Attributes:
        id: The tenant's name.
        max_concurrent: Most live sequences at a time.
        max_blocks: Most blocks of its region, of PAGE positions each.
        weight: Its share of the engine while other tenants wait, too.
        max_waiting: Most requests that wait for their admission; one more is refused at once.
    """

    id: str
    max_concurrent: int
    max_blocks: int
    weight: float = DEFAULT_WEIGHT
    max_waiting: int = DEFAULT_MAX_WAITING

    def __post_init__(self) -> None:
        if not self.id:
            raise ValueError("a tenant must have an id")
        if self.max_concurrent < 1 or self.max_waiting < 0:
            raise ValueError(f"tenant {self.id}: max_concurrent must be at least 1, and max_waiting at least 0")
        if not 1 <= self.max_blocks <= MAX_BLOCKS_PER_TENANT:
            raise ValueError(
                f"tenant {self.id}: max_blocks must be 1 to {MAX_BLOCKS_PER_TENANT}, not {self.max_blocks}"
            )
        if not (math.isfinite(self.weight) and self.weight > 0):
            raise ValueError(f"tenant {self.id}: weight must be a number above 0, not {self.weight}")


@dataclass(frozen=True, slots=True)
class PromptRequest:
    """A prompt to be continued. Raises RequestRejected if it can't be one, for any model.

    Attributes:
        tenant_id: Its tenant.
        request_id: Its id, of no other request that lives or waits.
        token_ids: The prompt, one token at least.
        sampling: How tokens are chosen.
        max_emitted_tokens: Most tokens to emit, 1 or more.
        wait_s: Seconds for which it may wait for its admission; 0: it is refused if it can't begin at once.
        continues: The request that this one is the replay of, by its first id; "" if a caller sent it.
        attempt: Which replay this is, from 1; 0 if a caller sent it.
        replayed_tokens: How many of `token_ids`, at their end, earlier attempts emitted.
    """

    tenant_id: str
    request_id: str
    token_ids: tuple[int, ...]
    sampling: SamplingParameters
    max_emitted_tokens: int
    wait_s: float = 0.0
    continues: str = ""
    attempt: int = 0
    replayed_tokens: int = 0

    def __post_init__(self) -> None:
        if not self.continues and not 1 <= len(self.request_id) <= MAX_REQUEST_ID_CHARACTERS:
            most = f"1 to {MAX_REQUEST_ID_CHARACTERS} characters"
            raise RequestRejected(f"the request's id must have {most}, not {len(self.request_id)} of them")
        if not self.token_ids:
            raise RequestRejected("the prompt must have at least one token")
        _check_integer("max_emitted_tokens", self.max_emitted_tokens, 1, MAX_POSITIONS)
        if not _is_number(self.wait_s) or not 0 <= self.wait_s <= MAX_WAIT_S:
            raise RequestRejected(f"wait_s must be 0 to {MAX_WAIT_S:g} seconds, not {self.wait_s!r}")

    @property
    def positions(self) -> int:
        """Return how many positions the sequence can take; the last token that it emits takes none."""
        return len(self.token_ids) + self.max_emitted_tokens - 1

    @property
    def blocks(self) -> int:
        """Return how many blocks it can need; all are reserved at its admission."""
        return -(-self.positions // PAGE)


class CompletionReason(StrEnum):
    """Reasons for a request's end."""

    END_OF_SEQUENCE = "EndOfSequence"
    MAX_TOKENS_REACHED = "MaxTokensReached"
    REVOKED = "Revoked"
    EXPIRED = "Expired"
    ENGINE_ERROR = "EngineError"
    CANCELLED = "Cancelled"
    PREEMPTED = "Preempted"
    DEADLINE_EXCEEDED = "DeadlineExceeded"


class AdmissionReason(StrEnum):
    """Reasons for a request's refusal."""

    POOL_EXHAUSTED = "PoolExhausted"
    QUOTA_EXCEEDED = "QuotaExceeded"
    TOO_LARGE = "TooLarge"
    REBIND_LIMITED = "RebindLimited"


class SchedulerEvent:
    """Namespace of the scheduler's events. Each request ends with one Completed or one AdmissionRejected."""

    @dataclass(slots=True)
    class Token:
        """A token was emitted.

        Attributes:
            request: The request.
            token: The token, also if it ends the sequence.
            position: Its place in the sequence, counted from the prompt's first token as 0.
            row: The row of the completed step that it is the result of.
        """

        request: PromptRequest
        token: int
        position: int
        row: int

    @dataclass(frozen=True, slots=True)
    class Completed:
        """A request ended.

        Attributes:
            request: The request.
            reason: Why it ended.
            continued_by: The id of the request that replays it, waiting already; "" if none does.
            kept_out_by: Of one that waited too long, what kept it out; None of others.
            detail: That as a sentence, with what to do; "" of others.
        """

        request: PromptRequest
        reason: CompletionReason
        continued_by: str = ""
        kept_out_by: AdmissionReason | None = None
        detail: str = ""

    @dataclass(frozen=True, slots=True)
    class AdmissionRejected:
        """A request was refused; nothing of it was computed.

        Attributes:
            request: The request.
            reason: Why it was refused.
            detail: What was asked and what there is, with what to do.
            retry_after_s: Seconds after which it may be sent again; None if that is unknown.
        """

        request: PromptRequest
        reason: AdmissionReason
        detail: str
        retry_after_s: float | None = None


AnyEvent = SchedulerEvent.Token | SchedulerEvent.Completed | SchedulerEvent.AdmissionRejected
"""An event of the scheduler. Lists of them are in the order in which they happened."""


def _is_number(value: object) -> bool:
    return (isinstance(value, int) and not isinstance(value, bool)) or (
        isinstance(value, float) and math.isfinite(value)
    )


def _check_integer(name: str, value: object, least: int, most: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= most:
        raise RequestRejected(f"{name} must be an integer from {least} to {most}, not {value!r}")
