"""Rows of versions before this one, and of none."""

import json
from dataclasses import asdict
from enum import Enum
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpulease.daemon.leases.model import LeaseSnapshot, LeaseTerms
from gpulease.daemon.leases.persisted import LeaseRow, RegionRow
from gpulease.daemon.record.journal.rows import encode, read_lease, read_region, read_tombstone
from gpulease.protocol.lease_options import KEPT_OPTIONS

from .scenes import kept

LEASE_ROW = (
    *("lease_id", "tenant", "card_uuid", "size_bytes", "charge_bytes", "exclusivity", "generation", "state", "cause"),
    *("reason", "fault", "created_ns", "deadline_ns", "ended_ns", "ttl_ms", "max_kernel_ms", "waiting", "worker_pid"),
    *("submit_bytes", "orphan_ms", "regions_required", "region_number"),
    *("name", "epoch", "request_id", "fleet_bytes"),
    *("weight", "latency", "park_idle_ms", "parked_ns", "wait_ms", "is_cold", "misfit"),
)
"""The members of a lease's row, in their order: the file's format."""


def members_of(lease_id: int) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(encode(kept(lease_id, submit_bytes=40)))
    return found


def test_a_row_is_read_as_it_was_written() -> None:
    assert read_lease(encode(kept(5, submit_bytes=40))) == kept(5, submit_bytes=40)


def by_names(content: LeaseRow | LeaseSnapshot) -> bytes:
    """What a value is: its members by their names, without those that came later and mean nothing."""
    members = content._asdict()
    if isinstance(content, LeaseRow):
        members |= asdict(content.terms)
        members = {name: members[name] for name in LEASE_ROW}
    values = {name: value.value if isinstance(value, Enum) else value for name, value in members.items()}
    for later in (*LEASE_ROW[-15:], "parent_id"):
        # A weight of 1 means nothing, an idle time of 0 does; for all others it is what is false.
        if later == "park_idle_ms":
            is_default = values.get(later) is None
        else:
            is_default = values.get(later) == 1 if later == "weight" else not values.get(later)
        if is_default:
            values.pop(later, None)
    return json.dumps(values, separators=(",", ":")).encode()


@pytest.mark.exhaustive
@given(
    st.builds(
        LeaseRow,
        lease_id=st.integers(0, 2**128 - 1),
        terms=st.builds(
            LeaseTerms,
            epoch=st.integers(0, 3),
            fleet_bytes=st.integers(0, 3),
            # Whatever their types allow; placement leaves no `orphan_ms` of None.
            **(dict.fromkeys(KEPT_OPTIONS, ...) | {"orphan_ms": st.integers(0, 3)}),
        ),
        region_number=st.integers(0, 3),
        parked_ns=st.integers(0, 3),
        wait_ms=st.integers(0, 3),
        is_cold=st.booleans(),
        misfit=st.sampled_from(["", "a variable is elsewhere"]),
    )
)
def test_a_lease_is_written_by_its_names(lease: LeaseRow) -> None:
    assert encode(lease) == by_names(lease)
    assert read_lease(encode(lease)) == lease


@given(
    st.builds(
        LeaseSnapshot,
        lease_id=st.integers(0, 2**128 - 1),
        parent_id=st.integers(0, 3),
        name=st.sampled_from(["", "model-a"]),
        epoch=st.integers(0, 3),
        fleet_bytes=st.integers(0, 3),
        # How its card's time was shared ends with the lease.
        weight=st.just(1),
        latency=st.just(False),
    )
)
def test_a_tombstone_is_written_by_its_names(lease: LeaseSnapshot) -> None:
    assert encode(lease) == by_names(lease)
    assert read_tombstone(encode(lease)) == lease


@given(st.builds(RegionRow, region_id=st.integers(0, 2**128 - 1)))
def test_a_region_is_read_as_it_was_written(region: RegionRow) -> None:
    assert read_region(encode(region)) == region


def test_a_row_from_before_there_were_names_has_none() -> None:
    lease = read_lease(encode(kept(5)))
    assert (lease.terms.name, lease.terms.epoch, lease.terms.request_id) == ("", 0, "")
    assert lease.terms.fleet_bytes == 0
    assert b"epoch" not in encode(kept(5))


def test_a_row_from_before_there_were_regions_has_none() -> None:
    lease = read_lease(encode(kept(5)))
    assert (lease.region_number, lease.terms.regions_required) == (0, False)


def test_a_row_from_before_time_was_shared_has_weight_1_and_no_latency_class() -> None:
    assert b"weight" not in encode(kept(5))
    terms = read_lease(encode(kept(5))).terms
    assert (terms.weight, terms.latency) == (1, False)


def test_a_row_from_before_there_were_submits_keeps_nothing_for_them() -> None:
    members = members_of(5)
    del members["submit_bytes"]
    assert encode(kept(5)) == json.dumps(members, separators=(",", ":")).encode()
    assert read_lease(encode(kept(5))) == kept(5)


@pytest.mark.parametrize("spoil", [{"more": 1}, {"tenant": None}], ids=["a member more", "one less"])
def test_any_other_row_is_refused(spoil: dict[str, Any]) -> None:
    members = members_of(5) | spoil
    lacking = {name: value for name, value in members.items() if value is not None or name not in spoil}
    with pytest.raises(ValueError, match="it must be a LeaseRow"):
        read_lease(json.dumps(lacking).encode())


def test_a_row_from_before_leases_were_parked_is_not_parkable() -> None:
    assert b"park" not in encode(kept(5))
    lease = read_lease(encode(kept(5)))
    assert (lease.terms.park_idle_ms, lease.parked_ns, lease.wait_ms) == (None, 0, 0)
