"""An inference request, its response, the kernel that computes it, and its outcome as stored bytes."""

import json
import math
import struct
from dataclasses import dataclass
from typing import Final

from gpulease.client.errors import InvalidRequest
from gpulease.client.serve.gateway.gateway_errors import OperationFailed
from gpulease.client.serve.gateway.ledger import checked_id, operation_hash, operation_key
from gpulease.protocol.lease_ids import LeaseId, lease_id_of

MAX_INPUT_BYTES: Final = 16 << 20
"""Largest input, so that one request can't fill the gateway's memory."""

MAX_OUTPUT_BYTES: Final = 16 << 20
"""Largest output. The idempotency store keeps a copy of each output."""

MAX_LEASE_S: Final = 300.0
"""Longest lease of one request in seconds: the longest life of a grant, because the grant must last as long as the
lease."""

MAX_THREADS: Final = 1024
"""Maximum number of threads in a block (CUDA C++ Programming Guide, compute capabilities)."""

DEFAULT_THREADS: Final = 256
DEFAULT_BYTES_PER_THREAD: Final = 4

MAX_MESSAGE_CHARS: Final = 2000
"""Maximum number of characters of an error's text that are kept, so that a compiler's log can't fill the store."""

_HEAD_BYTES: Final = struct.Struct(">I")


@dataclass(frozen=True, slots=True)
class InferenceRequest:
    """An inference request. The first four attributes define the computation; the others define how it is executed.

    Attributes:
        request_id: Two requests with the same id are the same request.
        model_id: The model.
        input: The model's input.
        output_len: Number of bytes of output.
        min_vram: Bytes of device memory that its lease needs.
        lease_ttl_secs: Duration of its lease in seconds. The computation ends with the lease.
        audience: The audience of the grant, as `my_audience()` returns it; None for this program's own user.
        token_nonce: A number of 128 bits that no other grant of the lease has; 0: the daemon chooses one.
        now_secs: The caller's date in seconds since 1970. A grant that expires before this date is refused.
    """

    request_id: str
    model_id: str
    input: bytes
    output_len: int
    min_vram: int
    lease_ttl_secs: float
    audience: bytes | None
    token_nonce: int
    now_secs: float

    def check(self) -> None:
        """Raise InvalidRequest if no model could serve the request."""
        # The ids become parts of the store's key and of the hash.
        checked_id(self.request_id, "request id")
        checked_id(self.model_id, "model id")
        if len(self.input) > MAX_INPUT_BYTES:
            raise InvalidRequest(f"the input must have at most {MAX_INPUT_BYTES} bytes, not {len(self.input)}")
        if not 0 < self.output_len <= MAX_OUTPUT_BYTES:
            raise InvalidRequest(f"the output must have 1 to {MAX_OUTPUT_BYTES} bytes, not {self.output_len}")
        if not 0 < self.lease_ttl_secs <= MAX_LEASE_S:
            raise InvalidRequest(f"a request's lease must have at most {MAX_LEASE_S:g} s, not {self.lease_ttl_secs}")
        if not math.isfinite(self.now_secs):
            raise InvalidRequest(f"the date must be a time in seconds, not {self.now_secs}")

    def key(self) -> str:
        """Return the key under which a store reserves the request."""
        return operation_key(self.request_id)

    def operation(self) -> bytes:
        """Return the hash that identifies the operation."""
        return operation_hash(self.request_id, self.model_id, self.output_len, self.input)


BUFFERS: Final = ("in", "out", "inout")
"""Arguments that are memory: the input; the output, zeroed; or one buffer that begins with the input, is zeroed after
it, and is read from its start as the output."""

LENGTHS: Final = ("input_len:u32", "input_len:u64", "output_len:u32", "output_len:u64")
"""Arguments that are sizes in bytes, as u32 or u64."""

DEFAULT_ARGUMENTS: Final = ("in", "input_len:u64", "out", "output_len:u64")


@dataclass(frozen=True, slots=True)
class InferenceKernel:
    """A model's kernel, by default `name(const void *input, u64 input_bytes, void *output, u64 output_bytes)`.

    There is at least one thread for each `bytes_per_thread` bytes of output, in blocks of one dimension. There may be
    more threads than that, so the kernel must check the output's length.

    Attributes:
        arguments: The kernel's arguments in order, each of BUFFERS or LENGTHS.
    """

    name: str
    threads_per_block: int = DEFAULT_THREADS
    bytes_per_thread: int = DEFAULT_BYTES_PER_THREAD
    arguments: tuple[str, ...] = DEFAULT_ARGUMENTS

    def __post_init__(self) -> None:
        if not 0 < self.threads_per_block <= MAX_THREADS or self.bytes_per_thread < 1:
            raise InvalidRequest(
                f"kernel {self.name}: a block must have 1 to {MAX_THREADS} threads, and each thread must "
                "compute at least one byte"
            )
        known_names = BUFFERS + LENGTHS
        # Settings are written by people, so name the first wrong argument and all allowed ones.
        if unknown := [argument for argument in self.arguments if argument not in known_names]:
            raise InvalidRequest(
                f"kernel {self.name}: arguments: {unknown[0]!r} must be one of {', '.join(known_names)}"
            )
        if len(set(self.arguments)) != len(self.arguments):
            raise InvalidRequest(f"kernel {self.name}: arguments: each must occur only once")
        # A kernel needs an input and an output: separate ones, or one buffer for both.
        if sorted(argument for argument in self.arguments if argument in BUFFERS) not in (["in", "out"], ["inout"]):
            raise InvalidRequest(f'kernel {self.name}: arguments must contain "in" and "out", or only "inout"')

    @property
    def is_in_place(self) -> bool:
        """Whether one buffer holds both the input and the output."""
        return "inout" in self.arguments

    def blocks(self, output_bytes: int) -> int:
        """Return the number of blocks that compute an output of `output_bytes`, rounded up."""
        # Rounded up, so the last block may have threads beyond the output.
        return -(-output_bytes // (self.threads_per_block * self.bytes_per_thread))


@dataclass(frozen=True, slots=True)
class InferenceResponse:
    """The response to a request that succeeded.

    Attributes:
        request_id: The request.
        lease_id: The lease on which the request ran. It has ended.
        token_expires_at_unix_secs: The latest time at which this request's token expires, by the daemon's wall clock.
        output: The model's output.
        is_replayed: Whether an earlier request with the same id computed this response.
    """

    request_id: str
    lease_id: LeaseId
    token_expires_at_unix_secs: int
    output: bytes
    is_replayed: bool = False


def response_to_outcome(response: InferenceResponse) -> bytes:
    """Encode a response as an outcome: the length of a JSON head (u32, big-endian), the head, the output."""
    head = {"lease_id": str(response.lease_id), "token_expires_at": response.token_expires_at_unix_secs}
    return _outcome({"version": 1, "ok": head}, response.output)


def failure_to_outcome(error: Exception) -> bytes:
    """Encode as an outcome a failure that followed `start`, the record that the kernel may be launched."""
    # Store only the error's class and text, which are enough for later requests to raise the same error.
    head = {"kind": type(error).__name__, "message": str(error)[:MAX_MESSAGE_CHARS]}
    return _outcome({"version": 1, "failed": head}, b"")


def outcome_to_response(request_id: str, outcome: bytes) -> InferenceResponse:
    """Decode an outcome. Raises OperationFailed if it is a failure."""
    # The output follows the head as raw bytes: base64 in the JSON would take a third more room.
    (size,) = _HEAD_BYTES.unpack_from(outcome)
    head = json.loads(outcome[_HEAD_BYTES.size : _HEAD_BYTES.size + size])
    # A failure is a final outcome, too: raise it, and do not run the request again.
    if "failed" in head:
        raise OperationFailed(head["failed"]["message"], head["failed"]["kind"])
    output = outcome[_HEAD_BYTES.size + size :]
    ok = head["ok"]
    lease_id = lease_id_of(ok["lease_id"])
    return InferenceResponse(request_id, lease_id, ok["token_expires_at"], output, is_replayed=True)


def _outcome(head: dict[str, object], output: bytes) -> bytes:
    text = json.dumps(head).encode()
    return b"".join((_HEAD_BYTES.pack(len(text)), text, output))
