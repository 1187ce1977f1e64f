"""A model with random weights, for benchmarks and tests: of any shape, without files."""

import hashlib
import zlib
from typing import Final, NoReturn

import numpy as np
from numpy.typing import NDArray

from gpulease.client.decode.checkpoint.model_tensors import model_tensors
from gpulease.client.decode.checkpoint.rotary import Rotation, rotation_of
from gpulease.client.decode.checkpoint.tensors import RowReader, Tensor, TensorType, rounded_to_bf16
from gpulease.client.decode.decode_errors import ModelRejected
from gpulease.client.decode.model_config import ModelConfig, check_config
from gpulease.client.decode.pooling import Pooling

PERIOD: Final = (4 << 20) + 3
"""Number of values after which the random weights repeat, so that a model of billions of values is made in a moment.
The number is odd, so that no two rows of a matrix are equal."""

NORM_SPREAD: Final = 0.1
"""Standard deviation of the norms' weights around 1, and of biases around 0."""


class RandomCheckpoint:
    """A Checkpoint with weights ~ N(0, 1 / columns) and norms near 1, all bf16.

    Equal configs and seeds give equal weights.
    """

    def __init__(self, config: ModelConfig, seed: int) -> None:
        """Generate the values. Raises ModelRejected for a shape that the engine can't compute."""
        self.pooling: Pooling | None = None
        self.name = f"random weights of seed {seed}"
        check_config(config, self.name)
        self.config = config
        self._seed = seed
        self._shapes = dict(model_tensors(config))
        # One array of values is shared by all tensors, scaled for each shape.
        max_elements = max(int(np.prod(shape)) for shape in self._shapes.values())
        self._normal = np.random.default_rng(seed).standard_normal(min(PERIOD, max_elements), np.float32)
        self._scaled: dict[tuple[float, float], NDArray[np.uint16]] = {}

    def tensor(self, name: str) -> Tensor:
        """Return a tensor of the model. Raises KeyError for a name that the model does not have."""
        shape = self._shapes[name]
        # The matrices keep activations near one. Norms are near one, biases near zero.
        if len(shape) > 1:
            mean, spread = 0.0, shape[-1] ** -0.5
        else:
            mean, spread = float(name.endswith("norm.weight")), NORM_SPREAD
        if (mean, spread) not in self._scaled:
            values = rounded_to_bf16(self._normal * np.float32(spread) + np.float32(mean))
            # Double the period, so that most chunks are a contiguous view, wherever they start.
            self._scaled[mean, spread] = np.concatenate([values, values])
        # Each tensor starts at a different position of the period, so that no two are equal.
        start = zlib.crc32(f"{self._seed} {name}".encode())
        return Tensor(name, shape, TensorType.BF16, _reader(self._scaled[mean, spread], start, shape[-1]))

    def rotation(self, positions: int) -> Rotation:
        """Return how positions rotate heads, in an engine with sequences of up to `positions` positions."""
        return rotation_of(self.config, positions)

    def sha256(self) -> str:
        """Return the digest of the config and the seed, which determine the weights."""
        return hashlib.sha256(repr((self.config, self._seed)).encode()).hexdigest()

    def tokenizer(self) -> NoReturn:
        """Raise ModelRejected: random weights have no vocabulary of texts."""
        raise ModelRejected(f"{self.name} have no tokenizer", "Use token ids as prompts")

    def close(self) -> None:
        """Do nothing, because random weights are computed, not read from files."""


def _reader(block: NDArray[np.uint16], start: int, columns: int) -> RowReader:
    def read(begin: int, end: int) -> NDArray[np.uint8]:
        # In the doubled block, most reads are one slice; only a chunk longer than a period is tiled.
        first, count = (start + begin * columns) % (len(block) // 2), (end - begin) * columns
        turns = -(-(first + count) // len(block))
        values = block if turns == 1 else np.tile(block, turns)
        return values[first : first + count].reshape(end - begin, columns).view(np.uint8)

    return read
