"""Rotary embeddings: frequencies, their scaling, and the tables of cosines and sines.

The tables have the same bits on every host, because they are computed only with decimal arithmetic and IEEE sums and
products. The `pow` and `cos` of different hosts differ in their last bits, which shows in f32 from position 8,192 on.
"""

import math
from dataclasses import dataclass, replace
from decimal import Context, Decimal, localcontext
from typing import Final

import numpy as np
from numpy.typing import NDArray

from gpulease.client.decode.model_config import LinearScaling, LongScaling, ModelConfig, YarnScaling

DIGITS: Final = Context(prec=50)
HALF_PI: Final = Decimal("1.5707963267948966192313216916397514420985846996875529")

PART_BITS: Final = 27
"""Number of bits of each part of pi / 2. The product of a part and up to 2^26 quarter turns is exact in f64."""

MIN_DIVISOR: Final = 0.25
"""Minimum divisor of a frequency in a file. Published models have divisors of about 1 or more. With this minimum, the
angles of MAX_CONTEXT positions are still reduced exactly (`PART_BITS`). Much smaller divisors would make them
infinite."""

SINE: Final = [(-1) ** k / math.factorial(2 * k + 1) for k in range(9)]
COSINE: Final = [(-1) ** k / math.factorial(2 * k) for k in range(10)]
"""Taylor coefficients, exact to 2^-53 within an eighth of a turn."""

Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True, eq=False)
class Rotation:
    """The rotary embedding: how a position rotates the values of each head.

    Attributes:
        divisors: Divisors of the frequencies; all 1 if the frequencies are not scaled.
        attention_factor: The factor by which cosines and sines are multiplied.
    """

    divisors: Floats
    attention_factor: float = 1.0


def rotation_of(config: ModelConfig, positions: int) -> Rotation:
    """Return the rotation for an engine with sequences of up to `positions` positions.

    The rules come from transformers' modeling_rope_utils. A linear scaling divides all frequencies by its factor. Llama
    3's scaling multiplies wavelengths above original_context / low_frequency_factor by the factor, leaves wavelengths
    below original_context / high_frequency_factor unchanged, and interpolates between the two limits. YaRN interpolates
    between the two pairs of a head's values that turn beta_fast and beta_slow times within the original context.

    LongRoPE has two lists of divisors. In transformers, a sequence's length decides which is used: when it exceeds the
    original context, all of its keys are computed again. Here `positions` decides for all sequences, because keys in
    memory can't change.
    """
    scaling = config.rope_scaling
    frequencies = frequencies_of(config)
    if scaling is None:
        return Rotation(np.ones_like(frequencies))
    if isinstance(scaling, LinearScaling):
        return Rotation(np.full_like(frequencies, scaling.factor))
    if isinstance(scaling, LongScaling):
        divisors = scaling.long if positions > scaling.original_context else scaling.short
        return Rotation(np.array(divisors, np.float64), scaling.attention_factor)
    if isinstance(scaling, YarnScaling):
        low, high = _yarn_range(config, scaling)
        # The share is 1 for the pairs before the range, 0 for those after it, and falls linearly within it.
        share = 1.0 - np.clip((np.arange(len(frequencies)) - low) / (high - low), 0.0, 1.0)
        return Rotation(_partly_divided(share, scaling.factor), scaling.attention_factor)
    # How often each frequency turns within the original context.
    turns = scaling.original_context * frequencies / (2 * math.pi)
    slow, fast = scaling.low_frequency_factor, scaling.high_frequency_factor
    return Rotation(_partly_divided(np.clip((turns - slow) / (fast - slow), 0.0, 1.0), scaling.factor))


def _partly_divided(share: Floats, factor: float) -> Floats:
    """Return the divisors: 1 where a frequency's share is 1, and the factor where it is 0."""
    return np.asarray(1.0 / ((1.0 - share) / factor + share))


def _yarn_range(config: ModelConfig, scaling: YarnScaling) -> tuple[float, float]:
    """Return the pairs of a head's values between which YaRN's ramp goes from 1 to 0 (find_correction_range)."""
    width, base = 2 * config.turned_pairs, Decimal(config.rope_theta)
    with localcontext(DIGITS):

        def pair(turns: float) -> Decimal:
            # The pair, as a fraction, whose frequency turns this often within the original context.
            wavelengths = Decimal(scaling.original_context) / (Decimal(turns) * 4 * HALF_PI)
            return width * wavelengths.ln() / (2 * base.ln())

        low, high = pair(scaling.beta_fast), pair(scaling.beta_slow)
        if scaling.is_truncated:
            low, high = Decimal(math.floor(low)), Decimal(math.ceil(high))
        low, high = max(low, Decimal(0)), min(high, Decimal(width - 1))
        # Widen an empty range, as transformers does, to give the ramp a slope.
        return float(low), float(high + Decimal("0.001") if low == high else high)


def yarn_attention_factor(factor: float, mscale: float, mscale_all: float) -> float:
    """Return YaRN's attention factor for a file that names none. An mscale that the file does not have is 0."""
    if mscale and mscale_all:
        return _magnitude(factor, mscale) / _magnitude(factor, mscale_all)
    return _magnitude(factor, 1.0)


def _magnitude(factor: float, scale: float) -> float:
    if factor <= 1:
        return 1.0
    with localcontext(DIGITS):
        return float(Decimal("0.1") * Decimal(scale) * Decimal(factor).ln() + 1)


def long_attention_factor(factor: float, original_context: int) -> float:
    """Return LongRoPE's attention factor for a file that names none. `original_context` must be at least 2."""
    if factor <= 1:
        return 1.0
    with localcontext(DIGITS):
        return float((1 + Decimal(factor).ln() / Decimal(original_context).ln()).sqrt())


def frequencies_of(config: ModelConfig) -> Floats:
    """Return the frequency of each rotated pair, in radians per position, before any scaling."""
    # Use decimal powers, because `pow` differs in the last bit between C libraries.
    base, width = Decimal(config.rope_theta), 2 * config.turned_pairs
    with localcontext(DIGITS):
        return np.array([float(base ** (Decimal(-i) / width)) for i in range(0, width, 2)])


def local_rotary_tables(config: ModelConfig, begin: int, end: int) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """Return the tables for layers with a window, for a model with the separate base `local_rope_theta`."""
    assert config.local_rope_theta is not None
    local = replace(config, rope_theta=config.local_rope_theta, rope_scaling=None)
    return rotary_tables(local, rotation_of(local, end), begin, end)


def rotary_tables(
    config: ModelConfig, rotation: Rotation, begin: int, end: int
) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """Return cosines and sines [end - begin, head_width / 2] of positions [begin, end), computed in f64.

    Both are multiplied by the rotation's attention factor. Pairs that do not turn have a cosine of 1 and a sine of 0.
    """
    angles = np.outer(np.arange(begin, end), frequencies_of(config) / rotation.divisors)
    # Cody and Waite's reduction: subtract the nearest number of quarter turns, in parts of pi / 2 with exact products,
    # so that the rest is precise at large positions.
    quarters = np.rint(angles * (2 / math.pi))
    rest = angles
    for part in PARTS:
        rest = rest - quarters * part
    square = rest * rest
    # Compute both with polynomials: the rest is within an eighth of a turn, where Taylor series are exact enough.
    sine, cosine = rest * _polynomial(SINE, square), _polynomial(COSINE, square)
    # Swap and negate sine and cosine, depending on the quarter turn of the angle.
    quarter = quarters.astype(np.int64) & 3
    cosines = np.choose(quarter, [cosine, -sine, -cosine, sine])
    sines = np.choose(quarter, [sine, cosine, -sine, -cosine])
    factor, padding = rotation.attention_factor, ((0, 0), (0, config.head_width // 2 - config.turned_pairs))
    return (
        np.pad((cosines * factor).astype(np.float32), padding, constant_values=1),
        np.pad((sines * factor).astype(np.float32), padding),
    )


def turned_order(config: ModelConfig) -> NDArray[np.int64]:
    """Return, for each of a head's values in the kernels' order, its index in Hugging Face's order.

    The kernels turn value i of the first half together with value i of the second half. If only the first
    `turned_width` values turn, Hugging Face pairs them with each other. So in the kernels' order, each half begins with
    values that turn, followed by values that do not. q and k have the same order, so their products stay the same.
    """
    half, pairs = config.head_width // 2, config.turned_pairs
    first, rest = np.arange(pairs), np.arange(half - pairs)
    return np.concatenate([first, 2 * pairs + rest, pairs + first, half + pairs + rest])


def _parts_of(value: Decimal) -> list[float]:
    """Return a number as a sum of three floats, the first two of which have at most `PART_BITS` bits."""
    parts = []
    with localcontext(DIGITS):
        for bits in (PART_BITS - 1, 2 * PART_BITS - 1):
            parts.append(math.floor(value * 2**bits) / 2**bits)
            # The remainder is exact in decimals, and goes into the next part.
            value -= Decimal(parts[-1])
    return [*parts, float(value)]


PARTS: Final = _parts_of(HALF_PI)


def _polynomial(coefficients: list[float], x: Floats) -> Floats:
    # Horner's scheme from the highest coefficient, in IEEE products and sums.
    total = np.full_like(x, coefficients[-1])
    for coefficient in reversed(coefficients[:-1]):
        total = total * x + coefficient
    return total
