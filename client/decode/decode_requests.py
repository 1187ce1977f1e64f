"""The scheduler's input and output: tenants, requests, their sampling, events and reasons."""

import math
from dataclasses import dataclass
from typing import Final

from gpulease.client.decode.decode_errors import AdmissionReason, CompletionReason, RequestRejected
from gpulease.client.decode.row_records import PAGE

MIN_TEMPERATURE: Final = 1e-3
"""Lowest temperature above 0. Below it, a logit times the f32 reciprocal overflows in the kernels."""

MAX_TEMPERATURE: Final = 100.0
"""Highest temperature. All tokens are almost equally likely there, so a higher one is a mistake."""

MAX_TOP_K: Final = 2**31 - 1
"""Highest top_k: a row's record holds it in 32 signed bits."""

MAX_SEED: Final = 2**64 - 1
"""Highest seed: a row's record holds it in 64 bits."""

MAX_POSITIONS: Final = 2**31 - 1
"""Most positions of a sequence: a row's record holds them in 32 signed bits."""

MAX_REQUEST_ID_CHARACTERS: Final = 256
"""Longest id of a request. Ids are logged, audited and returned, so they must not fill disks."""

MAX_WAIT_S: Final = 3600.0
"""Longest time in seconds that a request may wait, so that it can't occupy a place in the queue forever."""

DEFAULT_WEIGHT: Final = 1.0
DEFAULT_MAX_WAITING: Final = 64

MAX_BLOCKS_PER_TENANT: Final = 2**20
"""Most blocks of a region. The list of free blocks is allocated at once, 8 bytes for each."""


@dataclass(frozen=True, slots=True)
class SamplingParameters:
    """How a request's tokens are chosen from their logits.

    Equal parameters give equal tokens for equal logits, in any batch: a token's random number depends only on the seed
    and its position. Raises RequestRejected for a value that the kernels can't compute with.

    Attributes:
        temperature: Divides the logits: MIN_TEMPERATURE to MAX_TEMPERATURE, or 0 for the highest logit (greedy).
        top_p: Keeps the fewest tokens that together have this probability: above 0, and 1 keeps all.
        top_k: Keeps this many of the highest logits; 0 keeps all.
        seed: The seed of the random numbers, an unsigned integer of 64 bits.
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
        """The reciprocal of the temperature, as in a row's record; 0 for greedy sampling."""
        # The kernel multiplies by it, and 0 selects the greedy choice.
        return 1 / self.temperature if self.temperature else 0.0


@dataclass(frozen=True, slots=True)
class TenantConfig:
    """Limits of one tenant's use of the engine. Raises ValueError if a number is out of its range.

    Attributes:
        id: The tenant's name.
        max_concurrent: Most live sequences at a time.
        max_blocks: Most blocks of its region, of PAGE positions each.
        weight: Its share of the engine while other tenants also wait.
        max_waiting: Most requests that wait for admission; a further one is refused at once.
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
    """A prompt to be continued. Raises RequestRejected for values that no model could serve.

    Attributes:
        tenant_id: Its tenant.
        request_id: Its id, which no other live or waiting request has.
        token_ids: The prompt, one token at least.
        sampling: How tokens are chosen.
        max_emitted_tokens: Most tokens to emit, 1 or more.
        wait_s: Seconds for which it may wait for its admission; 0: it is refused if it is not admitted at once.
        continues: The caller's id of the request that this one replays; "" if a caller sent it.
        attempt: The number of this replay, from 1; 0 if a caller sent it.
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
        # A replay's id is the caller's with a suffix, so it may be a little longer.
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
        """The most positions that the sequence can take. The last emitted token is never computed, so it takes none."""
        return len(self.token_ids) + self.max_emitted_tokens - 1

    @property
    def blocks(self) -> int:
        """The most blocks that it can need. All of them are reserved at its admission."""
        return -(-self.positions // PAGE)


class SchedulerEvent:
    """Namespace of the scheduler's events. Each request ends with one Completed or one AdmissionRejected."""

    @dataclass(slots=True)
    class Token:
        """A token was emitted.

        Attributes:
            request: The request.
            token: The token, also if it ends the sequence.
            position: Its place in the sequence, counted from the prompt's first token as 0.
            row: The row of the completed step that yielded it.
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
            continued_by: The id of the request that replays it, and already waits; "" if it is not replayed.
            kept_out_by: If it waited too long, the obstacle at the end; otherwise None.
            detail: The obstacle as a sentence, with advice; otherwise "".
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
            detail: What was requested and what is available, with advice.
            retry_after_s: Seconds after which it may be sent again; None if that is unknown.
        """

        request: PromptRequest
        reason: AdmissionReason
        detail: str
        retry_after_s: float | None = None


AnyEvent = SchedulerEvent.Token | SchedulerEvent.Completed | SchedulerEvent.AdmissionRejected
"""An event of the scheduler. Lists of them are in the order in which they happened."""


def _is_number(value: object) -> bool:
    # JSON's true is not a number, and NaN or infinity can't be computed with.
    return (isinstance(value, int) and not isinstance(value, bool)) or (
        isinstance(value, float) and math.isfinite(value)
    )


def _check_integer(name: str, value: object, least: int, most: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= most:
        raise RequestRejected(f"{name} must be an integer from {least} to {most}, not {value!r}")
