"""Compare `sample` with a separate implementation in numpy's float64."""

import math
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from gpulease.client.decode.engine.kernel_library import manifest
from gpulease.client.decode.row_records import RESULT, log_probabilities
from helpers.decode_kernels import Array, KernelRig, step_rows

ROUNDING = 1e-5
"""Share of the weights. A sum of f32 that is this near to a border may be on either side of it."""


def sampled(rig: KernelRig, logits: Array, rows: Array) -> Array:
    """Return the results of logits [R, V], or of parts [splits, R, V]."""
    parts = np.ascontiguousarray(logits if logits.ndim == 3 else logits[None], np.float32)
    splits, count, vocabulary = parts.shape
    results = np.zeros(count, RESULT)
    blocks = -(-vocabulary // manifest().kernels["scan"].constants["BLOCK_V"])
    scanned: dict[str, Any] = {
        name: np.full((count, blocks), -1, dtype)
        for name, dtype in (("bests", np.float32), ("tokens", np.int32), ("totals", np.float32))
    }
    shape: dict[str, Any] = {"splits": splits, "stride": count * vocabulary, "V": vocabulary, "blocks": blocks}
    rig.launch("scan", (count, blocks), parts=parts, **scanned, **shape)
    rig.launch("sample", (count,), results=results, rows=rows, parts=parts, **scanned, **shape)
    return results


def philox(seeds: Array, positions: Array) -> NDArray[np.uint32]:
    """Return the first word of Philox4x32-10 (Salmon and others, SC11) for the counter (position, 0, 0, 0)."""
    mask = np.uint64(0xFFFFFFFF)
    zeros = np.zeros(len(seeds), np.uint64)
    counter = [positions.astype(np.uint64), zeros, zeros, zeros]
    key = [seeds & mask, seeds >> np.uint64(32)]
    for _ in range(10):
        first, second = counter[0] * np.uint64(0xD2511F53), counter[2] * np.uint64(0xCD9E8D57)
        counter = [
            second >> np.uint64(32) ^ counter[1] ^ key[0],
            second & mask,
            first >> np.uint64(32) ^ counter[3] ^ key[1],
            first & mask,
        ]
        key = [key[0] + np.uint64(0x9E3779B9) & mask, key[1] + np.uint64(0xBB67AE85) & mask]
    return counter[0].astype(np.uint32)


def uniforms(rows: Array) -> NDArray[np.float64]:
    return (philox(rows["seed"], rows["position"]) >> 8) / 2.0**24


class Choice:
    """The tokens that a row keeps, and the token that its random number chooses.

    `weights` [V] are 0 for what is not kept. `is_clear` is False where the kept set depends on a sum's rounding.
    """

    def __init__(self, logits: Array, row: Any) -> None:
        logits = logits.astype(np.float64)
        weights = np.exp((logits - logits.max()) * float(row["inverse_temperature"]))
        self.is_clear = True
        if 0 < row["top_k"] < len(logits):
            weights[logits < np.sort(logits)[-row["top_k"]]] = 0
        if row["top_p"] < 1:
            _, where = np.unique(-logits, return_inverse=True)
            reached = np.bincount(where, weights).cumsum() / weights.sum()
            last = int(np.argmax(reached >= row["top_p"]))
            self.is_clear = bool(abs(reached - row["top_p"]).min() > ROUNDING)
            weights[where > last] = 0
        self.weights = weights
        self.sums = weights.cumsum() / weights.sum()

    def token(self, u: float) -> int | None:
        """Return the token that a number chooses; None if the number lies within rounding of a border."""
        at = int(np.searchsorted(self.sums, u, side="right"))
        return at if self.is_clear and abs(self.sums - u).min() > ROUNDING else None


def random_rows(rng: np.random.Generator, count: int, **fields: Any) -> Array:
    seeds = rng.integers(0, 2**64, count, np.uint64)
    return step_rows(count, **{"seed": seeds, "position": rng.integers(0, 2**31, count), "top_p": 1, **fields})


def check_choices(results: Array, logits: Array, rows: Array) -> int:
    """Compare each row's token with numpy's. Returns how many rows were compared."""
    compared = 0
    for result, own, row, u in zip(results, logits, rows, uniforms(rows), strict=True):
        token = Choice(own, row).token(u)
        if token is not None:
            assert result["token"] == token, row
            compared += 1
    return compared


# --- greedy ---


def test_greedy_takes_the_highest_logit_and_of_equal_ones_the_lowest_token(rig: KernelRig) -> None:
    rng = np.random.default_rng(1)
    logits = rng.integers(-3, 4, (8, 2500)).astype(np.float32)
    logits[1] = -np.inf
    logits[1, 2300] = -7
    logits[2] = 3e38
    logits[3] = -3e38
    logits[4] = np.linspace(-1, 1, 2500)
    logits[5, 2499] = np.inf
    results = sampled(rig, logits, step_rows(8))
    assert results["token"].tolist() == logits.argmax(1).tolist()
    assert results["top_logit"].tolist() == results["logit"].tolist() == logits.max(1).tolist()


def test_parts_of_logits_are_added_in_ascending_order(rig: KernelRig) -> None:
    """In f32, 1 added to 1e8 is lost; it is kept if 1e8 is subtracted first."""
    parts = np.zeros((3, 1, 40), np.float32)
    parts[:, 0, 7] = 1e8, -1e8, 1
    parts[:, 0, 5] = 1, 1e8, -1e8
    result = sampled(rig, parts, step_rows(1))[0]
    assert (result["token"], result["logit"]) == (7, 1)


@pytest.mark.parametrize("vocabulary", [1, 2, 2047, 2048, 2049])
def test_every_token_of_a_vocabulary_can_be_chosen_and_none_behind_it(rig: KernelRig, vocabulary: int) -> None:
    """The values after a row's logits are the logits of the next row, which are higher."""
    logits = np.repeat(np.arange(4, dtype=np.float32)[:, None], vocabulary, 1)
    rows = step_rows(4, inverse_temperature=[0, 1, 1, 1], top_k=[0, 0, 1, 0], top_p=[1, 1, 1, 0.5])
    results = sampled(rig, logits, rows)
    expected = [0, *(uniforms(rows)[1:] * vocabulary).astype(int)]
    assert results["token"].tolist() == expected
    assert results["total"].tolist() == [vocabulary] * 4


# --- numbers ---


def test_the_reference_s_philox_gives_the_authors_numbers() -> None:
    """The expected value is the known answer of Random123 for counter 0 and key 0."""
    assert philox(np.zeros(1, np.uint64), np.zeros(1)).tolist() == [0x6627E8D5]


def test_numbers_are_philox_s_of_seed_and_position(rig: KernelRig) -> None:
    """Of 4096 equal logits, the first 12 bits of the number choose one exactly."""
    rng = np.random.default_rng(2)
    rows = random_rows(rng, 64, inverse_temperature=1)
    rows["seed"][:4] = 0, 1, 2**32, 2**64 - 1
    rows["position"][:4] = 0, 2**31 - 1, 0, 1
    results = sampled(rig, np.zeros((64, 4096)), rows)
    assert results["token"].tolist() == (philox(rows["seed"], rows["position"]) >> 20).tolist()


@pytest.mark.exhaustive
def test_numbers_are_philox_s_in_16_bits(rig: KernelRig) -> None:
    rows = random_rows(np.random.default_rng(3), 16, inverse_temperature=1)
    results = sampled(rig, np.zeros((16, 1 << 16)), rows)
    assert results["token"].tolist() == (philox(rows["seed"], rows["position"]) >> 16).tolist()


def test_a_row_s_result_depends_on_nothing_beside_it(rig: KernelRig) -> None:
    rng = np.random.default_rng(4)
    rows = random_rows(rng, 12, inverse_temperature=0.7, top_k=40, top_p=0.9)
    logits = rng.normal(0, 3, (12, 300)).astype(np.float32)
    alone = np.concatenate([sampled(rig, logits[i : i + 1], rows[i : i + 1]) for i in range(12)])
    order = rng.permutation(12)
    assert sampled(rig, logits[order], rows[order]).tobytes() == alone[order].tobytes()


# --- what is kept, and how often it is chosen ---

SETTINGS: dict[str, dict[str, float]] = {
    "temperature": {"inverse_temperature": 1.7},
    "top_k": {"inverse_temperature": 1, "top_k": 7},
    "top_p": {"inverse_temperature": 1, "top_p": 0.8},
    "both": {"inverse_temperature": 0.8, "top_k": 9, "top_p": 0.85},
}


@pytest.mark.parametrize(
    "setting", ["temperature", "top_k", *(pytest.param(s, marks=pytest.mark.exhaustive) for s in ("top_p", "both"))]
)
def test_tokens_are_those_that_are_kept_as_often_as_is_probable(rig: KernelRig, setting: str) -> None:
    """Chi-square test of 240 fixed pairs of seed and position.

    Tokens with logits equal at top_k's border are all kept.
    """
    rng = np.random.default_rng(5)
    logits = rng.permutation(np.r_[np.round(rng.normal(1, 1, 14) * 2) / 2, np.full(20, -9.0)]).astype(np.float32)
    rows = random_rows(rng, 240, **SETTINGS[setting])
    tokens = sampled(rig, np.tile(logits, (240, 1)), rows)["token"]
    choice = Choice(logits, rows[0])
    assert choice.is_clear
    expected = 240 * choice.weights / choice.weights.sum()
    found = np.bincount(tokens, minlength=len(logits))
    assert not found[choice.weights == 0].any()
    assert found[expected > 8].all()
    often = expected >= 5
    spread = ((found - expected)[often] ** 2 / expected[often]).sum()
    # The mean of chi-square plus five standard deviations.
    assert spread < often.sum() + 5 * math.sqrt(2 * often.sum())


def test_every_row_chooses_what_numpy_does(rig: KernelRig) -> None:
    rng = np.random.default_rng(6)
    logits, rows = mixed(rng, 48, 700)
    assert check_choices(sampled(rig, logits, rows), logits, rows) > 40


@pytest.mark.exhaustive
@pytest.mark.parametrize("vocabulary", [3, 100, 2048, 5000])
def test_every_row_of_many_chooses_what_numpy_does(rig: KernelRig, vocabulary: int) -> None:
    rng = np.random.default_rng(vocabulary)
    logits, rows = mixed(rng, 128, vocabulary)
    assert check_choices(sampled(rig, logits, rows), logits, rows) > 100


def mixed(rng: np.random.Generator, count: int, vocabulary: int) -> tuple[Array, Array]:
    """Return logits of all sizes, many of them equal, and settings of all kinds."""
    logits = rng.normal(0, 1, (count, vocabulary)) * rng.choice([0.01, 1, 4, 30], (count, 1))
    logits = np.where(rng.random((count, 1)) < 0.5, np.round(logits), logits).astype(np.float32) + 0
    logits[rng.random(logits.shape) < 0.01] = -np.inf
    rows = random_rows(
        rng, count,
        inverse_temperature=rng.choice([0.01, 0.5, 1, 1.43, 20], count),
        top_k=rng.choice([0, 1, 2, 40, vocabulary - 1, vocabulary, 2**31 - 1], count),
        top_p=rng.choice([1e-6, 0.1, 0.5, 0.9, 0.999, 1], count),
    )  # fmt: skip
    return logits, rows


def test_the_logarithm_of_probability_is_within_2e6_of_exact(rig: KernelRig) -> None:
    rng = np.random.default_rng(7)
    logits = rng.normal(0, 4, (8, 3000)).astype(np.float32)
    results = sampled(rig, logits, random_rows(rng, 8, inverse_temperature=1.3, top_k=50))
    exact = logits.astype(np.float64)
    exact -= np.log(np.exp(exact).sum(1, keepdims=True))
    assert abs(log_probabilities(results) - exact[np.arange(8), results["token"]]).max() < 2e-6


def test_zeros_of_either_sign_are_equal(rig: KernelRig) -> None:
    """A top_k of 1 keeps both zeros, so some number chooses each."""
    logits = np.tile(np.array([-0.0, 0.0, -5], np.float32), (32, 1))
    rows = step_rows(32, position=np.arange(32), inverse_temperature=1, top_k=1, top_p=1)
    assert set(sampled(rig, logits, rows)["token"]) == {0, 1}


# --- what nobody should ask for ---

STRANGE = np.array([0, 1e-45, 1e-30, 1e30, 3e38, np.inf, np.nan, -1], np.float32)


def test_no_setting_and_no_logit_gives_a_token_outside_the_vocabulary(rig: KernelRig) -> None:
    rng = np.random.default_rng(8)
    kinds = np.array([np.nan, -np.nan, np.inf, -np.inf, 3e38, -3e38, 0, 1e-45], np.float32)
    logits = rng.choice(kinds, (64, 50))
    logits[:8] = kinds[:, None]
    logits[8:16] = rng.normal(0, 1, (8, 50))
    logits[8:16, :3] = np.nan
    rows = random_rows(
        rng, 64,
        inverse_temperature=rng.choice(STRANGE, 64),
        top_p=rng.choice(STRANGE, 64),
        top_k=rng.choice([-(2**31), -1, 0, 1, 49, 50, 51, 2**31 - 1], 64),
    )  # fmt: skip
    tokens = sampled(rig, logits, rows)["token"]
    assert ((tokens >= 0) & (tokens < 50)).all()


def test_logits_that_are_no_numbers_are_not_chosen_while_there_are_others(rig: KernelRig) -> None:
    logits = np.full((32, 40), np.nan, np.float32)
    logits[:, 17] = -2
    rows = step_rows(
        32, position=np.arange(32), inverse_temperature=np.arange(32) % 2, top_k=np.arange(32) % 3, top_p=0.9
    )
    assert set(sampled(rig, logits, rows)["token"]) == {17}


def test_a_tiny_share_keeps_the_highest_logit_alone(rig: KernelRig) -> None:
    logits = np.random.default_rng(9).permuted(np.tile(np.arange(30, dtype=np.float32) / 100, (32, 1)), axis=1)
    rows = step_rows(32, position=np.arange(32), inverse_temperature=1, top_p=[1e-45, 1e-9] * 16)
    assert sampled(rig, logits, rows)["token"].tolist() == logits.argmax(1).tolist()


def test_a_padded_row_is_greedy(rig: KernelRig) -> None:
    logits = np.array([[1, 5, 2]], np.float32)
    rows = step_rows(1, position=-1, inverse_temperature=1e-3, top_p=1)
    assert sampled(rig, logits, rows)["token"][0] == 1
