"""The models that a gateway serves: a TOML file of tables `[models.NAME]`, read at the start. See `ModelTable`."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Final

from gpulease.client.errors import InvalidRequest
from gpulease.client.http.settings_file import read_model_tables, settings_of
from gpulease.client.serve.gateway.inference import (
    DEFAULT_ARGUMENTS,
    DEFAULT_BYTES_PER_THREAD,
    DEFAULT_THREADS,
    MAX_LEASE_S,
    MAX_OUTPUT_BYTES,
    MAX_THREADS,
    InferenceKernel,
)
from gpulease.client.serve.gateway.ledger import checked_id
from gpulease.protocol.limits import MAX_PAYLOAD_BYTES
from gpulease.protocol.settings_reader import Setting, must_be

MAX_VRAM_BYTES: Final = 2**63
"""Upper bound of `min_vram_bytes`, more than any card has, to detect typing errors."""

EXAMPLE: Final = Path(__file__).with_name("example") / "models.toml"
"""The example: y = 2 x + 1 of 32-bit floats."""


@dataclass(frozen=True, slots=True)
class Model:
    """A model, and the size and duration of its requests' leases.

    Attributes:
        image: PTX or a cubin.
        kernel: The kernel in the image, and how it is launched.
        min_vram_bytes: Device memory of the lease.
        lease_s: Duration of the lease in seconds.
        max_output_bytes: Largest output that a request may have.
    """

    image: bytes
    kernel: InferenceKernel
    min_vram_bytes: int
    lease_s: float
    max_output_bytes: int


def _read_arguments(value: Any) -> tuple[str, ...]:
    if not isinstance(value, list):
        raise must_be("a list", value)
    return tuple(value)


@dataclass(frozen=True, slots=True)
class ModelTable:
    """The declaration of the table `[models.NAME]`, which describes one model."""

    ptx: Annotated[
        str,
        Setting(
            "The file with the kernel, PTX or a cubin; its path starts from this file's folder.", example='"affine.ptx"'
        ),
    ]
    kernel: Annotated[str, Setting("The kernel's name in that file.", example='"affine"')]
    min_vram_bytes: Annotated[
        int,
        Setting("Device memory of each request's lease.", least=1, most=MAX_VRAM_BYTES, example="67_108_864"),
    ]
    threads_per_block: Annotated[int, Setting("Number of threads in a block.", least=1, most=MAX_THREADS)] = (
        DEFAULT_THREADS
    )
    bytes_per_thread: Annotated[int, Setting("Number of output bytes that one thread computes.", least=1)] = (
        DEFAULT_BYTES_PER_THREAD
    )
    arguments: Annotated[
        tuple[str, ...],
        Setting(
            'The kernel\'s arguments in order: "in" and "out", or "inout" for one buffer that holds both; and the byte'
            ' counts "input_len" and "output_len", each with :u32 or :u64.',
            what="a list",
            read=_read_arguments,
        ),
    ] = DEFAULT_ARGUMENTS
    lease_secs: Annotated[
        float, Setting("Maximum number of seconds that a request may take on the card.", over=0, most=MAX_LEASE_S)
    ] = 10.0
    max_output_bytes: Annotated[
        int, Setting("Maximum number of bytes of a request's output.", least=1, most=MAX_OUTPUT_BYTES)
    ] = MAX_OUTPUT_BYTES


def load_models(path: Path) -> dict[str, Model]:
    """Return a file's models by id. Raises InvalidRequest, which names the setting that is wrong."""
    # Names of models are part of an operation's hash, so they have the form of ids.
    tables = read_model_tables(path)
    return {checked_id(name, f"model id in {path}"): _model(path, name, table) for name, table in tables.items()}


def _model(path: Path, name: str, table: Any) -> Model:
    settings = settings_of(path, ModelTable, table, "models", name)
    where = f"{path}: models.{name}"
    try:
        # Read the file only at the start, so that a file that is replaced later does not affect requests.
        image = (path.parent / settings.ptx).read_bytes()
    except OSError as error:
        raise InvalidRequest(f"{where}.ptx: {settings.ptx!r}: {error.strerror}") from None
    if not 0 < len(image) <= MAX_PAYLOAD_BYTES:
        raise InvalidRequest(f"{where}.ptx must have 1 to {MAX_PAYLOAD_BYTES} bytes, not {len(image)}")
    try:
        # Add the place in the file to the errors of the kernel's own checks.
        kernel = InferenceKernel(
            settings.kernel, settings.threads_per_block, settings.bytes_per_thread, settings.arguments
        )
    except InvalidRequest as error:
        raise InvalidRequest(f"{where}: {error.message}") from None
    return Model(image, kernel, settings.min_vram_bytes, settings.lease_secs, settings.max_output_bytes)
