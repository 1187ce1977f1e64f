"""The messages between the decoder's process and a front, as frames of msgpack on a socket pair.

A front is a process that serves HTTP. An attacker may have taken it over, so the decoder's process limits the size of
frames, and refuses frames that do not match a message's declaration.

    front                                   decoder's process
      <- Welcome                              the facts that a front needs
      -> FrontReady                           the front accepts connections
      -> PlaceRequest(number, tenant)         <- Placed | FrontRefused
      -> Begin(number, body, ...)             <- [Loading] RequestSubmitted | FrontRefused
                                              <- Step(...)    tokens and ends, one message per step
      -> Cancel(number, sequence), Drop(number)

The front gives each HTTP request a `number` that it uses only once. Drop ends a request with all of its sequences.
"""

import asyncio
from typing import Final, TypeVar

import msgspec

from gpulease.client.decode.openai.completion_intake import MAX_BODY_BYTES
from gpulease.client.decode.supervisor.generation import EmittedParts
from gpulease.client.errors import GpuLeaseError

MAX_FRAME_BYTES: Final = MAX_BODY_BYTES + (64 << 10)
"""Maximum bytes of a frame from a front: room for the largest body and the rest of its message."""

MAX_STEP_BYTES: Final = 256 << 20
"""Maximum bytes of a frame to a front: room for the scores of a long prompt with all ranks."""

_LENGTH_BYTES: Final = 4


class FrontProtocolError(GpuLeaseError):
    """A frame between a front and the server was too long, or was no known message."""

    default_hint = "Restart the server: its processes are of different versions, or a front was taken over"


class PlaceRequest(msgspec.Struct, tag="take_place", frozen=True):
    """Asks for a place for a tenant's request, before the front reads the request's body."""

    number: int
    tenant: str


class Begin(msgspec.Struct, tag="begin", frozen=True):
    """The body of a request that has a place.

    Attributes:
        number: The request.
        body: The body.
        is_chat: Whether it is the body of a chat completion.
        request_id: The request's id.
        model: On a server with several models, the model that the body names; the front has parsed the body.
        is_stream: On such a server, whether the body asks for a stream.
    """

    number: int
    body: bytes
    is_chat: bool
    request_id: str
    model: str = ""
    is_stream: bool = False


class Cancel(msgspec.Struct, tag="cancel", frozen=True):
    """The front needs no more tokens of a sequence."""

    number: int
    sequence: int


class Drop(msgspec.Struct, tag="drop", frozen=True):
    """A request has ended, with or without a reply. Its place is released, and its other sequences are cancelled."""

    number: int


class FrontReady(msgspec.Struct, tag="ready", frozen=True):
    """The front accepts connections. The server reports that it is ready when all fronts have sent this."""


class Welcome(msgspec.Struct, tag="welcome", frozen=True):
    """The facts that a front needs.

    Attributes:
        model_path: The path of the only model, for its tokenizer; "" on a server with several models, where
            `RequestSubmitted` has the path.
        tenant_keys: The sha256 of each tenant's key, by tenant.
        host_names: Further names of the server.
        cors_origins: Origins of web pages that may call the server from a browser.
        stop_s: Seconds for streams to finish when the server stops.
        inner_path: The Unix socket of the decoder's process, which serves all other HTTP paths.
    """

    model_path: str
    tenant_keys: dict[str, bytes]
    host_names: tuple[str, ...]
    cors_origins: tuple[str, ...]
    stop_s: float
    inner_path: str = ""


class Placed(msgspec.Struct, tag="placed", frozen=True):
    """The request has a place among its tenant's requests, so the front may read its body."""

    number: int


class Loading(msgspec.Struct, tag="loading", frozen=True):
    """The model of a streaming request is being loaded. Meanwhile, the front sends comments in the stream."""

    number: int


class FrontRefused(msgspec.Struct, tag="refused", frozen=True):
    """The reply to a request that was refused: the parts of an ApiError."""

    number: int
    reply: tuple[int, str, str, str | None, float | None]


class Sequence(msgspec.Struct, frozen=True, array_like=True):
    """A sequence of a request.

    Attributes:
        prompt: The index of its prompt.
        seed: The seed of its sampling.
        max_tokens: Maximum number of tokens that it may emit.
    """

    prompt: int
    seed: int
    max_tokens: int


class RequestSubmitted(msgspec.Struct, tag="begun", frozen=True):
    """A request was submitted.

    Attributes:
        number: The request.
        answer: The text process's answer for the body, packed by `text_jobs.packed`.
        sequences: Its sequences.
        end_tokens: The tokens that end the sequences.
        model: The model's name.
        model_path: The path of the model's files, for its tokenizer.
    """

    number: int
    answer: bytes
    sequences: tuple[Sequence, ...]
    end_tokens: tuple[int, ...]
    model: str
    model_path: str


class SequenceTokens(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Tokens of a sequence, each as the tuple `Emitted.parts`."""

    number: int
    sequence: int
    tokens: list[EmittedParts]


class End(msgspec.Struct, frozen=True, array_like=True):
    """The end of a sequence: the reason, and the parts of an ApiError if it ended with an error."""

    number: int
    sequence: int
    reason: str | None
    error: tuple[int, str, str, str | None, float | None] | None


class Reuse(msgspec.Struct, frozen=True, array_like=True):
    """How many tokens of a sequence's prompt were reused. Sent with the first token, unless the number is 0."""

    number: int
    sequence: int
    tokens: int


class Step(msgspec.Struct, tag="step", frozen=True):
    """The results of a step for a front's requests: numbers of reused tokens, scores of prompts, tokens, and ends."""

    reuses: list[Reuse]
    scores: list[SequenceTokens]
    tokens: list[SequenceTokens]
    ends: list[End]


FromFront = PlaceRequest | Begin | Cancel | Drop | FrontReady
ToFront = Welcome | Placed | Loading | FrontRefused | RequestSubmitted | Step

Message = TypeVar("Message")
_ENCODER: Final = msgspec.msgpack.Encoder()
_FROM_FRONT: Final = msgspec.msgpack.Decoder(FromFront)
_TO_FRONT: Final = msgspec.msgpack.Decoder(ToFront)


def frame(message: FromFront | ToFront) -> bytes:
    """Return the bytes of a frame: the length of the message, four bytes big-endian, then the message as msgpack."""
    data = _ENCODER.encode(message)
    return len(data).to_bytes(_LENGTH_BYTES, "big") + data


async def read_from_front(reader: asyncio.StreamReader) -> FromFront | None:
    """Return the next message of a front; None at the end of its stream. Raises FrontProtocolError."""
    return await _read(reader, _FROM_FRONT, MAX_FRAME_BYTES)


async def read_to_front(reader: asyncio.StreamReader) -> ToFront | None:
    """Return the next message of the decoder's process; None at the end of its stream. Raises FrontProtocolError."""
    return await _read(reader, _TO_FRONT, MAX_STEP_BYTES)


async def _read(
    reader: asyncio.StreamReader, decoder: "msgspec.msgpack.Decoder[Message]", most_bytes: int
) -> Message | None:
    try:
        size = int.from_bytes(await reader.readexactly(_LENGTH_BYTES), "big")
        # Check the size before allocating memory for the frame.
        if size > most_bytes:
            raise FrontProtocolError(f"a frame of {size:,} bytes is longer than {most_bytes:,}")
        return decoder.decode(await reader.readexactly(size))
    except (asyncio.IncompleteReadError, ConnectionError):
        return None
    except msgspec.MsgspecError as error:
        raise FrontProtocolError(f"a frame is not a message: {error}") from None
