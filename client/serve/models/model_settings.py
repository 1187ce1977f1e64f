"""The models that a server serves: a TOML file, read once.

[models.digits]
method_id = 1                   # of calls through shared memory; 1 or more
module = "digits.ptx"           # PTX or a cubin, beside this file
kernel = "digits"               # see ModelSettings
weights = "digits.weights"      # bytes the kernel gets a pointer to; copied to the card once a lease
constants = [64]                # u32 arguments behind the others
threads_per_block = 64
blocks_per_item = 1
input_bytes = 256               # of one item
output_bytes = 40
input_type = "f32"              # the kernel's type for requests in JSON's numbers, see `json_numbers`
output_type = "f32"
min_vram_bytes = 1_048_576      # of the lease
lease_secs = 30                 # renewed for as long as the model is served
max_kernel_secs = 5             # a batch that takes longer ends its lease
max_batch = 32                  # items in one launch
max_delay_ms = 0                # how long an item waits for others; those that arrive during a batch form the next
max_queue = 256                 # items that wait
deadline_ms = 1_000             # for a request that names none
idle_secs = 0                   # more than 0: leased on demand, and freed after so long without a request
smaller = "digits-small"        # served instead while there is no room for this one
is_pure = true                  # the kernel may be run twice for one request: see ModelSettings
"""

from collections.abc import Mapping
from dataclasses import MISSING, dataclass, fields
from pathlib import Path
from typing import Any, Final

from gpulease.client.errors import InvalidRequest
from gpulease.client.http.model_file import check_complete, check_kind, check_table, kind_of, read_model_tables
from gpulease.client.serve.models.json_numbers import FORMATS, size_of
from gpulease.protocol.limits import MAX_PAYLOAD_BYTES

MAX_BATCH_BYTES: Final = 256 << 20
"""Most bytes of a batch's inputs, and of its outputs. They lie in memory shared with the lease's worker, 1 GiB in
all."""

MAX_FILE_BYTES: Final = 1 << 30
"""Most bytes of weights. Stops a wrong path from filling the server's memory."""

MAX_NAME_CHARACTERS: Final = 64

EXAMPLE: Final = Path(__file__).with_name("example") / "models.toml"
"""The example: handwritten digits, and a smaller variant of it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSettings:
    """A model, computed by one kernel.

        name(const void *weights, const void *input, void *output, u32 items, u32 constants...)

    `input` and `output` hold `items` items one behind the other. The kernel runs on items x blocks_per_item blocks. It
    must write every byte of the output, where an earlier batch's bytes may lie. It gets nothing else, and its output
    for one item must depend on that item alone.

    Attributes:
        name: The name in URLs.
        module, weights: The files' bytes.
        input_type, output_type: Types of an item's numbers (see `json_numbers`); "" refuses requests in numbers.
        is_pure: Whether a request may be computed again after a failure that its caller was not told of. Otherwise a
            request that was begun is answered with the failure.

    The module's example explains the other attributes; their names say the units.
    """

    name: str
    method_id: int
    module: bytes
    kernel: str
    input_bytes: int
    output_bytes: int
    min_vram_bytes: int
    input_type: str = ""
    output_type: str = ""
    weights: bytes = b""
    constants: tuple[int, ...] = ()
    threads_per_block: int = 256
    blocks_per_item: int = 1
    lease_secs: float = 30.0
    max_kernel_secs: float = 10.0
    max_batch: int = 1
    max_delay_ms: float = 0.0
    max_queue: int = 256
    deadline_ms: float = 10_000.0
    idle_secs: float = 0.0
    smaller: str = ""
    is_pure: bool = False


_FILES: Final = {"module": MAX_PAYLOAD_BYTES, "weights": MAX_FILE_BYTES}
_RANGES: Final[dict[str, tuple[float, float]]] = {
    "method_id": (1, 2**32 - 1),
    "input_bytes": (1, MAX_BATCH_BYTES),
    "output_bytes": (1, MAX_BATCH_BYTES),
    "min_vram_bytes": (1, 2**63),
    "threads_per_block": (1, 1024),
    "blocks_per_item": (1, 2**20),
    "lease_secs": (0.1, 86400),
    "max_kernel_secs": (0.01, 3600),
    "max_batch": (1, 4096),
    "max_delay_ms": (0, 10_000),
    "max_queue": (1, 2**20),
    "deadline_ms": (1, 3_600_000),
    "idle_secs": (0, 86400),
}
_TYPES: Final[dict[str, Any]] = {item.name: item.type for item in fields(ModelSettings) if item.name != "name"}
_NEEDED: Final = [item.name for item in fields(ModelSettings) if item.default is MISSING and item.name != "name"]


def load_settings(path: Path) -> dict[str, ModelSettings]:
    """Return a file's models by name. Raises InvalidRequest that says what is wrong in it."""
    models = {name: _model(path, name, table) for name, table in read_model_tables(path).items()}
    check_together(models)
    return models


def check_together(models: Mapping[str, ModelSettings]) -> None:
    """Raise InvalidRequest if two models share a number, or a smaller variant can't stand in for its model."""
    numbers: dict[int, str] = {}
    for name, model in models.items():
        if (other := numbers.setdefault(model.method_id, name)) != name:
            raise InvalidRequest(f"models {other} and {name} have one method_id, {model.method_id}")
        chain = [name]
        while (smaller := models[chain[-1]].smaller) != "":
            if smaller not in models or smaller in chain:
                raise InvalidRequest(f"model {chain[-1]}: smaller must be another model of the file, not {smaller!r}")
            chain.append(smaller)
            found = models[smaller]
            if _shape(found) != _shape(model):
                raise InvalidRequest(f"model {name}: {smaller} has other inputs or outputs, and can't stand in for it")


def _shape(model: ModelSettings) -> tuple[object, ...]:
    return model.input_bytes, model.output_bytes, model.input_type, model.output_type


def _model(path: Path, name: str, table: Any) -> ModelSettings:
    where = f"{path}: models.{name}"
    if not 0 < len(name) <= MAX_NAME_CHARACTERS or not name.isascii() or not name.replace("-", "").isalnum():
        raise InvalidRequest(f"{where}: a name has 1 to {MAX_NAME_CHARACTERS} letters, digits and hyphens")
    check_table(where, table)
    found = {key: _value(path, where, key, value) for key, value in table.items()}
    check_complete(where, found, _NEEDED)
    model = ModelSettings(name=name, **found)
    if max(model.input_bytes, model.output_bytes) * model.max_batch > MAX_BATCH_BYTES:
        raise InvalidRequest(f"{where}: a batch of {model.max_batch} is more than {MAX_BATCH_BYTES} bytes")
    for side in ("input", "output"):
        kind, size = found.get(f"{side}_type", ""), found[f"{side}_bytes"]
        if kind and size % size_of(kind):
            raise InvalidRequest(f"{where}: {side}_bytes must be a multiple of the size of {kind}, not {size}")
    if ("input_type" in found) is not ("output_type" in found):
        raise InvalidRequest(f"{where}: input_type and output_type are said together, or neither")
    return model


def _value(path: Path, where: str, key: str, value: Any) -> Any:
    kind = kind_of(where, key, _TYPES)
    if key in _FILES:
        return _file(path, where, key, value)
    if key in ("input_type", "output_type") and (not isinstance(value, str) or value not in FORMATS):
        raise InvalidRequest(f"{where}: {key} = {value!r} is none of {', '.join(FORMATS)}")
    if key == "constants":
        if not isinstance(value, list) or not all(type(item) is int and 0 <= item < 2**32 for item in value):
            raise InvalidRequest(f"{where}: constants must be a list of integers from 0 to 2**32 - 1, not {value!r}")
        return tuple(value)
    check_kind(where, key, value, kind)
    if key in _RANGES:
        least, most = _RANGES[key]
        if not least <= value <= most:
            raise InvalidRequest(f"{where}: {key} is {value}; {least:g} to {most:g} is taken")
    return kind(value)


def _file(path: Path, where: str, key: str, value: Any) -> bytes:
    if not isinstance(value, str):
        raise InvalidRequest(f"{where}: {key} must be a file's name, not {value!r}")
    try:
        with (path.parent / value).open("rb") as file:
            data = file.read(_FILES[key] + 1)
    except OSError as error:
        raise InvalidRequest(f"{where}: {key} = {value!r}: {error.strerror}") from None
    if not 0 < len(data) <= _FILES[key]:
        raise InvalidRequest(f"{where}: {key} = {value!r} is empty, or has more than {_FILES[key]} bytes")
    return data
