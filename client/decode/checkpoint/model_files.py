"""Opens a model's files in any of the supported formats."""

from pathlib import Path

from gpulease.client.decode.checkpoint.contract import Checkpoint
from gpulease.client.decode.decode_errors import ModelRejected
from gpulease.client.errors import Unsupported


def open_model(path: str | Path) -> Checkpoint:
    """Open a model's files: a folder with config.json and safetensors, or a `.gguf` file.

    Everything except the weights' values is read and checked; the weights are mapped.

    Raises ModelRejected with a message that names the file and, if a tensor is at fault, the tensor and its shape.
    Raises Unsupported if the libraries for the format are not installed.
    """
    path = Path(path)
    try:
        if path.is_dir():
            # Import these late: both formats need the extra `decode`, which clients without a model need not install.
            from gpulease.client.decode.checkpoint.safetensors_folder import SafetensorsFolder

            return SafetensorsFolder(path)
        from gpulease.client.decode.checkpoint.gguf_file import GgufFile
    except ImportError as error:
        raise Unsupported(
            f"the libraries that read models are missing: {error}",
            "Install them: pip install '.[decode]' in gpulease's repository",
        ) from None
    if not path.exists():
        raise ModelRejected(f"{path}: the file or folder does not exist")
    if path.suffix != ".gguf":
        raise ModelRejected(f"{path}: must be a folder with config.json and safetensors, or a .gguf file")
    return GgufFile(path)
