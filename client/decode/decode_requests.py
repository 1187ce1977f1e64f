"""The scheduler's input and output: tenants, requests and their sampling, and events."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Final

from gpulease.client.decode.decode_errors import AdmissionReason, CompletionReason, RequestRejected
from gpulease.client.decode.pooling import Pooling
from gpulease.client.decode.row_records import MAX_RANKS, PAGE
from gpulease.client.decode.token_guide import TokenGuide
from gpulease.client.numbers import is_number
from gpulease.client.texts import quoted

MIN_TEMPERATURE: Final = 1e-3
"""Lowest temperature above 0. Below it, a logit times the f32 reciprocal would overflow in the kernels."""

MAX_TEMPERATURE: Final = 100.0
"""Highest temperature. Here all tokens are almost equally likely, so a higher value is a mistake."""

MAX_TOP_K: Final = 2**31 - 1
"""Highest top_k: a row's record holds it in 32 signed bits."""

MAX_SEED: Final = 2**64 - 1
"""Highest seed: a row's record holds it in 64 bits."""

MAX_POSITIONS: Final = 2**31 - 1
"""Maximum number of positions of a sequence: a row's record holds them in 32 signed bits."""

MIN_REPETITION_PENALTY: Final = 0.01
MAX_REPETITION_PENALTY: Final = 100.0
"""Bounds of the repetition penalty. Beyond them, the penalty alone decides which token is chosen."""

MAX_PENALTY: Final = 2.0
"""Largest absolute value of a presence or frequency penalty, as in OpenAI's API."""

MAX_BIAS: Final = 100.0
"""Largest absolute value of a token's bias, as in OpenAI's API."""

MAX_BIASED_TOKENS: Final = 300
"""Maximum number of tokens with a bias. Each takes an entry in every row of the request."""

MAX_ALLOWED_TOKENS: Final = 4096
"""Maximum length of `allowed_token_ids`, which is checked once for each of a request's sequences."""

MAX_BAD_SEQUENCES: Final = 256
"""Maximum number of token sequences in `bad_words`: each word takes two, with and without a space before it."""

MAX_BAD_SEQUENCE: Final = 16
"""Maximum length of such a sequence, in tokens. After each emitted token, up to this many lengths are looked up."""

MAX_STOP_TOKENS: Final = 128
"""Maximum number of tokens that end one request's sequence, in addition to the model's end tokens."""

LEAST_DEPTH: Final = 1e-30
"""The depth for a min_p of 1, which keeps only the highest logits: a depth of 0 keeps all."""

MAX_PRIORITY: Final = 2**31 - 1
"""Largest absolute value of a request's priority."""

MAX_REQUEST_ID_CHARACTERS: Final = 256
"""Longest id of a request. Ids are logged, audited and returned, so they must not fill disks."""

MAX_SALT_CHARACTERS: Final = 1024
"""Longest cache salt. It stays in memory as long as its request. A random salt has about 40 characters."""

MAX_WAIT_S: Final = 3600.0
"""Longest time in seconds that a request may wait, so that it can't occupy a place in the queue forever."""

DEFAULT_WEIGHT: Final = 1.0
DEFAULT_MAX_WAITING: Final = 64

MAX_BLOCKS_PER_TENANT: Final = 2**20
"""Maximum number of blocks of a region. The list of free blocks is allocated at once, 8 bytes for each."""


@dataclass(frozen=True, slots=True)
class SamplingParameters:
    """How a request's tokens are chosen from their logits.

    Equal parameters give equal tokens for equal logits, in any batch: a token's random number depends only on the seed
    and its position. Raises RequestRejected for a value that the kernels can't compute with.

    Attributes:
        temperature: Divides the logits: MIN_TEMPERATURE to MAX_TEMPERATURE, or 0 for the highest logit (greedy).
        top_p: Keeps the smallest set of tokens that together have this probability, above 0; 1 keeps all.
        top_k: Keeps this many of the highest logits; 0 keeps all.
        seed: The seed of the random numbers, an unsigned integer of 64 bits.
        min_p: Keeps tokens with at least this share of the likeliest token's probability, 0 to 1; 0 keeps all.
        repetition_penalty: For each token in the sequence, a logit above 0 is divided by the penalty, and any other
            logit is multiplied by it.
        presence_penalty: Subtracted once from the logit of each token that was emitted.
        frequency_penalty: Subtracted from a token's logit once for each time that the token was emitted.
        logit_bias: Pairs of a token and the number that is added to its logit before the penalties.
        allowed_token_ids: The only tokens that can be chosen, even to end the sequence; () for all.
        bad_words: Sequences of tokens that are never emitted: the last token of each can't be chosen after the other
            tokens.
        min_tokens: Number of tokens that must be emitted before a token that ends the sequence can be chosen.
        stop_token_ids: Further tokens that end the sequence.
        ignores_end: Whether the model's end tokens do not end the sequence.
        grammar: The grammar that the emitted tokens follow up to the end of the sequence (text/grammar.py); "" for any
            tokens. The sequence then ends only with the grammar, or at its maximum length.
    """

    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    min_tokens: int = 0
    stop_token_ids: tuple[int, ...] = ()
    ignores_end: bool = False
    grammar: str = ""
    allowed_token_ids: tuple[int, ...] = ()
    bad_words: tuple[tuple[int, ...], ...] = ()

    def __post_init__(self) -> None:
        if not is_number(self.temperature):
            raise RequestRejected(f"temperature must be a number, not {quoted(self.temperature)}")
        if self.temperature != 0 and not MIN_TEMPERATURE <= self.temperature <= MAX_TEMPERATURE:
            allowed = f"{MIN_TEMPERATURE:g} to {MAX_TEMPERATURE:g}"
            raise RequestRejected(
                f"temperature must be 0 (the likeliest token) or {allowed}, not {quoted(self.temperature)}"
            )
        if not is_number(self.top_p) or not 0 < self.top_p <= 1:
            raise RequestRejected(f"top_p must be a number above 0, up to 1 (all tokens), not {quoted(self.top_p)}")
        _check_integer("top_k", self.top_k, 0, MAX_TOP_K)
        _check_integer("seed", self.seed, 0, MAX_SEED)
        _check_range("min_p", self.min_p, 0, 1)
        _check_range("repetition_penalty", self.repetition_penalty, MIN_REPETITION_PENALTY, MAX_REPETITION_PENALTY)
        _check_range("presence_penalty", self.presence_penalty, -MAX_PENALTY, MAX_PENALTY)
        _check_range("frequency_penalty", self.frequency_penalty, -MAX_PENALTY, MAX_PENALTY)
        if len(self.logit_bias) > MAX_BIASED_TOKENS:
            raise RequestRejected(
                f"logit_bias must have at most {MAX_BIASED_TOKENS} tokens, not {len(self.logit_bias)}"
            )
        for token, bias in self.logit_bias:
            _check_integer("a token of logit_bias", token, 0, MAX_POSITIONS)
            _check_range("a bias of logit_bias", bias, -MAX_BIAS, MAX_BIAS)
        if len({token for token, _ in self.logit_bias}) < len(self.logit_bias):
            raise RequestRejected("logit_bias must have each token once")
        _check_integer("min_tokens", self.min_tokens, 0, MAX_POSITIONS)
        if len(self.stop_token_ids) > MAX_STOP_TOKENS:
            raise RequestRejected(f"stop_token_ids must have at most {MAX_STOP_TOKENS}, not {len(self.stop_token_ids)}")
        for token in self.stop_token_ids:
            _check_integer("a token of stop_token_ids", token, 0, MAX_POSITIONS)
        _check_tokens("allowed_token_ids", self.allowed_token_ids, MAX_ALLOWED_TOKENS)
        if len(self.bad_words) > MAX_BAD_SEQUENCES or not all(
            0 < len(word) <= MAX_BAD_SEQUENCE for word in self.bad_words
        ):
            allowed = f"at most {MAX_BAD_SEQUENCES} sequences of 1 to {MAX_BAD_SEQUENCE} tokens"
            raise RequestRejected(f"bad_words must be {allowed}")
        _check_tokens("bad_words", tuple(chain(*self.bad_words)), MAX_BAD_SEQUENCES * MAX_BAD_SEQUENCE)
        # Only the grammar decides which tokens may come next, and when the sequence ends.
        others = self.min_tokens, self.stop_token_ids, self.ignores_end, self.filters_tokens
        if self.grammar and any(others):
            text = "a grammar can't be combined with min_tokens, stop_token_ids, ignore_eos, allowed_token_ids or"
            raise RequestRejected(f"{text} bad_words")

    @property
    def filters_tokens(self) -> bool:
        """Whether lists limit which tokens can be chosen."""
        return bool(self.allowed_token_ids or self.bad_words)

    @property
    def penalises(self) -> bool:
        """Whether penalties make the choice of a token depend on earlier tokens."""
        penalties = self.repetition_penalty, self.presence_penalty, self.frequency_penalty
        return penalties != (1.0, 0.0, 0.0)

    @property
    def changes_logits(self) -> bool:
        """Whether the model's logits are changed before a token is chosen."""
        return self.penalises or bool(self.logit_bias) or self.min_tokens > 0 or self.filters_tokens

    @property
    def depth(self) -> float:
        """How far below the highest logit min_p lets a token be, as in a row's record; 0 for any distance."""
        # At temperature T, a token whose logit is d below the highest has e^(-d / T) of its probability.
        if not self.min_p:
            return 0.0
        return max(-self.temperature * math.log(self.min_p), LEAST_DEPTH)

    @property
    def inverse_temperature(self) -> float:
        """The reciprocal of the temperature, in the form of a row's record; 0 for greedy sampling."""
        # The kernel multiplies by this value, and 0 selects greedy sampling.
        return 1 / self.temperature if self.temperature else 0.0


@dataclass(frozen=True, slots=True)
class TenantConfig:
    """Limits of one tenant's use of the engine. Raises ValueError if a number is out of its range.

    Attributes:
        id: The tenant's name.
        max_concurrent: Maximum number of live sequences.
        max_blocks: Maximum number of blocks of its region, of PAGE positions each.
        weight: Its share of the engine while other tenants also wait.
        max_waiting: Maximum number of requests that wait for admission; one more is refused at once.
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
        if not (is_number(self.weight) and self.weight > 0):
            raise ValueError(f"tenant {self.id}: weight must be a number above 0, not {quoted(self.weight)}")


@dataclass(frozen=True, slots=True)
class SharedPrefix:
    """Tokens that the operator shares with all tenants, so that prompts beginning with them find computed blocks.

    Only full blocks are shared. Raises ValueError for too few tokens to fill one block.

    Attributes:
        name: Its name, unique in the decoder.
        token_ids: The tokens.
    """

    name: str
    token_ids: tuple[int, ...]

    def __post_init__(self) -> None:
        if not self.name:
            raise ValueError("a shared prefix must have a name")
        if self.blocks < 1:
            raise ValueError(f"prefix {self.name} must have at least {PAGE} tokens, not {len(self.token_ids)}")

    @property
    def blocks(self) -> int:
        """Number of blocks that its tokens need in its region."""
        return len(self.token_ids) // PAGE


@dataclass(frozen=True, slots=True)
class PromptRequest:
    """A prompt to be continued. Raises RequestRejected for values that no model could serve.

    Attributes:
        tenant_id: Its tenant.
        request_id: Its id, unique among live and waiting requests.
        token_ids: The prompt, at least one token.
        sampling: How tokens are chosen.
        max_emitted_tokens: Maximum number of tokens to emit, 1 or more.
        wait_s: Seconds for which it may wait for its admission; if 0, it is refused unless it is admitted at once.
        continues: The caller's id of the request that this one replays; "" if a caller sent it.
        attempt: The number of this replay, from 1; 0 if a caller sent it.
        replayed_tokens: How many tokens at the end of `token_ids` earlier attempts have emitted.
        priority: The tenant's waiting requests with a lower number are admitted first.
        ranks: How many of the likeliest tokens to report with each token, at most MAX_RANKS.
        scores_prompt: Whether the prompt's tokens are reported with their probabilities.
        pooling: How the prompt's rows become a vector; None for no vector. A request with a pooling also emits a token.
        cache_salt: The request shares blocks only with requests that have the same salt.
        guide: Changes the logits; None to choose from the model's own logits. Replays continue with the same guide.
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
    priority: int = 0
    ranks: int = 0
    scores_prompt: bool = False
    pooling: Pooling | None = None
    cache_salt: str = ""
    guide: "TokenGuide | None" = field(default=None, compare=False)

    def __post_init__(self) -> None:
        # A replay's id is the caller's id with a suffix, so it may be a little longer.
        if not self.continues and not 1 <= len(self.request_id) <= MAX_REQUEST_ID_CHARACTERS:
            allowed = f"1 to {MAX_REQUEST_ID_CHARACTERS} characters"
            raise RequestRejected(f"the request's id must have {allowed}, not {len(self.request_id)} of them")
        if not self.token_ids:
            raise RequestRejected("the prompt must have at least one token")
        _check_integer("max_emitted_tokens", self.max_emitted_tokens, 1, MAX_POSITIONS)
        if not is_number(self.wait_s) or not 0 <= self.wait_s <= MAX_WAIT_S:
            raise RequestRejected(f"wait_s must be 0 to {MAX_WAIT_S:g} seconds, not {quoted(self.wait_s)}")
        _check_integer("priority", self.priority, -MAX_PRIORITY, MAX_PRIORITY)
        _check_integer("ranks", self.ranks, 0, MAX_RANKS)
        if len(self.cache_salt) > MAX_SALT_CHARACTERS:
            allowed = f"at most {MAX_SALT_CHARACTERS} characters"
            raise RequestRejected(f"cache_salt must have {allowed}, not {len(self.cache_salt)}")

    @property
    def has_guidance(self) -> bool:
        """Whether its rows need a guided step: it has a guide, or asks for ranked logits or scores of the prompt."""
        return self.guide is not None or self.ranks > 0 or self.scores_prompt

    @property
    def positions(self) -> int:
        """Maximum number of the sequence's positions. The last emitted token has none, because it is never computed."""
        return len(self.token_ids) + self.max_emitted_tokens - 1

    @property
    def blocks(self) -> int:
        """Maximum number of blocks, of PAGE positions each, that it can need."""
        return -(-self.positions // PAGE)

    @property
    def prompt_blocks(self) -> int:
        """Number of blocks that it needs for its admission: for its prompt and the first emitted token."""
        return min(len(self.token_ids), self.positions - 1) // PAGE + 1

    @property
    def reusable_blocks(self) -> int:
        """Maximum number of its prompt's blocks that can be reused. The last token's row is always computed."""
        needs_all = self.scores_prompt or self.pooling is Pooling.MEAN
        return 0 if needs_all else (len(self.token_ids) - 1) // PAGE


class SchedulerEvent:
    """Namespace of the scheduler's events. Each request ends with one Completed or one AdmissionRejected."""

    @dataclass(slots=True)
    class Token:
        """A token was emitted.

        Attributes:
            request: The request.
            token: The token, even if it ends the sequence.
            position: Its index in the sequence; the prompt's first token has index 0.
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
            continued_by: The id of the request that replays it and already waits; "" if it is not replayed.
            kept_out_by: If it waited too long, the obstacle at the end of its wait; otherwise None.
            detail: The obstacle as a sentence, with advice; otherwise "".
        """

        request: PromptRequest
        reason: CompletionReason
        continued_by: str = ""
        kept_out_by: AdmissionReason | None = None
        detail: str = ""

    @dataclass(frozen=True, slots=True)
    class AdmissionRejected:
        """A request was refused before anything was computed for it.

        Attributes:
            request: The request.
            reason: Why it was refused.
            detail: What was requested and what is available, with advice.
            retry_after_s: Seconds after which it may be sent again; None if unknown.
        """

        request: PromptRequest
        reason: AdmissionReason
        detail: str
        retry_after_s: float | None = None


@dataclass(slots=True)
class StepTokens:
    """The tokens that a step emitted, as columns. Iterating makes a `SchedulerEvent.Token` from each.

    A step may have a thousand tokens: an object for each would take longer than all other work for the step.

    Attributes:
        requests: The request of each token.
        tokens: The tokens.
        positions: Their indexes in their sequences.
        rows: The rows of the step that yielded them.
    """

    requests: Sequence[PromptRequest]
    tokens: Sequence[int]
    positions: Sequence[int]
    rows: Sequence[int]

    def __len__(self) -> int:
        return len(self.tokens)

    def __iter__(self) -> Iterator[SchedulerEvent.Token]:
        return map(SchedulerEvent.Token, self.requests, self.tokens, self.positions, self.rows)


@dataclass(slots=True)
class StepOutcome:
    """The tokens that a step emitted, and the requests that they ended.

    Attributes:
        tokens: The tokens that it emitted.
        ends: The requests that ended with one of them.
        last_tokens: For each of `ends`, the index of its last token in `tokens`, in ascending order.
    """

    tokens: StepTokens
    ends: Sequence[SchedulerEvent.Completed]
    last_tokens: Sequence[int]

    @property
    def events(self) -> "list[AnyEvent]":
        """The tokens and ends in the order in which they happened: an end comes right after its last token."""
        events: list[AnyEvent] = list(self.tokens)
        for end, index in zip(reversed(self.ends), reversed(self.last_tokens), strict=True):
            events.insert(index + 1, end)
        return events


AnyEvent = SchedulerEvent.Token | SchedulerEvent.Completed | SchedulerEvent.AdmissionRejected
"""An event of the scheduler. Lists of them are in the order in which they happened."""


def _check_range(name: str, value: object, minimum: float, maximum: float) -> None:
    if not is_number(value) or not minimum <= value <= maximum:
        raise RequestRejected(f"{name} must be a number from {minimum:g} to {maximum:g}, not {quoted(value)}")


def _check_integer(name: str, value: object, minimum: int, maximum: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or not minimum <= value <= maximum:
        raise RequestRejected(f"{name} must be an integer from {minimum} to {maximum}, not {quoted(value)}")


def _check_tokens(name: str, tokens: tuple[int, ...], max_tokens: int) -> None:
    """Check a list of tokens with calls of C code only, because this is done for each sequence of a request."""
    if len(tokens) > max_tokens:
        raise RequestRejected(f"{name} must have at most {max_tokens} tokens, not {len(tokens)}")
    if tokens and (set(map(type, tokens)) != {int} or not 0 <= min(tokens) <= max(tokens) <= MAX_POSITIONS):
        raise RequestRejected(f"{name} must have integers from 0 to {MAX_POSITIONS} as tokens")
