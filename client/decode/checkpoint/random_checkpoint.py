"""A model of random weights, for benchmarks and tests: any shape, no file."""

import hashlib
import zlib
from typing import Final, NoReturn

import numpy as np
from numpy.typing import NDArray

from gpulease.client.decode.checkpoint.model_tensors import model_tensors
from gpulease.client.decode.checkpoint.rotary import divisors_of
from gpulease.client.decode.checkpoint.tensors import RowReader, Tensor, TensorType, rounded_to_bf16
from gpulease.client.decode.decode_errors import ModelRejected
from gpulease.client.decode.model_config import ModelConfig, check_config

PERIOD: Final = (4 << 20) + 3
"""Values after which random weights repeat. Odd, so that no two rows of a matrix are equal; a model of billions of
values takes a moment to make."""

NORM_SPREAD: Final = 0.1
"""Standard deviation of the norms' weights around 1, and of biases around 0."""


class RandomCheckpoint:
    """Weights ~ N(0, 1 / columns), norms near 1, all bf16; equal for equal configs and seeds."""

    def __init__(self, config: ModelConfig, seed: int) -> None:
        """Raise ModelRejected for a shape that the engine does not compute."""
        self.name = f"random weights of seed {seed}"
        check_config(config, self.name)
        self.config = config
        self._seed = seed
        self._shapes = dict(model_tensors(config))
        most = max(int(np.prod(shape)) for shape in self._shapes.values())
        self._normal = np.random.default_rng(seed).standard_normal(min(PERIOD, most), np.float32)
        self._scaled: dict[tuple[float, float], NDArray[np.uint16]] = {}

    def tensor(self, name: str) -> Tensor:
        """Return one of the config's tensors. Raises KeyError for a name that is none of theirs."""
        shape = self._shapes[name]
        if len(shape) > 1:
            mean, spread = 0.0, shape[-1] ** -0.5
        else:
            mean, spread = float(name.endswith("norm.weight")), NORM_SPREAD
        if (mean, spread) not in self._scaled:
            values = rounded_to_bf16(self._normal * np.float32(spread) + np.float32(mean))
            # Twice, so that a chunk is a view wherever it begins.
            self._scaled[mean, spread] = np.concatenate([values, values])
        start = zlib.crc32(f"{self._seed} {name}".encode())
        return Tensor(name, shape, TensorType.BF16, _reader(self._scaled[mean, spread], start, shape[-1]))

    def rotary_divisors(self) -> NDArray[np.float64]:
        """Divisors [head_width / 2] of the rotary embeddings' frequencies."""
        return divisors_of(self.config)

    def sha256(self) -> str:
        """Digest of the shape and the seed, of which the weights are made."""
        return hashlib.sha256(repr((self.config, self._seed)).encode()).hexdigest()

    def tokenizer(self) -> NoReturn:
        """Raise ModelRejected: random weights know no text."""
        raise ModelRejected(f"{self.name} have no tokenizer", "Use token ids as prompts")


def _reader(block: NDArray[np.uint16], start: int, columns: int) -> RowReader:
    def read(begin: int, end: int) -> NDArray[np.uint8]:
        first, count = (start + begin * columns) % (len(block) // 2), (end - begin) * columns
        turns = -(-(first + count) // len(block))
        values = block if turns == 1 else np.tile(block, turns)
        return values[first : first + count].reshape(end - begin, columns).view(np.uint8)

    return read
