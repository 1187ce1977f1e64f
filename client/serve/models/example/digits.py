"""The example's weights and their reference: a classifier of handwritten digits, 8 x 8 pixels of 0 to 1.

    python -m gpulease.client.serve.models.example.digits [FOLDER]

makes `digits.weights`, `digits-small.weights` and `digits-test.npz`, by default in this file's folder. The images are
those that scikit-learn ships (the UCI repository's optical recognition of handwritten digits). The test file contains
the images that no network was trained on, so that the example and its tests do not need scikit-learn.

All randomness has fixed seeds. Another processor's linear algebra may round differently and give other, equally good
weights.
"""

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Self

import numpy as np
from numpy.typing import NDArray

HERE: Final = Path(__file__).parent

Floats = NDArray[np.float32]

PIXELS: Final = 64
DIGITS: Final = 10
FULL_SCALE: Final = 16.0
"""A pixel's largest value in the data set."""

HIDDEN: Final = {"digits": 64, "digits-small": 16}
"""Units of the hidden layer, by model."""

TESTS: Final = "digits-test.npz"

TEST_EVERY: Final = 5
"""Every fifth image is kept for tests, and not trained on."""

_SEED: Final = 7
_EPOCHS: Final = 120
_BATCH: Final = 32
_RATE: Final = 0.05
_MOMENTUM: Final = 0.9
_DECAY: Final = 1e-4


@dataclass(frozen=True, slots=True)
class Weights:
    """The weights of one network, float32 arrays as the kernel reads them.

    Attributes:
        first: (PIXELS, hidden).
        first_bias: (hidden,).
        last: (hidden, DIGITS).
        last_bias: (DIGITS,).
    """

    first: Floats
    first_bias: Floats
    last: Floats
    last_bias: Floats

    def to_bytes(self) -> bytes:
        """Return the weights in the kernel's order, little-endian."""
        return b"".join(part.astype("<f4").tobytes() for part in self._parts())

    @classmethod
    def from_bytes(cls, data: bytes, hidden: int) -> Self:
        """Return the weights that `to_bytes` wrote, for a hidden layer of `hidden` units."""
        sizes = np.cumsum([PIXELS * hidden, hidden, hidden * DIGITS])
        first, bias, last, last_bias = np.split(np.frombuffer(data, "<f4"), sizes)
        return cls(first.reshape(PIXELS, hidden), bias, last.reshape(hidden, DIGITS), last_bias)

    def scores(self, images: Floats) -> Floats:
        """Return the reference scores, (images, DIGITS) float32. The largest of an image's ten scores is its digit.

        Args:
            images: (images, PIXELS) float32.
        """
        # One hidden layer of rectified linear units, computed as in digits.cu.
        units = np.maximum(images @ self.first + self.first_bias, 0)
        scores: Floats = units @ self.last + self.last_bias
        return scores

    def _parts(self) -> tuple[Floats, ...]:
        return self.first, self.first_bias, self.last, self.last_bias


def load_weights(model: str, folder: Path = HERE) -> Weights:
    """Read the weights of a model in HIDDEN from its file."""
    return Weights.from_bytes((folder / f"{model}.weights").read_bytes(), HIDDEN[model])


def load_tests(folder: Path = HERE) -> tuple[Floats, NDArray[np.uint8]]:
    """Return the images that no network was trained on, (images, PIXELS) float32, and their digits, (images,) uint8."""
    with np.load(folder / TESTS, allow_pickle=False) as archive:
        return archive["pixels"].astype(np.float32) / np.float32(FULL_SCALE), archive["digits"]


def train(images: Floats, digits: NDArray[np.uint8], hidden: int, epochs: int = _EPOCHS) -> Weights:
    """Train by stochastic gradient descent with momentum on the cross entropy.

    Args:
        images: (images, PIXELS) float32.
        digits: (images,) uint8.
        hidden: Units of the hidden layer.
        epochs: Passes over the images.
    """
    draw = np.random.default_rng(_SEED)
    sizes = ((PIXELS, hidden), (hidden,), (hidden, DIGITS), (DIGITS,))
    # He initialisation for the layer of rectified units; biases begin at zero.
    parts = [(draw.normal(0, (2 / size[0]) ** 0.5, size) if len(size) == 2 else np.zeros(size)) for size in sizes]
    steps = [np.zeros_like(part) for part in parts]
    targets = np.eye(DIGITS)[digits]
    for epoch in range(epochs):
        # A new order in each epoch, and a learning rate that falls linearly to zero.
        order = draw.permutation(len(images))
        rate = _RATE * (1 - epoch / epochs)
        for start in range(0, len(order), _BATCH):
            chosen = order[start : start + _BATCH]
            for part, step, slope in zip(parts, steps, _gradients(parts, images[chosen], targets[chosen]), strict=True):
                step *= _MOMENTUM
                step -= rate * (slope + _DECAY * part)
                part += step
    return Weights(*(part.astype(np.float32) for part in parts))


def _gradients(parts: list[Any], images: Floats, targets: Any) -> tuple[Any, ...]:
    first, first_bias, last, last_bias = parts
    units = np.maximum(images @ first + first_bias, 0)
    scores = units @ last + last_bias
    probabilities = np.exp(scores - scores.max(1, keepdims=True))
    # The gradient of softmax and cross entropy together is the difference of the probabilities.
    errors = (probabilities / probabilities.sum(1, keepdims=True) - targets) / len(images)
    hidden_errors = (errors @ last.T) * (units > 0)
    return images.T @ hidden_errors, hidden_errors.sum(0), units.T @ errors, errors.sum(0)


def data_set() -> tuple[NDArray[np.uint8], NDArray[np.uint8]]:
    """Return pixels of 0 to 16, (images, PIXELS) uint8, and digits, (images,) uint8, as scikit-learn ships them."""
    from sklearn.datasets import load_digits

    dataset = load_digits()
    return dataset.data.astype(np.uint8), dataset.target.astype(np.uint8)


def main(folder: Path = HERE) -> None:
    """Train both networks, and write the three files to `folder`."""
    pixels, digits = data_set()
    is_test = np.arange(len(pixels)) % TEST_EVERY == 0
    np.savez_compressed(folder / TESTS, pixels=pixels[is_test], digits=digits[is_test])
    images = pixels.astype(np.float32) / np.float32(FULL_SCALE)
    for model, hidden in HIDDEN.items():
        weights = train(images[~is_test], digits[~is_test], hidden)
        (folder / f"{model}.weights").write_bytes(weights.to_bytes())
        right = (weights.scores(images[is_test]).argmax(1) == digits[is_test]).mean()
        print(f"{model}: {right:.4f} of {is_test.sum()} test images right")


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
