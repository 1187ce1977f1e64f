"""Decides by grammars which tokens may come next, so that an answer has the form that its caller requested.

llguidance computes the masks. Its work for a mask is limited, and usually takes about 50 us. It accepts JSON Schema and
context-free grammars, compiles them lazily, and releases the interpreter's lock meanwhile. A grammar is a text in
llguidance's Lark format. It comes from a tenant, so its size and the work for it are limited, and a text process checks
it first.
"""

import asyncio
import hashlib
import json
import re
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Iterable, Mapping
from functools import cache
from math import inf, lcm
from typing import TYPE_CHECKING, Any, Final, TypeVar

import numpy as np
from numpy.typing import NDArray

from gpulease.client.decode.decode_errors import GrammarRefused, LibraryPanicked
from gpulease.client.decode.decode_log import DecodeLog
from gpulease.client.decode.library_errors import panics_caught
from gpulease.client.decode.row_records import mask_words
from gpulease.client.decode.text.tenant_turns import TenantTurns

if TYPE_CHECKING:
    # Needs the extra `decode`, without which a decoder serves tokens.
    from gpulease.client.decode.text.tokenizer import Tokenizer

T = TypeVar("T")

MAX_GRAMMAR_BYTES: Final = 64 << 10
"""Longest grammar in bytes. With the limits below it compiles within about two seconds."""

GRAMMAR_LIMITS: Final[Mapping[str, Any]] = {
    "max_items_in_row": 2000,
    "initial_lexer_fuel": 1_000_000,
    "step_lexer_fuel": 100_000,
    "step_max_items": 50_000,
    "max_lexer_states": 20_000,
    "max_grammar_size": 100_000,
    # An error that contains the parser's state would be longer than the grammar.
    "verbose_errors": False,
}
"""llguidance's limits on a grammar's compilation, on the work for one mask, and on the number of a grammar's states, of
about 2 kB each.
"""

MAX_EXPANDED_ITEMS: Final = 100_000
"""Maximum number of characters of a grammar's regular expressions, with their repetitions written out, and of its
`minLength`s.

If only one text can follow, the library computes the whole text for a mask, and its own limits do not apply. Without
this limit, /a{1001}{1001}{1001}/ would keep a thread busy for 10^9 characters. 10^5 characters take about 0.1 s.
"""

MAX_REMAINDERS: Final = 100_000
"""Maximum of the sum and of the least common multiple of a grammar's `multipleOf`s, without their decimal points.

For each `multipleOf` the library visits every remainder, and every combination if several apply together, before its
own limits apply. Without this limit, `multipleOf` 101, 103, 107 and 109 in one `allOf` would take minutes. 10^5
remainders take about 0.3 s.
"""

WHITESPACE: Final = " ?"
"""The whitespace that may be between the parts of a JSON text: at most one space. Otherwise a model could write spaces
endlessly."""

MASK_THREADS: Final = 4
"""Number of threads that compile grammars and compute masks. One tenant may occupy all but one."""

MAX_GRAMMARS: Final = 64
"""Maximum number of compiled grammars in the cache. Each is cached only for its tenant, so that the duration of a
compilation reveals nothing about other tenants' grammars."""

_COMBINING: Final = frozenset(
    {
        *("allOf", "oneOf", "not", "if", "then", "else", "dependentSchemas", "dependencies"),
        *("unevaluatedProperties", "unevaluatedItems", "$dynamicRef", "$recursiveRef"),
    }
)
"""Keywords by which several schemas describe one object. If each schema were closed, it would forbid the other schemas'
members.
"""

_OF_MEMBERS: Final = frozenset({"anyOf", "patternProperties", "minProperties", "propertyNames", "dependentRequired"})
"""Keywords that, next to `properties`, may refer to members that are not listed there."""

_REF_SIBLINGS: Final = frozenset({"$ref", "$defs", "definitions", "title", "description", "default", "examples"})
"""Keywords that add nothing to a `$ref`."""

_MAPS: Final = frozenset({"properties", "patternProperties", "$defs", "definitions"})
_LISTS: Final = frozenset({"anyOf", "prefixItems", "items"})
_SCHEMAS: Final = frozenset({"items", "additionalItems", "additionalProperties", "contains"})
"""Keywords that contain schemas: as an object's values, as a list, or a single schema."""

_ESCAPED: Final[Mapping[str, str]] = {"/": r"\/", "\n": r"\n", "\\\n": r"\n"}
"""Parts of a regular expression that must be written differently in a grammar."""

_REGEX_LINE: Final = re.compile(r"^\w+: /(.*)/$", re.MULTILINE)
_SCHEMA: Final = re.compile("%json (?={)")
"""Patterns that find a grammar's regular expressions (`regex_rule`) and its schemas (`json_rule`)."""

_REGEX_PART: Final = re.compile(
    r"\\[pPxuU]\{[^}]*\}|\\.|\[\^?\]?|\{\s*(?:(\d+)\s*)?(?:,\s*(?:(\d+)\s*)?)?\}|.",
    re.DOTALL,
)
"""Matches a part of a regular expression: an escape, the beginning of a class, a repetition, or a character.

No two parts of this pattern can match the same spaces, because trying both would take quadratic time.
"""

_VERBOSE: Final = re.compile(r"\(\?[a-zA-Z]*x")
"""Finds the flag that allows comments in a regular expression. Brackets in comments would be misread."""

MAX_ERROR_CHARACTERS: Final = 300
"""Maximum number of characters of the library's message in an error."""

MAX_COMPILE_S: Final = 4.0
"""Seconds of CPU time in which a grammar must compile. For some regular expressions, such as /a?a?a?.../, the library's
time grows with the square of their length, and its own limits would stop it only after a minute."""

_PANIC: Final = "panic: "
"""The beginning of a message with which the library reports that it panicked."""

_TOKEN: Final = re.compile(r"<\[[\d,^ -]*\]>")
"""Finds a grammar's tokens that are written as numbers."""


def json_rule(schema: Mapping[str, Any]) -> str:
    """Return a grammar's rule for the JSON texts that a schema allows, with its objects closed (`closed`)."""
    members = {name: value for name, value in closed(schema).items() if name != "x-guidance"}
    return "%json " + json.dumps(members | {"x-guidance": {"whitespace_pattern": WHITESPACE}})


def regex_rule(regex: str) -> str:
    """Return a grammar's rule for the texts that a regular expression, in Rust's syntax, matches as a whole."""
    # The expression is between slashes on one line, so escape slashes and line ends.
    body = re.sub(r"\\[\s\S]|/|\n", lambda match: _ESCAPED.get(match[0], match[0]), regex)
    return f"/{body}/"


def choice_rule(texts: Iterable[str]) -> str:
    """Return the right side of a grammar's rule that allows exactly these texts."""
    return " | ".join(map(string_literal, texts))


def string_literal(text: str) -> str:
    """Return a text as a string literal of a grammar: a JSON string in ASCII, with the character DEL escaped."""
    return json.dumps(text).replace("\x7f", "\\u007f")


def closed(schema: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a schema that limits objects to the members in their `properties`, unless it allows others.

    In JSON Schema an object may have any further members, and a model might write such members until its tokens are
    used up. vLLM (by xgrammar) and llama.cpp close objects, too. The schema allows every text that the result allows. A
    schema with keywords that could break this rule is returned unchanged.
    """
    # Make a copy, because the template may show the same schema.
    document = json.loads(json.dumps(schema))
    objects: list[dict[str, Any]] = []
    # Use a list instead of recursion, because a tenant's schema may be nested deeply.
    pending: list[Any] = [document]
    while pending:
        part = pending.pop()
        # true and false are schemas, too.
        if not isinstance(part, dict):
            continue
        listed = part.get("properties")
        if part.keys() & _COMBINING or ("$ref" in part and part.keys() - _REF_SIBLINGS):
            return schema
        if isinstance(listed, dict) and "additionalProperties" not in part:
            required = part.get("required", [])
            if part.keys() & _OF_MEMBERS or not isinstance(required, list):
                return schema
            if not all(isinstance(name, str) and name in listed for name in required):
                return schema
            objects.append(part)
        for name, value in part.items():
            if name in _MAPS and isinstance(value, dict):
                pending += value.values()
            elif name in _LISTS and isinstance(value, list):
                pending += value
            elif name in _SCHEMAS:
                pending.append(value)
    for part in objects:
        part["additionalProperties"] = False
    return dict(document)


def check_grammar(text: str) -> None:
    """Compile a grammar within the limits, for a vocabulary of bytes. Call this in a text process, which has limits.

    Raises GrammarRefused, which describes the mistake in the grammar or in its schema, or LibraryPanicked if a bug
    stops the library.
    """
    if len(text.encode(errors="replace")) > MAX_GRAMMAR_BYTES:
        raise GrammarRefused(f"the schema, or the tools' schemas, must have at most {MAX_GRAMMAR_BYTES:,} bytes in all")
    _check_work(text)
    begin_s = time.process_time()
    # The model's tokens are not known here, so replace each token's number by the number of a byte.
    matcher = _library().LLMatcher(_byte_tokenizer(), _TOKEN.sub("<[0]>", text), log_level=0, limits=_limits())
    _check_matcher(matcher)
    if time.process_time() - begin_s > MAX_COMPILE_S:
        raise _refused(f"it takes more than {MAX_COMPILE_S:g} s of CPU time to compile")


def grammar_digest(text: str) -> str:
    """Return the SHA-256 of a grammar, for audit records."""
    return hashlib.sha256(text.encode()).hexdigest()


def grammar_library() -> str:
    """Return the name and version of the library that computes the masks, on which tokens depend."""
    return f"llguidance {_library().get_version()}"


class GrammarMasks:
    """The state of one sequence's grammar. It implements `TokenMasks`.

    Attributes:
        mask: The mask of the next token.
        is_ready: Whether `mask` is the mask of the next token.
        is_stepwise: Always true.
        on_failed: Called if no mask can be computed within the limits, or no token can follow.
    """

    is_stepwise = True

    def __init__(self, grammars: "Grammars", key: tuple[str, str], matcher: Any, mask: NDArray[np.uint32]) -> None:
        self.mask, self.is_ready = mask, True
        self.on_failed: Callable[[GrammarRefused], None] | None = None
        self._grammars, self._key, self._matcher = grammars, key, matcher

    def accept(self, token: int, on_ready: Callable[[], None]) -> None:
        """Process the emitted token, and compute the next mask in a thread."""
        self.is_ready = False

        def done(work: "asyncio.Future[NDArray[np.uint32]]") -> None:
            if work.cancelled():
                return
            error = work.exception()
            if error is None:
                self.mask, self.is_ready = work.result(), True
                on_ready()
                return
            # Copies of a matcher share the library's lexer, which may be full or broken, so compile the grammar again
            # for others.
            self._grammars.forget(self._key)
            if self.on_failed is not None:
                assert isinstance(error, GrammarRefused)
                self.on_failed(error)

        matcher, words = self._matcher, self._grammars.words
        tenant_id, _ = self._key
        self._grammars.run(tenant_id, lambda: _next_mask(matcher, token, words)).add_done_callback(done)

    def fork(self) -> "GrammarMasks":
        """Return a copy for another sequence. No token may have been accepted yet."""
        return GrammarMasks(self._grammars, self._key, self._matcher.deep_copy(), self.mask)


class Grammars:
    """Compiles grammars for a decoder, and computes their masks during its steps, in threads. Tenants take turns.

    Attributes:
        words: Number of words of a mask.
    """

    def __init__(
        self,
        tokenizer: "Callable[[], Awaitable[Tokenizer]]",
        vocabulary: int,
        end_tokens: frozenset[int],
        log: DecodeLog,
    ) -> None:
        """Prepare to compile.

        Args:
            tokenizer: Returns the model's tokenizer.
            vocabulary: Number of the model's tokens.
            end_tokens: The model's end tokens.
            log: Receives the library's failures.
        """
        self._log = log
        self._tokenizer, self._vocabulary, self._end_tokens = tokenizer, vocabulary, sorted(end_tokens)
        # The library's masks may be slightly longer than the vocabulary.
        self.words = mask_words(vocabulary)
        self._turns = TenantTurns[Callable[[], None]](MASK_THREADS - 1)
        self._busy = 0
        self._library: asyncio.Task[Any] | None = None
        self._compiled: OrderedDict[tuple[str, str], GrammarMasks] = OrderedDict()

    async def compile(self, tenant_id: str, text: str) -> GrammarMasks:
        """Return the initial state of a grammar that `check_grammar` accepted. Each sequence needs a separate one.

        Raises GrammarRefused for a grammar that the model's tokens can't follow within the limits, ModelRejected for a
        model without a tokenizer.
        """
        key = tenant_id, text
        if (grammar := self._compiled.get(key)) is not None:
            self._compiled.move_to_end(key)
            return grammar.fork()
        if self._library is None or (self._library.done() and self._library.exception() is not None):
            self._library = asyncio.create_task(self._load())
        # All callers share one load, so a caller that is cancelled must not cancel it.
        library = await asyncio.shield(self._library)

        words = self.words

        def work() -> tuple[Any, NDArray[np.uint32]]:
            matcher = _library().LLMatcher(library, text, log_level=0, limits=_limits())
            return matcher, _mask(matcher, words)

        masks = GrammarMasks(self, key, *await self.run(tenant_id, work))
        self._compiled[key] = masks
        if len(self._compiled) > MAX_GRAMMARS:
            self._compiled.popitem(last=False)
        return masks.fork()

    def run(self, tenant_id: str, work: Callable[[], T]) -> "asyncio.Future[T]":
        """Run the library's work in a thread, when it is the tenant's turn. Returns a future of the result.

        The future's error is always GrammarRefused. If the library fails in another way, the log has the reason.
        """
        loop = asyncio.get_running_loop()
        outcome: asyncio.Future[T] = loop.create_future()

        def begin() -> None:
            doing = loop.run_in_executor(None, _guarded, work)
            doing.add_done_callback(done)

        def done(doing: "asyncio.Future[T]") -> None:
            self._busy -= 1
            self._turns.done(tenant_id)
            self._begin()
            if outcome.cancelled() or doing.cancelled():
                outcome.cancel()
            elif isinstance(error := doing.exception(), GrammarRefused):
                outcome.set_exception(error)
            elif error is not None:
                self._log.failure("grammar_failed", error, tenant=tenant_id)
                outcome.set_exception(_refused("the library that computes masks failed; the server's log has details"))
            else:
                outcome.set_result(doing.result())

        self._turns.add(tenant_id, begin)
        self._begin()
        return outcome

    def forget(self, key: tuple[str, str]) -> None:
        """Compile a tenant's grammar again for its next request."""
        self._compiled.pop(key, None)

    async def stop(self) -> None:
        """Drop waiting jobs. Jobs in progress end soon, because their work is limited."""
        self._turns.drain()
        if self._library is not None:
            self._library.cancel()
            await asyncio.gather(self._library, return_exceptions=True)
        self._compiled.clear()

    def _begin(self) -> None:
        while self._busy < MASK_THREADS and (begin := self._turns.take()) is not None:
            self._busy += 1
            begin()

    async def _load(self) -> Any:
        """Return the tokenizer in the library's form, a tree with the bytes of every token."""
        tokenizer = await self._tokenizer()
        return await asyncio.to_thread(
            _guarded, lambda: _library_tokenizer(tokenizer, self._vocabulary, self._end_tokens)
        )


_NOTHING_FITS: Final = "NoExtensionBias"
"""The library's error if no token can come first."""

_SCHEMA_ERROR: Final = re.compile(
    r"at \d+\(\d+\): failed to compile JSON schema: (.*?)\s*(?:\n +\d+ \| .*)?", re.DOTALL
)
"""The library's error of a JSON Schema: its place in the grammar, the reason, and lines of the grammar."""

_SCHEMA_REASONS: Final = (
    (re.compile(r"Unimplemented keys: \[(.*)\]"), r"the JSON schema has keywords that are not supported: \1"),
    (re.compile(r"Unsatisfiable schema: (.*)", re.DOTALL), r"the JSON schema allows no value: \1"),
    (re.compile(r"Pointer '(.*)' does not exist"), r"the JSON schema has no #\1, to which a $ref refers"),
    (re.compile(r"Resource '(.*)' is not present in a registry.*"), r"the JSON schema refers to \1, outside of itself"),
    (re.compile(r"Unknown format: (.*)"), r"the JSON schema has a format that is not supported: \1"),
    (re.compile(r"Invalid type: (.*)"), r"the JSON schema has an unknown type: \1"),
    (re.compile(r"Expected f64 for '(.*)', got (.*)", re.DOTALL), r"the JSON schema's \1 must be a number, not \2"),
    (re.compile(r"Expected (.*) for '(.*)', got (.*)", re.DOTALL), r"the JSON schema's \2 must be \1, not \3"),
)
"""Reasons of the library for refusing a JSON Schema, and what callers read instead."""


def _check_work(text: str) -> None:
    """Raise GrammarRefused for a grammar that causes much work outside llguidance's own limits."""
    expanded: float = sum(expanded_items(match[1]) for match in _REGEX_LINE.finditer(text))
    remainders, multiple = 0, 1
    decoder = json.JSONDecoder()
    for match in _SCHEMA.finditer(text):
        try:
            pending: list[Any] = [decoder.raw_decode(text, match.end())[0]]
        except (ValueError, RecursionError):
            # This is part of a text and not a schema, or a schema that the library refuses.
            continue
        # Visit the values of all keywords, because a `$ref` may refer to any of them.
        while pending:
            part = pending.pop()
            if isinstance(part, list):
                pending += part
            if not isinstance(part, dict):
                continue
            pending += part.values()
            expressions = [part.get("pattern")]
            if isinstance(listed := part.get("patternProperties"), dict):
                expressions += listed
            expanded += sum(expanded_items(expression) for expression in expressions if isinstance(expression, str))
            if isinstance(length := part.get("minLength"), int | float):
                expanded += max(length, 0)
            divisor = part.get("multipleOf")
            # In Python a boolean is an int. The library refuses it.
            if isinstance(divisor, int | float) and not isinstance(divisor, bool) and 0 < abs(divisor) < inf:
                coefficient = _coefficient(abs(divisor))
                remainders += coefficient
                multiple = lcm(multiple, coefficient)
            if max(remainders, multiple) > MAX_REMAINDERS:
                raise _refused(
                    "the sum and the least common multiple of all multipleOf, without decimal points, must be at most "
                    f"{MAX_REMAINDERS:,}"
                )
    if expanded > MAX_EXPANDED_ITEMS:
        raise _refused(
            "regular expressions with their repetitions written out, and minLength, must have at most "
            f"{MAX_EXPANDED_ITEMS:,} characters in all"
        )


def expanded_items(regex: str, *, is_least: bool = False) -> float:
    """Return the number of characters of a regular expression with its repetitions written out; inf beyond the limit.

    With `is_least`, count the minimum of each repetition, and the longest alternative. Any beginning of a match can
    then be completed with at most this many characters.

    The syntax is as in Rust's crate regex. For an invalid expression the result is arbitrary, because the library
    refuses it.
    """
    if _VERBOSE.search(regex):
        raise _refused("a regular expression must not have the flag x")
    # For each open group, from the outermost on, `outer` has the number of characters before it, and of the longest
    # alternative so far in the group around it. `total` counts the characters of the current group, and `last` the
    # characters of the part that a repetition would repeat.
    outer: list[tuple[int, int]] = []
    total = last = depth = longest = 0
    for match in _REGEX_PART.finditer(regex):
        part = match[0]
        if part[0] == "[":
            depth += 1
        elif depth:
            # This is inside a character class, which counts as one character.
            depth -= part == "]"
        if depth:
            last = 0
            continue
        if part == "(":
            outer.append((total, longest))
            total = last = longest = 0
        elif part == ")" and outer:
            last = max(longest, total)
            before, longest = outer.pop()
            total = before + last
        elif part == "|" and is_least:
            longest, total, last = max(longest, total), 0, 0
        elif match[1] or match[2]:
            times = match[1] or "1" if is_least else match[2] or match[1]
            if len(times.lstrip("0")) > len(str(MAX_EXPANDED_ITEMS)):
                return inf
            extra = last * (max(int(times), 1) - 1)
            total, last = total + extra, last + extra
        elif part not in "*+?":
            total, last = total + 1, 1
        if total > MAX_EXPANDED_ITEMS:
            return inf
    return max(total, longest) + sum(before for before, _ in outer)


def _coefficient(divisor: float) -> int:
    """Return a divisor's digits as an integer, without its decimal point."""
    if isinstance(divisor, int) or divisor.is_integer():
        return int(divisor)
    return int(repr(divisor).split("e")[0].replace(".", ""))


def _library_tokenizer(tokenizer: "Tokenizer", vocabulary: int, end_tokens: list[int]) -> Any:
    library, special = _library(), tokenizer.special_tokens
    # Use the names of special tokens, which have no text. No text of a grammar matches them.
    tokens = [special.get(token, "").encode() or tokenizer.bytes_of(token) for token in range(vocabulary)]
    wrapped = library.TokenizerWrapper(_Vocabulary(tokenizer, tokens, sorted(special), end_tokens))
    return library.LLTokenizer(wrapped, n_vocab=vocabulary, eos_token=end_tokens or None)


class _Vocabulary:
    """A tokenizer in the form that llguidance's TokenizerWrapper expects."""

    bos_token_id = None

    def __init__(
        self, tokenizer: "Tokenizer", tokens: list[bytes], special_token_ids: list[int], end_tokens: list[int]
    ) -> None:
        self.tokens, self.special_token_ids = tokens, special_token_ids
        self.eos_token_id = end_tokens[0] if end_tokens else 0
        self._tokenizer = tokenizer

    def __call__(self, text: bytes | str) -> list[int]:
        decoded = text.decode(errors="replace") if isinstance(text, bytes) else text
        return self._tokenizer.encode(decoded, begins=False)


def _next_mask(matcher: Any, token: int, words: int) -> NDArray[np.uint32]:
    # The last token of a sequence that has ended may not match the grammar.
    matcher.consume_token(token)
    return _mask(matcher, words)


def _mask(matcher: Any, words: int) -> NDArray[np.uint32]:
    _check_matcher(matcher)
    mask: NDArray[np.uint32] = np.frombuffer(matcher.compute_bitmask(), np.uint32)[:words]
    # If a limit is exceeded, the library still returns a mask, but a meaningless one.
    _check_matcher(matcher)
    if not mask.any():
        raise _refused("no token can follow")
    return mask


def _check_matcher(matcher: Any) -> None:
    """Raise GrammarRefused if a grammar can no longer be followed, LibraryPanicked if the library has panicked in it.

    The library catches panics in most calls. The matcher then keeps the message, and refuses all later calls.
    """
    if not matcher.is_error():
        return
    error: str = matcher.get_error()
    if error.startswith(_PANIC):
        # The rest is a backtrace of some kilobytes.
        raise LibraryPanicked(error.splitlines()[0])
    raise _refused(_in_our_words(error))


def _in_our_words(error: str) -> str:
    """Return the library's reason for a caller: without the grammar that was made here from the caller's schema."""
    if error.startswith(_NOTHING_FITS):
        return "no text can match it, for example because a $ref leads back to itself"
    located = _SCHEMA_ERROR.fullmatch(error)
    if located is None:
        return error
    for pattern, words in _SCHEMA_REASONS:
        if (reason := pattern.fullmatch(located[1])) is not None:
            return reason.expand(words)
    return f"the JSON schema: {located[1]}"


def _guarded(work: Callable[[], T]) -> T:
    with panics_caught():
        return work()


def _refused(reason: str) -> GrammarRefused:
    text = " ".join(reason.replace("<non-verbose/>", "").split())[:MAX_ERROR_CHARACTERS]
    return GrammarRefused(f"the schema or grammar can't be followed: {text}")


@cache
def _byte_tokenizer() -> Any:
    """The library's own tokenizer, in which each byte is a token."""
    return _library().LLTokenizer("byte")


@cache
def _limits() -> Any:
    return _library().LLParserLimits(**GRAMMAR_LIMITS)


def _library() -> Any:
    # Import this late, because it needs the extra `decode`, and most requests have no grammar.
    import llguidance

    return llguidance
