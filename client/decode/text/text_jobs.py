"""Jobs for the processes that read texts: their messages and their limits.

A job and its answer are each a frame: a length of 4 bytes, little-endian, then msgpack. Answers are not pickles,
because a template that escaped from its sandbox must not be able to run code in the server.
"""

import struct
from array import array
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, Final

import msgpack

from gpulease.client.decode.decode_errors import AdmissionReason, AdmissionRefused, RequestRejected

if TYPE_CHECKING:
    # Needs the extra `decode`, which the requesting process may not have loaded.
    from gpulease.client.decode.text.prompt_reader import PromptReader

Job = Callable[..., dict[str, Any]]
"""A module's function that does a job: it takes a PromptReader and named arguments, and returns the answer."""

LENGTH: Final = struct.Struct("<I")

MAX_JOB_BYTES: Final = 24 << 20
"""Maximum size of a job in bytes: the longest text or chat, and its names. This limits the memory of waiting jobs."""

MAX_ANSWER_BYTES: Final = 16 << 20
"""Maximum size of an answer in bytes: the tokens of the largest context, 4 bytes each, and the other results. This
limits the memory that a worker out of control can take in the server."""

NO_TOKEN: Final = -1
"""Replaces a token id that no vocabulary can contain. The scheduler refuses it."""

_TOKENS: Final = range(1 << 31)


@dataclass(frozen=True, slots=True)
class TextLimits:
    """Limits of one job. Raises ValueError for a limit that is not above 0.

    Attributes:
        memory_bytes: Bytes that a job may use in addition to the tokenizer's memory. A prompt of a million tokens uses
            about 400 MB.
        processor_s: Whole seconds of CPU time. 4 MiB of text take about five.
        wall_s: Seconds of wall time, which passes faster than CPU time on a busy host.
    """

    memory_bytes: int = 512 << 20
    processor_s: int = 10
    wall_s: float = 60.0

    def __post_init__(self) -> None:
        for limit in fields(self):
            if not getattr(self, limit.name) > 0:
                raise ValueError(f"{limit.name} must be a number above 0, not {getattr(self, limit.name)}")


def read_text(reader: "PromptReader", text: str) -> dict[str, Any]:
    """Job for a text prompt: return its tokens, packed, by `PromptReader.read_text`."""
    return {"tokens": packed_tokens(reader.read_text(text))}


def read_chat(reader: "PromptReader", messages: list[Any], variables: dict[str, Any]) -> dict[str, Any]:
    """Job for a chat: return the tokens of its prompt, packed, by `PromptReader.read_chat`."""
    return {"tokens": packed_tokens(reader.read_chat(messages, variables))}


def packed_tokens(tokens: Iterable[int]) -> bytes:
    """Return tokens in an answer's format, i32. Ids that do not fit become NO_TOKEN."""
    # Every vocabulary fits into i32, which the scheduler's records use, too.
    return array("i", [token if token in _TOKENS else NO_TOKEN for token in tokens]).tobytes()


def unpacked_tokens(data: bytes) -> tuple[int, ...]:
    """Return the tokens that `packed_tokens` packed."""
    return tuple(array("i", data))


def packed(value: Any) -> bytes:
    """Return a value as msgpack. Raises TypeError, ValueError or OverflowError if msgpack can't represent it."""
    # JSON allows unpaired surrogates, so a tenant's text may contain them; the tokenizer refuses them later.
    data: bytes = msgpack.packb(value, unicode_errors="surrogatepass")
    return data


def unpacked(data: bytes) -> Any:
    """Return the value that `packed` packed. Raises ValueError."""
    return msgpack.unpackb(data, unicode_errors="surrogatepass")


def framed(message: Mapping[str, Any]) -> bytes:
    """Return a job or an answer as a frame. Raises the errors of `packed`."""
    data = packed(message)
    return LENGTH.pack(len(data)) + data


def refusal(error: RequestRejected) -> dict[str, Any]:
    """Return the answer that reports the refusal of a text."""
    # The reason is "" for a plain RequestRejected.
    text, reason = error.message, ""
    if isinstance(error, AdmissionRefused):
        text, reason = error.detail, error.reason.value
    return {"refused": text, "hint": error.hint, "reason": reason, "parameter": error.parameter}


def refused(answer: Mapping[str, Any]) -> RequestRejected:
    """Return the error that `refusal` packed, for the server to raise."""
    text, hint, reason, parameter = (str(answer[name]) for name in ("refused", "hint", "reason", "parameter"))
    if not reason:
        return RequestRejected(text, hint, parameter=parameter)
    error = AdmissionRefused(AdmissionReason(reason), text, None)
    error.parameter = parameter
    return error
