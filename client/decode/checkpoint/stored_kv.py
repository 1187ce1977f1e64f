"""A checkpoint whose keys and values the engine stores in a chosen type."""

from dataclasses import replace
from typing import TYPE_CHECKING

from gpulease.client.decode.checkpoint.contract import Checkpoint
from gpulease.client.decode.checkpoint.rotary import Rotation
from gpulease.client.decode.checkpoint.tensors import Tensor
from gpulease.client.decode.model_config import KvDtype
from gpulease.client.decode.pooling import Pooling

if TYPE_CHECKING:
    from gpulease.client.decode.text.tokenizer import Tokenizer


def with_kv_dtype(checkpoint: Checkpoint, kv_dtype: KvDtype) -> Checkpoint:
    """Return the checkpoint with this `kv_dtype` in its config; itself if it has that already."""
    return checkpoint if checkpoint.config.kv_dtype is kv_dtype else _StoredKv(checkpoint, kv_dtype)


class _StoredKv:
    """Another checkpoint's files, with another config."""

    def __init__(self, checkpoint: Checkpoint, kv_dtype: KvDtype) -> None:
        self._checkpoint = checkpoint
        self.name = checkpoint.name
        self.config = replace(checkpoint.config, kv_dtype=kv_dtype)

    @property
    def pooling(self) -> Pooling | None:
        return self._checkpoint.pooling

    def tensor(self, name: str) -> Tensor:
        return self._checkpoint.tensor(name)

    def rotation(self, positions: int) -> Rotation:
        return self._checkpoint.rotation(positions)

    def sha256(self) -> str:
        return self._checkpoint.sha256()

    def tokenizer(self) -> "Tokenizer":
        return self._checkpoint.tokenizer()

    def close(self) -> None:
        self._checkpoint.close()
