"""The protocol of checkpoints, for the loader and the engine."""

from typing import TYPE_CHECKING, Protocol

import numpy as np
from numpy.typing import NDArray

from gpulease.client.decode.checkpoint.tensors import Tensor
from gpulease.client.decode.model_config import ModelConfig

if TYPE_CHECKING:
    from gpulease.client.decode.text.tokenizer import Tokenizer


class Checkpoint(Protocol):
    """A model's files, opened and checked: its shape, and every tensor that `model_tensors` names.

    A checkpoint maps its files. Rows of a file that became shorter raise ModelRejected; one that becomes shorter in the
    very moment of a copy ends the process with SIGBUS.
    """

    @property
    def name(self) -> str:
        """The path, for errors and reports."""

    @property
    def config(self) -> ModelConfig:
        """The shape, checked."""

    def tensor(self, name: str) -> Tensor:
        """Return one of the config's tensors, by its name in Hugging Face's checkpoints."""

    def rotary_divisors(self) -> NDArray[np.float64]:
        """Divisors [head_width / 2] of the rotary embeddings' frequencies; ones where they are not stretched."""

    def sha256(self) -> str:
        """Digest of the weights' files and the config, in hexadecimal. Reads all of them: call it in a thread."""

    def tokenizer(self) -> "Tokenizer":
        """Make its tokenizer. Raises ModelRejected where there is none, or one that is broken or of another kind."""
