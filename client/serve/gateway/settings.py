"""The models that a gateway serves: a TOML file, read once.

[models.affine]
ptx = "affine.ptx"              # PTX or a cubin, beside this file
kernel = "affine"               # see InferenceKernel
threads_per_block = 256
bytes_per_thread = 4
arguments = ["in", "input_len:u64", "out", "output_len:u64"]   # the kernel's, in order; or "inout", and u32
min_vram_bytes = 1_048_576      # of each request's lease
lease_secs = 10                 # how long a request may take on the card
max_output_bytes = 1_048_576
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from gpulease.client.errors import InvalidRequest
from gpulease.client.http.model_file import check_complete, check_kind, check_table, kind_of, read_model_tables
from gpulease.client.serve.gateway.inference import (
    DEFAULT_ARGUMENTS,
    MAX_LEASE_S,
    MAX_OUTPUT_BYTES,
    InferenceKernel,
)
from gpulease.client.serve.gateway.ledger import checked_id
from gpulease.protocol.limits import MAX_PAYLOAD_BYTES

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
    """A model and the lease of each of its requests.

    Attributes:
        image: PTX or a cubin.
        kernel: The kernel in it, and its launch.
        min_vram_bytes: Device memory of the lease.
        lease_s: Seconds that the lease lasts.
        max_output_bytes: Largest output that a request may ask for.
    """

    image: bytes
    kernel: InferenceKernel
    min_vram_bytes: int
    lease_s: float
    max_output_bytes: int


def load_models(path: Path) -> dict[str, Model]:
    """Return a file's models by id. Raises InvalidRequest that says what is wrong in it."""
    tables = read_model_tables(path)
    return {checked_id(name, f"model id in {path}"): _model(path, name, table) for name, table in tables.items()}


def _model(path: Path, name: str, table: Any) -> Model:
    where = f"{path}: models.{name}"
    check_table(where, table)
    for key, value in table.items():
        check_kind(where, key, value, kind_of(where, key, _KINDS))
    check_complete(where, table, _NEEDED)
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
