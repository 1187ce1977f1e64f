"""The example's weights: made from the data set, and right on the test images."""

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from gpulease.client.serve.models.example.digits import HIDDEN, load_tests, load_weights
from helpers.daemon import python_environment

LEAST_RIGHT = {"digits": 0.97, "digits-small": 0.95}
MARGIN = 0.02
"""By how much weights may be worse that another processor's linear algebra rounded."""


@pytest.mark.parametrize("model", HIDDEN)
def test_the_kept_weights_know_digits(model: str) -> None:
    images, digits = load_tests()
    weights = load_weights(model)
    assert (weights.scores(images).argmax(1) == digits).mean() >= LEAST_RIGHT[model]
    assert weights.to_bytes() == type(weights).from_bytes(weights.to_bytes(), HIDDEN[model]).to_bytes()


@pytest.mark.exhaustive
def test_they_can_be_made_anew(tmp_path: Path) -> None:
    # In a process of its own: the libraries it needs keep threads.
    command = [sys.executable, "-P", "-m", "gpulease.client.serve.models.example.digits", str(tmp_path)]
    subprocess.run(command, check=True, env=python_environment(), stdout=subprocess.DEVNULL)
    images, digits = load_tests()
    made, made_digits = load_tests(tmp_path)
    np.testing.assert_array_equal(made, images)
    np.testing.assert_array_equal(made_digits, digits)
    for model, least in LEAST_RIGHT.items():
        scores = load_weights(model, tmp_path).scores(images)
        assert (scores.argmax(1) == digits).mean() >= least - MARGIN
