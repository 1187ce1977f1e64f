"""Finds out what a path holds, and opens it."""

from pathlib import Path

from gpulease.client.decode.checkpoint.contract import Checkpoint
from gpulease.client.decode.decode_errors import ModelRejected
from gpulease.client.errors import Unsupported


def open_model(path: str | Path) -> Checkpoint:
    """Open a model's files: a folder with config.json and safetensors, or a `.gguf` file.

    Everything but the weights' values is read and checked; those are mapped.

    Raises ModelRejected with a sentence that names the file, and the tensor and its shape where one is at fault.
    Raises Unsupported where the libraries are not installed.
    """
    path = Path(path)
    try:
        if path.is_dir():
            from gpulease.client.decode.checkpoint.safetensors_folder import SafetensorsFolder

            return SafetensorsFolder(path)
        from gpulease.client.decode.checkpoint.gguf_file import GgufFile
    except ImportError as error:
        raise Unsupported(
            f"no model can be read: {error}", "Install it: pip install '.[decode]' in gpulease's repository"
        ) from None
    if not path.exists():
        raise ModelRejected(f"{path}: there is no such file or folder")
    if path.suffix != ".gguf":
        raise ModelRejected(f"{path}: neither a folder with config.json and safetensors nor a .gguf file")
    return GgufFile(path)
