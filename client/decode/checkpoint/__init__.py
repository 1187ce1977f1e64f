"""A model's files, safetensors in a folder or GGUF.

`weight_loader` loads their weights into a session's memory. It is not imported here, because processes that only read
a model's texts start sooner without the client's sessions.
"""

from gpulease.client.decode.checkpoint.contract import Checkpoint
from gpulease.client.decode.checkpoint.model_files import open_model
from gpulease.client.decode.checkpoint.random_checkpoint import RandomCheckpoint
from gpulease.client.decode.checkpoint.tensors import Tensor, TensorType

__all__ = ["Checkpoint", "RandomCheckpoint", "Tensor", "TensorType", "open_model"]
