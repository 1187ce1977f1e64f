"""The set of revoked ids: it never forgets, at 8 bytes per id."""

import secrets
import sys

import pytest

from gpulease.daemon.leases.table_state import RevokedIds, mark_of


def test_the_set_has_what_was_added() -> None:
    ids = [secrets.randbits(128) for _ in range(2000)]
    others = [secrets.randbits(128) for _ in range(2000)]
    known = RevokedIds(sorted(map(mark_of, ids[:1000])))
    for lease_id in ids[900:]:
        known.add(lease_id)
    assert len(known) == 2000
    assert all(lease_id in known for lease_id in ids)
    assert not any(lease_id in known for lease_id in others)


def test_a_million_ids_cost_eight_megabytes() -> None:
    known = RevokedIds(range(0, 3_000_000, 3))
    known.add(1)
    assert 1 in known
    assert 2 not in known
    assert sys.getsizeof(known._marks) < 9_200_000


@pytest.mark.parametrize("marks", [[2, 1], [1, 1]])
def test_marks_out_of_order_are_refused(marks: list[int]) -> None:
    with pytest.raises(ValueError, match="ascending"):
        RevokedIds(marks)
