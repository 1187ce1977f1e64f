"""Regions come under their leases, and nothing of a hostile list is lost or shown twice."""

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from gpulease.client.console.reports import as_tree

NAMES = st.sampled_from(["a", "b", "c", "d"])
PAIRS = st.lists(st.tuples(NAMES, st.sampled_from(["", "a", "b", "c", "z"])), max_size=8)
"""(id, id of its lease) as a daemon may send them: ids twice, regions of regions, of themselves, of nothing."""


def tree_of(found: list[tuple[str, str]]) -> list[tuple[str, str]]:
    return as_tree(found, lambda item: item[0], lambda item: item[1])


@given(PAIRS)
def test_every_item_is_shown_once(found: list[tuple[str, str]]) -> None:
    assert Counter(tree_of(found)) == Counter(found)


@given(PAIRS)
def test_leases_keep_their_order(found: list[tuple[str, str]]) -> None:
    assert [item for item in tree_of(found) if not item[1]] == [item for item in found if not item[1]]


def test_regions_come_directly_under_their_lease_in_their_order() -> None:
    found = [("r2", "b"), ("a", ""), ("r1", "a"), ("b", ""), ("r3", "b"), ("r0", "a"), ("lost", "z")]
    assert [name for name, _ in tree_of(found)] == ["a", "r1", "r0", "b", "r2", "r3", "lost"]
