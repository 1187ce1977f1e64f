"""A model's files, safetensors in a folder or GGUF, and the loading of their weights into a session's memory."""

from gpulease.client.decode.checkpoint.contract import Checkpoint
from gpulease.client.decode.checkpoint.model_files import open_model
from gpulease.client.decode.checkpoint.random_checkpoint import RandomCheckpoint
from gpulease.client.decode.checkpoint.tensors import Tensor, TensorType
from gpulease.client.decode.checkpoint.weight_loader import load_weights, size_bytes

__all__ = ["Checkpoint", "RandomCheckpoint", "Tensor", "TensorType", "load_weights", "open_model", "size_bytes"]
