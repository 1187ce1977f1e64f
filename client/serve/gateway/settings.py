"""The tables `[models.NAME]` of a TOML file, which say what a server of models serves.

What is asked of the gateway, what it answers, and what a model's kernel must look like.

Which models a gateway serves: a TOML file, read once.

[models.affine]
ptx = "affine.ptx"              # PTX or a cubin, beside this file
kernel = "affine"               # see InferenceKernel
threads_per_block = 256
bytes_per_thread = 4
arguments = ["in", "input_len:u64", "out", "output_len:u64"]   # the kernel's, in order; or "inout", and u32
min_vram_bytes = 1_048_576      # of each request's lease
lease_secs = 10                 # how long a request may take on the card
max_output_bytes = 1_048_576

Stores by their URL: what is typed where a gateway is started.
"""

import json
import math
import struct
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from gpulease.client.errors import InvalidRequest
from gpulease.client.serve.gateway.errors import OperationFailed, StoreUnavailable
from gpulease.client.serve.gateway.ledger import checked_id, operation_hash, operation_key
from gpulease.client.serve.gateway.sqlite_store import SqliteStore
from gpulease.client.serve.gateway.store import ReplicatedIdempotencyStore
from gpulease.protocol.lease_ids import LeaseId, lease_id_of
from gpulease.protocol.limits import MAX_PAYLOAD_BYTES

MAX_MODELS: Final = 256
"""Stops a file from filling the server's memory, and the metrics, which have series for each."""


def read_model_tables(path: Path) -> dict[str, Any]:
    """Each table, unchecked, by its name. Raises InvalidRequest with what is wrong in the file."""
    try:
        text = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise InvalidRequest(f"{path}: {error.strerror}") from None
    except ValueError as error:
        raise InvalidRequest(f"{path}: {error}") from None
    tables = text.pop("models", None)
    if text or not isinstance(tables, dict) or not 0 < len(tables) <= MAX_MODELS:
        raise InvalidRequest(f"{path}: there must be 1 to {MAX_MODELS} tables [models.NAME], and nothing else")
    return tables


MAX_INPUT_BYTES: Final = 16 << 20
"""Largest input. Stops one request from taking the gateway's memory."""

MAX_OUTPUT_BYTES: Final = 16 << 20
"""Largest output. It is kept in the idempotency store, too."""

MAX_LEASE_S: Final = 300.0
"""Longest lease of one request: its grant, which has to last as long, can't live for longer."""

MAX_THREADS: Final = 1024
"""Most threads in a block (CUDA C++ Programming Guide, compute capabilities)."""

MAX_MESSAGE_CHARS: Final = 2000
"""Of an error's text that is kept. Stops a compiler's log from filling the store."""

_HEAD_BYTES: Final = struct.Struct(">I")


@dataclass(frozen=True, slots=True)
class InferenceRequest:
    """One request. The first four say what is to be done; the others, how.

    Attributes:
        request_id: What makes it the same request when it is asked again.
        model_id: Which model.
        input: The model's input.
        output_len: Bytes of output.
        min_vram: Bytes of device memory its lease is to have.
        lease_ttl_secs: How long its lease lasts; no more of it is done after that.
        audience: For whom the grant is to be, as `my_audience()` says; None for this program's own user.
        token_nonce: A number of 128 bits that no grant of the lease has had; 0: the daemon draws one.
        now_secs: The date by the caller's clock, in seconds since 1970; a grant that ends before it is refused.
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
        """Raises InvalidRequest if it can't be served, whatever the model is."""
        checked_id(self.request_id, "request id")
        checked_id(self.model_id, "model id")
        if len(self.input) > MAX_INPUT_BYTES:
            raise InvalidRequest(f"an input of {len(self.input)} bytes; at most {MAX_INPUT_BYTES} are taken")
        if not 0 < self.output_len <= MAX_OUTPUT_BYTES:
            raise InvalidRequest(f"an output of {self.output_len} bytes; 1 to {MAX_OUTPUT_BYTES} can be had")
        if not 0 < self.lease_ttl_secs <= MAX_LEASE_S:
            raise InvalidRequest(
                f"a lease of {self.lease_ttl_secs} s for a request; at most {MAX_LEASE_S:g} s are taken"
            )
        if not math.isfinite(self.now_secs):
            raise InvalidRequest(f"{self.now_secs} is no date")

    def key(self) -> str:
        """What it is reserved by."""
        return operation_key(self.request_id)

    def operation(self) -> bytes:
        """The hash that tells it from any other."""
        return operation_hash(self.request_id, self.model_id, self.output_len, self.input)


BUFFERS: Final = ("in", "out", "inout")
"""Arguments that are memory: the input; the output, zero at first; one memory with the input at its begin, zero behind
it, from whose begin the output is read."""

LENGTHS: Final = ("input_len:u32", "input_len:u64", "output_len:u32", "output_len:u64")
"""Arguments that are sizes in bytes."""

DEFAULT_ARGUMENTS: Final = ("in", "input_len:u64", "out", "output_len:u64")


@dataclass(frozen=True, slots=True)
class InferenceKernel:
    """A model's kernel, by default `name(const void *input, u64 input_bytes, void *output, u64 output_bytes)`.

    There is at least one thread for each `bytes_per_thread` bytes of output, in blocks of one dimension; there may be
    more than that, so the kernel must check the output's length.

    Attributes:
        arguments: The kernel's arguments in order, each of BUFFERS or LENGTHS.
    """

    name: str
    threads_per_block: int = 256
    bytes_per_thread: int = 4
    arguments: tuple[str, ...] = DEFAULT_ARGUMENTS

    def __post_init__(self) -> None:
        if not 0 < self.threads_per_block <= MAX_THREADS or self.bytes_per_thread < 1:
            raise InvalidRequest(f"kernel {self.name}: 1 to {MAX_THREADS} threads a block, at least a byte a thread")
        known = BUFFERS + LENGTHS
        if unknown := [argument for argument in self.arguments if argument not in known]:
            raise InvalidRequest(f"kernel {self.name}: arguments: {unknown[0]!r} is none of {', '.join(known)}")
        if len(set(self.arguments)) != len(self.arguments):
            raise InvalidRequest(f"kernel {self.name}: arguments: each can be there once")
        if sorted(argument for argument in self.arguments if argument in BUFFERS) not in (["in", "out"], ["inout"]):
            raise InvalidRequest(f'kernel {self.name}: arguments: there must be "in" and "out", or "inout" alone')

    @property
    def is_in_place(self) -> bool:
        """Whether one memory holds the input and the output."""
        return "inout" in self.arguments

    def blocks(self, output_bytes: int) -> int:
        """How many blocks an output takes."""
        return -(-output_bytes // (self.threads_per_block * self.bytes_per_thread))


@dataclass(frozen=True, slots=True)
class InferenceResponse:
    """What came of a request.

    Attributes:
        request_id: Which one.
        lease_id: The lease it was done on; it is over.
        token_expires_at_unix_secs: When the grant it was done by ended at the latest, by the daemon's date.
        output: The model's output.
        is_replayed: Whether it was done for an earlier asking.
    """

    request_id: str
    lease_id: LeaseId
    token_expires_at_unix_secs: int
    output: bytes
    is_replayed: bool = False


def response_to_outcome(response: InferenceResponse) -> bytes:
    """As the store keeps it: a JSON head behind its length (u32, big-endian), and the output."""
    head = {"lease_id": str(response.lease_id), "token_expires_at": response.token_expires_at_unix_secs}
    return _outcome({"version": 1, "ok": head}, response.output)


def failure_to_outcome(error: Exception) -> bytes:
    """The same of an attempt that failed, with its effect begun."""
    head = {"kind": type(error).__name__, "message": str(error)[:MAX_MESSAGE_CHARS]}
    return _outcome({"version": 1, "failed": head}, b"")


def outcome_to_response(request_id: str, outcome: bytes) -> InferenceResponse:
    """What was kept, to be told again. Raises OperationFailed if that is a failure."""
    (size,) = _HEAD_BYTES.unpack_from(outcome)
    head = json.loads(outcome[_HEAD_BYTES.size : _HEAD_BYTES.size + size])
    if "failed" in head:
        raise OperationFailed(head["failed"]["message"], head["failed"]["kind"])
    output = outcome[_HEAD_BYTES.size + size :]
    told = head["ok"]
    lease_id = lease_id_of(told["lease_id"])
    return InferenceResponse(request_id, lease_id, told["token_expires_at"], output, is_replayed=True)


def _outcome(head: dict[str, object], output: bytes) -> bytes:
    text = json.dumps(head).encode()
    return b"".join((_HEAD_BYTES.pack(len(text)), text, output))


_KINDS: Final[dict[str, type[Any]]] = {
    "ptx": str,
    "kernel": str,
    "threads_per_block": int,
    "bytes_per_thread": int,
    "arguments": list,
    "min_vram_bytes": int,
    "lease_secs": float,
    "max_output_bytes": int,
}
_NEEDED: Final = ("ptx", "kernel", "min_vram_bytes")
_DEFAULT_LEASE_S: Final = 10.0

EXAMPLE: Final = Path(__file__).with_name("example") / "models.toml"
"""The example: y = 2 x + 1 of 32-bit floats."""


@dataclass(frozen=True, slots=True)
class Model:
    """What is run for a request, and what its lease is like.

    Attributes:
        image: PTX or a cubin.
        kernel: Which kernel of it, and how it is launched.
        min_vram_bytes: Device memory of each request's lease.
        lease_s: How long the lease lasts.
        max_output_bytes: Largest output that may be asked for.
    """

    image: bytes
    kernel: InferenceKernel
    min_vram_bytes: int
    lease_s: float
    max_output_bytes: int


def load_models(path: Path) -> dict[str, Model]:
    """The models of a file, by id. Raises InvalidRequest with what is wrong in it."""
    tables = read_model_tables(path)
    return {checked_id(name, f"model id in {path}"): _model(path, name, table) for name, table in tables.items()}


def _model(path: Path, name: str, table: Any) -> Model:
    where = f"{path}: models.{name}"
    if not isinstance(table, dict):
        raise InvalidRequest(f"{where} is no table")
    for key, value in table.items():
        kind = _KINDS.get(key)
        if kind is None:
            raise InvalidRequest(f"{where}: {key!r} is no setting; there are {', '.join(_KINDS)}")
        if not isinstance(value, int | float if kind is float else kind) or isinstance(value, bool):
            raise InvalidRequest(f"{where}: {key} = {value!r} is no {kind.__name__}")
    if missing := [key for key in _NEEDED if key not in table]:
        raise InvalidRequest(f"{where}: {', '.join(missing)} is missing")
    try:
        image = (path.parent / table["ptx"]).read_bytes()
    except OSError as error:
        raise InvalidRequest(f"{where}: ptx = {table['ptx']!r}: {error.strerror}") from None
    found = Model(
        image,
        _kernel(where, table),
        table["min_vram_bytes"],
        float(table.get("lease_secs", _DEFAULT_LEASE_S)),
        table.get("max_output_bytes", MAX_OUTPUT_BYTES),
    )
    bounds = (
        ("ptx", len(image), MAX_PAYLOAD_BYTES),
        ("lease_secs", found.lease_s, MAX_LEASE_S),
        ("min_vram_bytes", found.min_vram_bytes, 2**63),
        ("max_output_bytes", found.max_output_bytes, MAX_OUTPUT_BYTES),
    )
    for key, value, most in bounds:
        if not 0 < value <= most:
            raise InvalidRequest(f"{where}: {key} is {value}; more than 0 and at most {most:g} is taken")
    return found


def _kernel(where: str, table: dict[str, Any]) -> InferenceKernel:
    sizes = table.get("threads_per_block", 256), table.get("bytes_per_thread", 4)
    try:
        return InferenceKernel(table["kernel"], *sizes, tuple(table.get("arguments", DEFAULT_ARGUMENTS)))
    except InvalidRequest as error:
        raise InvalidRequest(f"{where}: {error.message}") from None


SQLITE: Final = "sqlite:"
POSTGRES: Final = ("postgresql://", "postgres://")


def open_store(url: str) -> ReplicatedIdempotencyStore:
    """The store at `sqlite:PATH` or `postgresql://...`. Raises InvalidRequest for another URL, StoreUnavailable."""
    if url.startswith(SQLITE) and len(url) > len(SQLITE):
        return SqliteStore(url.removeprefix(SQLITE))
    if not url.startswith(POSTGRES):
        raise InvalidRequest(f"{url!r} is no store", "Say sqlite:PATH or postgresql://HOST/DATABASE")
    try:
        from gpulease.client.serve.gateway.postgres_store import PostgresStore
    except ImportError as error:
        raise StoreUnavailable(
            f"no PostgreSQL: {error}", "Install it: pip install '.[postgres]' in gpulease's repository"
        ) from None
    return PostgresStore(url)
