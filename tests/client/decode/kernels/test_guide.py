"""Compare `guide`, `sample_guided` and `rank` with numpy, and with `scan` and `sample` where no guide applies."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from gpulease.client.decode.engine.kernel_library import manifest
from gpulease.client.decode.row_records import (
    ENTRY,
    GUIDE,
    MAX_RANKS,
    NO_MASK,
    NO_TARGET,
    RANKED,
    RESULT,
    log_probabilities,
    mask_words,
)
from helpers.decode_kernels import Array, KernelRig, step_rows

BLOCK_V = manifest().kernels["scan"].constants["BLOCK_V"]
VOCABULARY = 2 * BLOCK_V + 77


def guides(rows: int, **fields: Any) -> Array:
    made = np.zeros(rows, GUIDE)
    made["mask"], made["target"] = NO_MASK, NO_TARGET
    for name, value in fields.items():
        made[name] = value
    return made


def entries(*changes: tuple[int, float, float, float]) -> Array:
    made = np.zeros(max(1, len(changes)), ENTRY)
    for entry, change in zip(made, changes, strict=False):
        entry["token"], entry["addend"], entry["divisor"], entry["subtrahend"] = change
    return made


def masks(vocabulary: int, *allowed: Sequence[int]) -> Array:
    made = np.zeros((max(1, len(allowed)), mask_words(vocabulary)), np.uint32)
    for mask, tokens in zip(made, allowed, strict=False):
        for token in tokens:
            mask[token // 32] |= np.uint32(1 << token % 32)
    return made


def computed(
    rig: KernelRig,
    parts: Array,
    rows: Array,
    its_guides: Array,
    its_entries: Array | None = None,
    its_masks: Any = None,
) -> tuple[Array, Array, Array]:
    """Return the results of a guided step, its guided logits, and the ranked tokens."""
    splits, count, vocabulary = parts.shape
    blocks = -(-vocabulary // BLOCK_V)
    scanned: dict[str, Any] = {
        name: np.full((count, blocks), -1, dtype)
        for name, dtype in (("bests", np.float32), ("tokens", np.int32), ("totals", np.float32))
    }
    chosen: dict[str, Any] = {
        "guided": np.zeros((count, vocabulary), np.float32),
        "bests": np.zeros((count, blocks), np.float32),
        "tokens": np.zeros((count, blocks), np.int32),
        "guides": its_guides,
    }
    results, ranked = np.zeros(count, RESULT), np.zeros((count, MAX_RANKS), RANKED)
    shape: dict[str, Any] = {"splits": splits, "stride": count * vocabulary, "V": vocabulary, "blocks": blocks}
    rig.launch("scan", (count, blocks), parts=parts, **scanned, **shape)
    rig.launch(
        "guide", (count, blocks), parts=parts, **chosen, entries=entries() if its_entries is None else its_entries,
        masks=masks(vocabulary) if its_masks is None else its_masks, mask_words=mask_words(vocabulary), **shape,
    )  # fmt: skip
    rig.launch(
        "sample_guided", (count,), results=results, parts=parts, rows=rows, **chosen, **shape,
        own_bests=scanned["bests"], own_tokens=scanned["tokens"], own_totals=scanned["totals"],
    )  # fmt: skip
    rig.launch(
        "rank", (count,), ranked=ranked, parts=parts, guides=its_guides, bests=scanned["bests"],
        tokens=scanned["tokens"], **shape,
    )  # fmt: skip
    return results, chosen["guided"], ranked


def random_parts(seed: int, count: int, vocabulary: int = VOCABULARY, splits: int = 2) -> Array:
    return np.random.default_rng(seed).normal(0, 2, (splits, count, vocabulary)).astype(np.float32)


def test_rows_that_nothing_guides_have_the_bits_of_an_unguided_step(rig: KernelRig) -> None:
    """This holds also in a step with other rows that are guided."""
    parts = random_parts(1, 4)
    rows = step_rows(4, seed=[1, 2, 3, 4], position=7, inverse_temperature=[0, 1.3, 0.7, 1], top_k=[0, 0, 40, 0])
    rows["top_p"] = [1, 0.9, 1, 1]
    own = guides(4, count=[0, 0, 2, 0], ranks=[0, 5, 0, 0], mask=[-1, -1, -1, 0])
    changes, allowed = entries((5, 0.5, 2.0, 1.0), (4000, 0.0, 1.5, -3.0)), masks(VOCABULARY, range(9, 4000))
    results, guided, _ = computed(rig, parts, rows, own, changes, allowed)
    blocks = -(-VOCABULARY // BLOCK_V)
    scanned: dict[str, Any] = {
        name: np.zeros((4, blocks), dtype)
        for name, dtype in (("bests", np.float32), ("tokens", np.int32), ("totals", np.float32))
    }
    shape: dict[str, Any] = {"splits": 2, "stride": 4 * VOCABULARY, "V": VOCABULARY, "blocks": blocks}
    plain = np.zeros(4, RESULT)
    rig.launch("scan", (4, blocks), parts=parts, **scanned, **shape)
    rig.launch("sample", (4,), results=plain, rows=rows, parts=parts, **scanned, **shape)
    assert results[:2].tobytes() == plain[:2].tobytes()
    assert guided[:2].tobytes() == (parts[0] + parts[1])[:2].tobytes()


def test_entries_change_their_tokens_logits_and_no_others(rig: KernelRig) -> None:
    """The entries have both signs, occur in every block and fill more than one tile.

    The bits are those of numpy's f32.
    """
    parts = random_parts(2, 2)
    logits = parts[0] + parts[1]
    rng = np.random.default_rng(3)
    tokens = rng.permutation(VOCABULARY)[:700]
    own = guides(2, first=[600, 0], count=[100, 600])
    changes = entries(
        *[(int(token), a, 1.0, b) for token, (a, b) in zip(tokens, rng.normal(size=(700, 2)), strict=True)]
    )
    changes["divisor"] = rng.uniform(0.5, 2, 700)
    _, guided, _ = computed(rig, parts, step_rows(2), own, changes)
    for row, (first, count) in enumerate([(600, 100), (0, 600)]):
        expected = logits[row].copy()
        its = changes[first : first + count]
        at = its["token"]
        value = expected[at] + its["addend"]
        divided = np.where(value > 0, value / its["divisor"], value * its["divisor"])
        expected[at] = divided - its["subtrahend"]
        assert guided[row].tobytes() == expected.tobytes()


def test_a_mask_allows_its_tokens_alone_and_probabilities_stay_the_row_s_own(rig: KernelRig) -> None:
    parts = random_parts(4, 3, splits=1)
    allowed = [3, BLOCK_V - 1, BLOCK_V, VOCABULARY - 1]
    rows = step_rows(3, inverse_temperature=[0, 1, 1], top_p=1, seed=[0, 5, 6])
    results, guided, _ = computed(rig, parts, rows, guides(3, mask=[1, 1, 0]), None, masks(VOCABULARY, [17], allowed))
    assert np.flatnonzero(np.isfinite(guided[0])).tolist() == allowed
    assert results["token"][0] == allowed[int(parts[0, 0, allowed].argmax())]
    assert results["token"][1] in allowed
    assert results["token"][2] == 17
    wide = parts[0].astype(np.float64)
    expected = wide[range(3), results["token"]] - np.log(np.exp(wide).sum(1))
    assert log_probabilities(results) == pytest.approx(expected, abs=1e-5)


def test_a_target_is_reported_instead_of_the_chosen_token(rig: KernelRig) -> None:
    parts = random_parts(5, 2, splits=1)
    results, _, _ = computed(rig, parts, step_rows(2), guides(2, target=[VOCABULARY - 1, NO_TARGET]))
    assert results["token"].tolist() == parts[0].argmax(1).tolist()
    assert results["logit"].tolist() == [parts[0, 0, -1], parts[0, 1].max()]


@pytest.mark.parametrize("vocabulary", [19, VOCABULARY])
def test_ranked_tokens_are_the_likeliest_in_order_and_of_equal_ones_the_lowest_first(
    rig: KernelRig, vocabulary: int
) -> None:
    parts = np.random.default_rng(6).integers(-9, 9, (2, 3, vocabulary)).astype(np.float32)
    logits = parts[0] + parts[1]
    ranks = min(20, vocabulary)
    _, _, ranked = computed(rig, parts, step_rows(3), guides(3, ranks=[ranks, 0, 3]))
    for row, count in ((0, ranks), (2, 3)):
        expected = np.argsort(-logits[row], kind="stable")[:count]
        assert ranked["token"][row, :count].tolist() == expected.tolist()
        assert ranked["logit"][row, :count].tolist() == logits[row, expected].tolist()
    assert not ranked[1].view(np.int32).any()


def test_ranks_behind_the_last_number_are_minus_infinity(rig: KernelRig) -> None:
    parts = np.full((1, 1, 30), np.nan, np.float32)
    parts[0, 0, 4] = 1
    _, _, ranked = computed(rig, parts, step_rows(1), guides(1, ranks=3))
    assert ranked["token"][0, 0] == 4
    assert ranked["logit"][0, :3].tolist() == [1, -np.inf, -np.inf]


def test_min_p_keeps_what_is_at_most_its_depth_below_the_highest(rig: KernelRig) -> None:
    logits = np.full((1, 64, 40), -3.0, np.float32)
    logits[0, :, 7], logits[0, :, 9], logits[0, :, 11] = 2, 1.5, 0.9
    rows = step_rows(64, seed=range(64), position=3, inverse_temperature=1, top_p=1, depth=1)
    results, _, _ = computed(rig, logits, rows, guides(64))
    assert set(results["token"].tolist()) == {7, 9}
    rows["depth"] = np.float32(1e-30)
    results, _, _ = computed(rig, logits, rows, guides(64))
    assert set(results["token"].tolist()) == {7}
