"""The interface of checkpoints that the loader and the engine use."""

from typing import TYPE_CHECKING, Protocol

from gpulease.client.decode.checkpoint.rotary import Rotation
from gpulease.client.decode.checkpoint.tensors import Tensor
from gpulease.client.decode.model_config import ModelConfig
from gpulease.client.decode.pooling import Pooling

if TYPE_CHECKING:
    from gpulease.client.decode.text.tokenizer import Tokenizer


class Checkpoint(Protocol):
    """A model's files, opened and checked: its shape, and every tensor that `model_tensors` names.

    A checkpoint maps its files into memory. Reading rows of a file that has become shorter raises ModelRejected. If a
    file becomes shorter during a copy, SIGBUS ends the process.
    """

    @property
    def name(self) -> str:
        """The path of the file or folder, for errors and reports."""

    @property
    def config(self) -> ModelConfig:
        """The model's shape, which the kernels support."""

    @property
    def pooling(self) -> Pooling | None:
        """How the model turns a text into a vector; None if it can only generate text."""

    def tensor(self, name: str) -> Tensor:
        """Return the tensor with this name, as in Hugging Face's checkpoints."""

    def rotation(self, positions: int) -> Rotation:
        """Return the rotary embedding for an engine with sequences of up to `positions` positions."""

    def sha256(self) -> str:
        """Return the digest of the weights' files and the config, in hexadecimal.

        Reads all files, so call it in a thread.
        """

    def tokenizer(self) -> "Tokenizer":
        """Return the model's tokenizer. Raises ModelRejected if it is missing, broken or of an unsupported kind."""

    def close(self) -> None:
        """Close the files, after which no tensor can be read. Otherwise they close when nothing refers to them."""
