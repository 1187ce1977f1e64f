"""Jobs for the processes that read texts: what is asked, what is answered, and the limits under which it is done.

A job and its answer are each a frame: their length, 4 bytes, little-endian, then msgpack. Answers are not pickles: a
template that got out of its sandbox must not be able to run anything in the server.
"""

import struct
from array import array
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, Final

import msgpack

from gpulease.client.decode.decode_errors import AdmissionRefused, RequestRejected
from gpulease.client.decode.decode_requests import AdmissionReason

if TYPE_CHECKING:
    # Needs the extra `decode`, which the process that asks may have no use for yet.
    from gpulease.client.decode.text.prompt_reader import PromptReader

Job = Callable[..., dict[str, Any]]
"""A function of a module that does a job: takes a PromptReader and arguments by name, returns the answer's members."""

LENGTH: Final = struct.Struct("<I")

MAX_JOB_BYTES: Final = 24 << 20
"""Most bytes of a job: of the longest text or chat, and the names in it. Stops jobs that wait from filling memory."""

MAX_ANSWER_BYTES: Final = 16 << 20
"""Most bytes of an answer: the tokens of the largest context, 4 bytes each, and what else was read. Stops a process
that runs wild from filling the server's memory."""

NO_TOKEN: Final = -1
"""Stands for a token that no vocabulary has; the scheduler refuses it."""

_TOKENS: Final = range(1 << 31)


@dataclass(frozen=True, slots=True)
class TextLimits:
    """Limits of one job. Raises ValueError for one that is not above 0.

    Attributes:
        memory_bytes: Memory that it may take in addition to the tokenizer's own. A prompt of a million tokens takes
            some 400 MB.
        processor_s: Seconds of a processor, in whole ones. 4 MiB of text take some five.
        wall_s: Seconds that it may take on a host that is busy.
    """

    memory_bytes: int = 512 << 20
    processor_s: int = 10
    wall_s: float = 60.0

    def __post_init__(self) -> None:
        for limit in fields(self):
            if not getattr(self, limit.name) > 0:
                raise ValueError(f"{limit.name} must be a number above 0, not {getattr(self, limit.name)}")


def read_text(reader: "PromptReader", text: str) -> dict[str, Any]:
    """Do the job `PromptReader.read_text`."""
    return {"tokens": packed_tokens(reader.read_text(text))}


def read_chat(reader: "PromptReader", messages: list[Any], variables: dict[str, Any]) -> dict[str, Any]:
    """Do the job `PromptReader.read_chat`."""
    return {"tokens": packed_tokens(reader.read_chat(messages, variables))}


def packed_tokens(tokens: Iterable[int]) -> bytes:
    """Return tokens as an answer has them; those that no vocabulary has become NO_TOKEN."""
    return array("i", [token if token in _TOKENS else NO_TOKEN for token in tokens]).tobytes()


def unpacked_tokens(data: bytes) -> tuple[int, ...]:
    """Return an answer's tokens."""
    return tuple(array("i", data))


def packed(value: Any) -> bytes:
    """Return a value as bytes. Raises TypeError, ValueError, OverflowError for what msgpack can't say."""
    data: bytes = msgpack.packb(value, unicode_errors="surrogatepass")
    return data


def unpacked(data: bytes) -> Any:
    """Return the value of which `packed` made bytes. Raises ValueError."""
    return msgpack.unpackb(data, unicode_errors="surrogatepass")


def framed(message: Mapping[str, Any]) -> bytes:
    """Return a job or an answer as a frame. Raises as `packed` does."""
    data = packed(message)
    return LENGTH.pack(len(data)) + data


def refusal(error: RequestRejected) -> dict[str, Any]:
    """Return the answer that says why a text is refused."""
    reason = error.reason.value if isinstance(error, AdmissionRefused) else ""
    return {"refused": error.message.removeprefix(f"{reason}: "), "hint": error.hint, "reason": reason}


def refused(answer: Mapping[str, Any]) -> RequestRejected:
    """Return the error of which `refusal` made an answer."""
    text, hint, reason = (str(answer[name]) for name in ("refused", "hint", "reason"))
    return AdmissionRefused(AdmissionReason(reason), text, None) if reason else RequestRejected(text, hint)
