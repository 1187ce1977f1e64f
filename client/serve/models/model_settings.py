"""The models of a model server: a TOML file of tables `[models.NAME]`, read at the start. See `ModelSettings`."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Final

from gpulease.client.errors import InvalidRequest
from gpulease.client.http.settings_file import read_model_tables, values_of
from gpulease.client.serve.models.json_numbers import FORMATS, size_of
from gpulease.protocol.limits import MAX_PAYLOAD_BYTES
from gpulease.protocol.settings_reader import Setting, must_be, read_text

MAX_BATCH_BYTES: Final = 256 << 20
"""Maximum number of bytes of a batch's inputs, and of its outputs. Both are in the memory shared with the lease's
worker, 1 GiB."""

MAX_FILE_BYTES: Final = 1 << 30
"""Maximum number of bytes of weights, so that a wrong path can't fill the server's memory."""

MAX_NAME_CHARACTERS: Final = 64

EXAMPLE: Final = Path(__file__).with_name("example") / "models.toml"
"""The example: a classifier of handwritten digits, and a smaller variant."""


def _read_constants(value: Any) -> tuple[int, ...]:
    if not isinstance(value, list) or not all(type(item) is int and 0 <= item < 2**32 for item in value):
        raise must_be("a list of integers from 0 to 2**32 - 1", value)
    return tuple(value)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSettings:
    """A model that one kernel computes.

        name(const void *weights, const void *input, void *output, u32 items, u32 constants...)

    `input` and `output` contain `items` items one after another. The kernel runs on items x blocks_per_item blocks. It
    must write every byte of the output, which may contain an earlier batch's bytes. It gets nothing else, and its
    output for one item must depend only on that item.

    `name` is the model's name in URLs. `module` and `weights` are the files' bytes.
    """

    name: str
    method_id: Annotated[
        int, Setting("The model's number in calls through shared memory.", least=1, most=2**32 - 1, example="1")
    ]
    module: Annotated[
        bytes,
        Setting(
            "The file with the kernel, PTX or a cubin, in this file's folder.",
            what="a file's name",
            read=read_text,
            example='"digits.ptx"',
        ),
    ]
    kernel: Annotated[str, Setting("The kernel's name in that file.", example='"digits"')]
    input_bytes: Annotated[
        int, Setting("Number of bytes of one item's input.", least=1, most=MAX_BATCH_BYTES, example="256")
    ]
    output_bytes: Annotated[
        int, Setting("Number of bytes of one item's output.", least=1, most=MAX_BATCH_BYTES, example="40")
    ]
    min_vram_bytes: Annotated[
        int, Setting("Device memory of the model's lease.", least=1, most=2**63, example="1_048_576")
    ]
    input_type: Annotated[
        str,
        Setting(
            "The type of an item's numbers, for JSON requests with numbers; without it, such requests are refused.",
            choices=tuple(FORMATS),
            example='"f32"',
        ),
    ] = ""
    output_type: Annotated[
        str,
        Setting(
            "The type of the output's numbers, for replies to JSON requests with numbers.",
            choices=tuple(FORMATS),
            example='"f32"',
        ),
    ] = ""
    weights: Annotated[
        bytes,
        Setting(
            "The file with the weights, in this file's folder. It is copied to the card once per lease, and the kernel"
            " gets a pointer to it.",
            what="a file's name",
            read=read_text,
            example='"digits.weights"',
        ),
    ] = b""
    constants: Annotated[
        tuple[int, ...],
        Setting(
            "Further u32 arguments of the kernel, after the others.",
            what="a list of integers",
            read=_read_constants,
            example="[64]",
        ),
    ] = ()
    threads_per_block: Annotated[int, Setting("Number of threads in a block.", least=1, most=1024)] = 256
    blocks_per_item: Annotated[int, Setting("Number of blocks for each item.", least=1, most=2**20)] = 1
    lease_secs: Annotated[
        float,
        Setting(
            "Seconds that the lease lasts; it is renewed for as long as the model is served.", least=0.1, most=86400
        ),
    ] = 30.0
    max_kernel_secs: Annotated[
        float,
        Setting(
            "Maximum number of seconds that a batch may take; a batch that takes longer ends its lease.",
            least=0.01,
            most=3600,
        ),
    ] = 10.0
    max_batch: Annotated[int, Setting("Maximum number of items in one launch.", least=1, most=4096)] = 1
    max_delay_ms: Annotated[
        float,
        Setting(
            "How long a batch waits for more items. Items that arrive while a batch runs form the next one anyway.",
            least=0,
            most=10_000,
        ),
    ] = 0.0
    max_queue: Annotated[int, Setting("Maximum number of items that wait.", least=1, most=2**20)] = 256
    deadline_ms: Annotated[
        float,
        Setting(
            "Milliseconds within which a request must be finished if the request itself sets no deadline.",
            least=1,
            most=3_600_000,
        ),
    ] = 10_000.0
    idle_secs: Annotated[
        float,
        Setting(
            "If above 0, the server acquires the lease when a request arrives, and frees it this many seconds after the"
            " last request.",
            least=0,
            most=86400,
        ),
    ] = 0.0
    smaller: Annotated[
        str,
        Setting("The model that answers instead while there is no room for this one.", example='"digits-small"'),
    ] = ""
    is_pure: Annotated[
        bool,
        Setting(
            "Whether a request may be computed again after a failure, without notifying its caller. Otherwise a request"
            " in progress gets the failure as its answer."
        ),
    ] = False


_FILES: Final = {"module": MAX_PAYLOAD_BYTES, "weights": MAX_FILE_BYTES}
"""Maximum number of bytes of each file that the settings name."""


def load_settings(path: Path) -> dict[str, ModelSettings]:
    """Return a file's models by name. Raises InvalidRequest, which names the setting that is wrong."""
    models = {name: _model(path, name, table) for name, table in read_model_tables(path).items()}
    check_together(models)
    return models


def check_together(models: Mapping[str, ModelSettings]) -> None:
    """Raise InvalidRequest if two models have the same number, or a smaller variant can't replace its model."""
    # A number names a model for callers through shared memory, so two models can't share one.
    numbers: dict[int, str] = {}
    for name, model in models.items():
        if (other := numbers.setdefault(model.method_id, name)) != name:
            raise InvalidRequest(f"models {other} and {name} have the same method_id, {model.method_id}")
        # Follow the chain of variants. It must end, and each must have the same inputs and outputs.
        chain = [name]
        while (smaller := models[chain[-1]].smaller) != "":
            if smaller not in models or smaller in chain:
                raise InvalidRequest(f"model {chain[-1]}: smaller must be another model of the file, not {smaller!r}")
            chain.append(smaller)
            smaller_model = models[smaller]
            # Callers do not choose the variant, so its answer must have the same form as the model's.
            if _shape(smaller_model) != _shape(model):
                raise InvalidRequest(f"model {name}: {smaller} has other inputs or outputs, so it can't replace {name}")


def _shape(model: ModelSettings) -> tuple[object, ...]:
    return model.input_bytes, model.output_bytes, model.input_type, model.output_type


def _model(path: Path, name: str, table: Any) -> ModelSettings:
    where = f"{path}: models.{name}"
    if not 0 < len(name) <= MAX_NAME_CHARACTERS or not name.isascii() or not name.replace("-", "").isalnum():
        raise InvalidRequest(f"{where}: a name must have 1 to {MAX_NAME_CHARACTERS} letters, digits and hyphens")
    settings = values_of(path, ModelSettings, table, "models", name)
    # The settings name files; put their contents into the model.
    settings |= {key: _file(path, where, key, settings[key]) for key in _FILES if key in settings}
    model = ModelSettings(name=name, **settings)
    # Each setting is within its own limits, but their product must also fit.
    if max(model.input_bytes, model.output_bytes) * model.max_batch > MAX_BATCH_BYTES:
        raise InvalidRequest(f"{where}: a batch of {model.max_batch} items must have at most {MAX_BATCH_BYTES} bytes")
    for side in ("input", "output"):
        kind, size = settings.get(f"{side}_type", ""), settings[f"{side}_bytes"]
        # An item must consist of whole numbers of its declared type.
        if kind and size % size_of(kind):
            raise InvalidRequest(f"{where}: {side}_bytes must be a multiple of the size of {kind}, not {size}")
    if ("input_type" in settings) is not ("output_type" in settings):
        raise InvalidRequest(f"{where}: input_type and output_type must be set together, or neither")
    return model


def _file(path: Path, where: str, key: str, value: str) -> bytes:
    try:
        with (path.parent / value).open("rb") as file:
            # Read one byte more than allowed, which shows that a file is too large without reading all of it.
            data = file.read(_FILES[key] + 1)
    except OSError as error:
        raise InvalidRequest(f"{where}.{key}: {value!r}: {error.strerror}") from None
    if not 0 < len(data) <= _FILES[key]:
        raise InvalidRequest(f"{where}.{key}: {value!r} must have 1 to {_FILES[key]} bytes")
    return data
