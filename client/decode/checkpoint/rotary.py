"""Rotary embeddings: frequencies, their scaling (linear, or Llama 3's), and the tables of cosines and sines.

The tables have the same bits on every host, because only decimal arithmetic and IEEE sums and products compute them.
Hosts' own powers and cosines differ in their last bits, which shows in f32 at position 8,192.
"""

import math
from decimal import Context, Decimal, localcontext
from typing import Final

import numpy as np
from numpy.typing import NDArray

from gpulease.client.decode.model_config import LinearScaling, ModelConfig

DIGITS: Final = Context(prec=50)
HALF_PI: Final = Decimal("1.5707963267948966192313216916397514420985846996875529")

PART_BITS: Final = 27
"""Bits of each part of pi / 2. The product of a part and up to 2^26 quarter turns is exact in f64."""

SINE: Final = [(-1) ** k / math.factorial(2 * k + 1) for k in range(9)]
COSINE: Final = [(-1) ** k / math.factorial(2 * k) for k in range(10)]
"""Taylor coefficients, exact to 2^-53 within an eighth of a turn."""

Floats = NDArray[np.float64]


def divisors_of(config: ModelConfig) -> Floats:
    """Return the divisors of the head_width / 2 frequencies; ones if the config has no scaling.

    A linear scaling divides all frequencies by its factor. Llama 3's rule, as in transformers'
    _compute_llama3_parameters: wavelengths above original_context / low_frequency_factor are scaled by the factor,
    those below original_context / high_frequency_factor are not, and those in between are scaled partly.
    """
    scaling = config.rope_scaling
    frequencies = frequencies_of(config)
    if scaling is None:
        return np.ones_like(frequencies)
    if isinstance(scaling, LinearScaling):
        return np.full_like(frequencies, scaling.factor)
    # How often each frequency turns within the original context.
    turns = scaling.original_context * frequencies / (2 * math.pi)
    low, high = scaling.low_frequency_factor, scaling.high_frequency_factor
    # 1 where a frequency stays as it is, 0 where it is divided by the whole factor.
    share = np.clip((turns - low) / (high - low), 0.0, 1.0)
    return np.asarray(1.0 / ((1.0 - share) / scaling.factor + share))


def frequencies_of(config: ModelConfig) -> Floats:
    """Return the head_width / 2 frequencies, in radians per position, before any scaling."""
    # Decimal powers, because a host's own pow differs in the last bit between C libraries.
    base, width = Decimal(config.rope_theta), config.head_width
    with localcontext(DIGITS):
        return np.array([float(base ** (Decimal(-i) / width)) for i in range(0, width, 2)])


def rotary_tables(
    config: ModelConfig, divisors: Floats, begin: int, end: int
) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """Return cosines and sines [end - begin, head_width / 2] of positions [begin, end), computed in f64."""
    angles = np.outer(np.arange(begin, end), frequencies_of(config) / divisors)
    # Cody and Waite's reduction: subtract the nearest number of quarter turns, in parts of pi / 2 with exact products,
    # exact, so that the rest keeps its precision at large positions.
    quarters = np.rint(angles * (2 / math.pi))
    rest = angles
    for part in PARTS:
        rest = rest - quarters * part
    square = rest * rest
    # Both from polynomials in the rest, within an eighth of a turn, where Taylor's series are exact enough.
    sine, cosine = rest * _polynomial(SINE, square), _polynomial(COSINE, square)
    # By the quarter that the angle is in, the two are swapped and negated.
    quarter = quarters.astype(np.int64) & 3
    cosines = np.choose(quarter, [cosine, -sine, -cosine, sine])
    sines = np.choose(quarter, [sine, cosine, -sine, -cosine])
    return cosines.astype(np.float32), sines.astype(np.float32)


def _parts_of(value: Decimal) -> list[float]:
    """Return a number as a sum of three floats, the first two of which have at most `PART_BITS` bits."""
    parts = []
    with localcontext(DIGITS):
        for bits in (PART_BITS - 1, 2 * PART_BITS - 1):
            parts.append(math.floor(value * 2**bits) / 2**bits)
            # What remains is exact in decimals, and goes into the next part.
            value -= Decimal(parts[-1])
    return [*parts, float(value)]


PARTS: Final = _parts_of(HALF_PI)


def _polynomial(coefficients: list[float], x: Floats) -> Floats:
    # Horner's scheme from the highest coefficient, in IEEE products and sums.
    total = np.full_like(x, coefficients[-1])
    for coefficient in reversed(coefficients[:-1]):
        total = total * x + coefficient
    return total
