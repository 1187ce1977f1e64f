"""Which operation a request is: the key it is reserved by, and the hash that tells it from any other.

The key is `inference:` and the request's id. The hash is SHA-256 (FIPS 180-4) over five fields in this order, each
behind its length in bytes as a big-endian u32:

    logical resource name   "gpu"
    kind                    "inference"
    verb                    "serve"
    schema id               "gpulease.inference.v1"
    payload

and the payload is

    request id (UTF-8) 0x00 model id (UTF-8) 0x00 output length in bytes (u64, big-endian) input (all that is left)

Neither id holds a zero byte, so no two requests have the same payload; and no two lists of fields the same bytes,
because each field says how long it is. `vectors/gateway/operations.json` has examples for other languages.
"""

import hashlib
import struct
from typing import Final

from gpulease.client.errors import InvalidRequest

RESOURCE: Final = "gpu"
KIND: Final = "inference"
VERB: Final = "serve"
SCHEMA_ID: Final = "gpulease.inference.v1"

MAX_ID_BYTES: Final = 200
"""Longest request or model id in UTF-8. Stops keys that no store's index takes, and logs that nobody reads."""

MAX_OUTPUT_WIRE: Final = 2**64 - 1

_LENGTH: Final = struct.Struct(">I")
_OUTPUT_LEN: Final = struct.Struct(">Q")


def operation_key(request_id: str) -> str:
    """What a request is reserved by. Raises InvalidRequest for an id that is none."""
    return f"{KIND}:{checked_id(request_id, 'request id')}"


def operation_hash(request_id: str, model_id: str, output_len: int, input_bytes: bytes) -> bytes:
    """The 32 bytes that tell this operation from any other. Raises InvalidRequest."""
    payload = operation_payload(request_id, model_id, output_len, input_bytes)
    digest = hashlib.sha256()
    for field in (RESOURCE.encode(), KIND.encode(), VERB.encode(), SCHEMA_ID.encode(), payload):
        digest.update(_LENGTH.pack(len(field)))
        digest.update(field)
    return digest.digest()


def operation_payload(request_id: str, model_id: str, output_len: int, input_bytes: bytes) -> bytes:
    """The last of the hashed fields. Raises InvalidRequest."""
    if not 0 < output_len <= MAX_OUTPUT_WIRE:
        raise InvalidRequest(f"an output of {output_len} bytes; at least one is asked for, and a u64 holds the number")
    ids = (checked_id(request_id, "request id").encode(), checked_id(model_id, "model id").encode())
    return b"".join((ids[0], b"\0", ids[1], b"\0", _OUTPUT_LEN.pack(output_len), input_bytes))


def checked_id(text: str, what: str) -> str:
    """An id: 1 to MAX_ID_BYTES bytes of UTF-8 that can all be printed. Raises InvalidRequest."""
    try:
        size = len(text.encode())
    except (UnicodeEncodeError, AttributeError):
        size = 0
    if not 0 < size <= MAX_ID_BYTES or not text.isprintable():
        raise InvalidRequest(f"a {what} has 1 to {MAX_ID_BYTES} bytes of UTF-8, all of them printable characters")
    return text
