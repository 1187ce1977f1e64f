"""Sums by the rules that the module states."""

from collections.abc import Iterable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpulease.daemon.record.audit.log_reader import days_csv
from gpulease.daemon.record.audit.records import ChainEnd, Draft, Head, RecordKind, read_record
from gpulease.daemon.record.audit.usage import DayOfTenant, DayUse, UsageSum, Used

from .chains import ANY_SPEED, BOOT, OTHER_BOOT, a_life, draft, sealed
from .test_records_canonical import keys, values

S = 1_000_000


def lease(kind: RecordKind, at_s: float, number: int = 7, **data: Any) -> Draft:
    who = {"lease": f"{number:032x}", "tenant": "t", "size_bytes": 10}
    return draft(kind, int(at_s * S), **who | data)


def start(at_s: float, alive_s: float | None = None, boot: str = BOOT) -> Draft:
    previous = {} if alive_s is None else {"previous": {"boot": boot, "alive_us": int(alive_s * S)}}
    return draft(RecordKind.START, int(at_s * S), format=1, **previous)


def over(at_s: float, granted_s: float | None = None, **data: Any) -> Draft:
    granted_us = None if granted_s is None else int(granted_s * S)
    return lease(RecordKind.OVER, at_s, granted_us=granted_us, over_us=int(at_s * S), **data)


def end(at_s: float, over_s: float, granted_s: float | None) -> Draft:
    granted_us = None if granted_s is None else int(granted_s * S)
    return lease(RecordKind.END, at_s, granted_us=granted_us, over_us=int(over_s * S))


def total(drafts: Iterable[Draft], head: Head | None = None, boots: dict[int, str] | None = None) -> Used:
    """Of tenant t, in seconds."""
    found, link = UsageSum(), ChainEnd()
    for number, one in enumerate(drafts):
        (line,), link = sealed([one], link, (boots or {}).get(number, BOOT))
        found.take(read_record(line))
    used = found.finish(head).get("t", Used())
    return Used(used.leases, used.lease_us // S, used.byte_us // S, used.open_leases)


GRANT = lease(RecordKind.GRANT, 10)
GAP = draft(RecordKind.GAP, 30 * S, dropped={"end": 1}, since_us=20 * S)
CRASH = start(90, 14)
ADOPT = lease(RecordKind.ADOPT, 91)
MINOR_GAP = draft(RecordKind.GAP, 30 * S, dropped={"deny": 9}, since_us=20 * S)


@pytest.mark.parametrize(
    ("drafts", "used"),
    [
        pytest.param([GRANT, over(12, 10), end(15, 12, 10)], Used(1, 2, 20), id="a whole life"),
        pytest.param(
            [GRANT, lease(RecordKind.RENEW, 11), over(12, 10)], Used(1, 2, 20), id="its memory is not back yet"
        ),
        pytest.param([GRANT, end(15, 12, 10)], Used(1, 2, 20), id="without the record of its being over"),
        pytest.param([over(12, 10), end(15, 12, 10)], Used(1, 2, 20), id="without its grant"),
        pytest.param([end(15, 12, 10)], Used(1, 2, 20), id="with its end alone"),
        pytest.param([end(15, 12, None)], Used(), id="never granted"),
        pytest.param([GRANT, draft(RecordKind.STOP, 13 * S)], Used(1, 3, 30), id="stopped over it"),
        pytest.param([GRANT, start(90, 14)], Used(1, 4, 40), id="a crash: to when it was last known to live"),
        pytest.param([GRANT, lease(RecordKind.RENEW, 13), start(90)], Used(1, 3, 30), id="a crash, and no head"),
        pytest.param([GRANT, start(90, 14, OTHER_BOOT)], Used(1, 0, 0), id="a crash, and the head of another boot"),
        pytest.param([GRANT, lease(RecordKind.RENEW, 13)], Used(1, 3, 30, 1), id="open"),
        pytest.param([GRANT, GAP, lease(RecordKind.GRANT, 40, 8), start(90, 50)], Used(2, 20, 200), id="a gap"),
        pytest.param(
            [GRANT, GAP, lease(RecordKind.RENEW, 40), start(90, 50)], Used(1, 40, 400), id="alive behind a gap"
        ),
        pytest.param([GRANT, CRASH, ADOPT, over(95)], Used(1, 85, 850), id="adopted: as if nothing had been"),
        pytest.param([GRANT, CRASH, CRASH, ADOPT, over(95)], Used(1, 85, 850), id="adopted, at the second try"),
        pytest.param([GRANT, CRASH, ADOPT, start(190, 150)], Used(1, 140, 1400), id="adopted, then a crash"),
        pytest.param([GRANT, CRASH, ADOPT, start(96, 95), ADOPT, over(99)], Used(1, 89, 890), id="adopted twice"),
        pytest.param([GRANT, draft(RecordKind.STOP, 13 * S), start(90), ADOPT, over(95)], Used(1, 85, 850), id="kept"),
        pytest.param([GRANT, CRASH, ADOPT], Used(1, 81, 810, 1), id="adopted and open"),
        pytest.param([GRANT, CRASH, end(95, 91, None)], Used(1, 4, 40), id="not adopted: its end says nothing more"),
        pytest.param([GRANT, over(12, 10), CRASH, end(95, 91, None)], Used(1, 2, 20), id="over before the crash"),
        pytest.param([CRASH, ADOPT, over(95)], Used(1, 4, 40), id="adopted, without its grant"),
        pytest.param(
            [GRANT, CRASH, lease(RecordKind.END, 95, 8)], Used(1, 4, 40), id="the end of a worker of no lease"
        ),
        pytest.param([GRANT, MINOR_GAP, start(90, 50)], Used(1, 40, 400), id="a gap without ends"),
    ],
)
def test_the_rules(drafts: list[Draft], used: Used) -> None:
    assert total(drafts) == used


def test_open_leases_count_to_the_head() -> None:
    assert total([GRANT], Head(ChainEnd(), BOOT, 15 * S)) == Used(1, 5, 50, 1)
    assert total([GRANT], Head(ChainEnd(), OTHER_BOOT, 15 * S)) == Used(1, 0, 0, 1)


def test_another_boot_has_another_clock() -> None:
    drafts = [lease(RecordKind.GRANT, 1000), start(5, 1010), lease(RecordKind.GRANT, 6, 8), end_of(8, 9.0, 6)]
    assert total(drafts, boots={1: OTHER_BOOT, 2: OTHER_BOOT, 3: OTHER_BOOT}) == Used(2, 13, 130)


def end_of(number: int, over_s: float, granted_s: int) -> Draft:
    return lease(RecordKind.END, over_s, number, granted_us=granted_s * S, over_us=int(over_s * S))


def test_the_wall_clock_means_nothing() -> None:
    back = [Draft(one.kind, one.data, 10**15 - number * S, one.mono_us) for number, one in enumerate(a_life())]
    lines, _ = sealed(back)
    found = UsageSum()
    for line in lines:
        found.take(read_record(line))
    assert found.finish() == {"uid:1000": Used(1, 2 * S, 2000 * S)}


def test_two_tenants_are_two() -> None:
    found = UsageSum()
    for line in sealed([GRANT, lease(RecordKind.GRANT, 10, 8, tenant="u"), over(12, 10)])[0]:
        found.take(read_record(line))
    assert {name: used.open_leases for name, used in found.finish().items()} == {"t": 0, "u": 1}


def test_gpu_time_counts_what_is_more_than_in_the_record_before() -> None:
    found = UsageSum()
    gpu = [
        GRANT,
        lease(RecordKind.USE, 20, card="GPU-a", gpu_us=3 * S),
        lease(RecordKind.USE, 30, card="GPU-a", gpu_us=7 * S),
        lease(RecordKind.END, 40, card="GPU-a", granted_us=10 * S, over_us=40 * S, gpu_us=9 * S),
        # The next lease with that number begins at 0. A lease without a record of its grant counts, too.
        lease(RecordKind.END, 60, card="GPU-a", gpu_us=2 * S),
    ]
    for line in sealed(gpu)[0]:
        found.take(read_record(line))
    assert found.finish()["t"].gpu_us == 11 * S


def test_the_days_of_a_lease_that_lasts_over_midnight() -> None:
    """The wall clock at 1790000000 s is 2026-09-21 14:13:20 UTC; 35,200 s later it is midnight."""
    found = UsageSum()
    records = [
        lease(RecordKind.GRANT, 0, card="GPU-a"),
        lease(RecordKind.RESIZE, 35_100, card="GPU-a", size_bytes=20),
        lease(RecordKind.USE, 35_100, card="GPU-a", gpu_us=5 * S),
        lease(RecordKind.END, 35_300, card="GPU-a", granted_us=0, over_us=35_300 * S, gpu_us=6 * S),
    ]
    for line in sealed(records)[0]:
        found.take(read_record(line))
    found.finish()
    before, after = DayOfTenant("2026-09-21", "t", "GPU-a"), DayOfTenant("2026-09-22", "t", "GPU-a")
    assert found.days == {
        before: DayUse(35_200 * S, (35_100 * 10 + 100 * 20) * S, 5 * S),
        after: DayUse(100 * S, 100 * 20 * S, 1 * S),
    }
    assert sum(day.byte_us for day in found.days.values()) == found.tenants["t"].byte_us


DAY, NEXT_DAY = "2026-09-21", "2026-09-22"


def days_of(*drafts: Draft) -> tuple[dict[tuple[str, str], tuple[int, int, float]], Used]:
    """Return lease, byte and GPU seconds by day and card, and the sums of the tenant. Their sums must agree."""
    found = UsageSum()
    for line in sealed(drafts)[0]:
        found.take(read_record(line))
    used = found.finish()["t"]
    assert sum(day.lease_us for day in found.days.values()) == used.lease_us
    assert sum(day.byte_us for day in found.days.values()) == used.byte_us
    assert sum(day.gpu_us for day in found.days.values()) == used.gpu_us
    days = {
        (key.day, key.card): (day.lease_us // S, day.byte_us // S, day.gpu_us / S) for key, day in found.days.items()
    }
    return days, used


def on(card: str, kind: RecordKind, at_s: float, **data: Any) -> Draft:
    return lease(kind, at_s, card=card, **data)


def test_a_parked_lease_has_no_bytes_until_its_return_is_ordered() -> None:
    grant, park, ended = on("a", RecordKind.GRANT, 0), on("a", RecordKind.PARK, 10), over(100, 0, card="a")
    back = on("a", RecordKind.RETURN, 32, took_us=2 * S, parked_us=22 * S)
    assert days_of(grant, park, back, ended)[0] == {(DAY, "a"): (100, (10 + 70) * 10, 0)}
    # It ends while it is parked.
    assert days_of(grant, park, ended)[0] == {(DAY, "a"): (100, 10 * 10, 0)}
    # The next daemon adopts it parked.
    adopt = on("a", RecordKind.ADOPT, 21)
    assert days_of(grant, park, start(20, 15), adopt, back, ended)[0] == {(DAY, "a"): (100, (10 + 70) * 10, 0)}
    # A flood of records in which its return may have been lost.
    gap = draft(RecordKind.GAP, 50 * S, dropped={"return": 1, "renew": 900}, since_us=40 * S)
    assert days_of(grant, park, gap, ended)[0] == {(DAY, "a"): (100, (10 + 60) * 10, 0)}
    others = draft(RecordKind.GAP, 50 * S, dropped={"renew": 900}, since_us=40 * S)
    assert days_of(grant, park, others, ended)[0] == {(DAY, "a"): (100, 10 * 10, 0)}


def test_a_lease_that_was_moved_counts_on_each_card_for_its_time_there() -> None:
    records = [
        on("a", RecordKind.GRANT, 0),
        on("a", RecordKind.USE, 5, gpu_us=3 * S),
        on("a", RecordKind.PARK, 10),
        on("b", RecordKind.RETURN, 15, took_us=2 * S),
        # Until then it had worked on the card that it left.
        on("b", RecordKind.MOVE, 15, from_card="a", gpu_us=4 * S),
        on("b", RecordKind.USE, 20, gpu_us=6 * S),
        on("b", RecordKind.END, 100, granted_us=0, over_us=100 * S, gpu_us=7 * S),
    ]
    assert days_of(*records)[0] == {(DAY, "a"): (13, 100, 4.0), (DAY, "b"): (87, 870, 3.0)}
    # It stays in the host's memory, without room on the other card.
    records[3:5] = [on("b", RecordKind.MOVE, 15, from_card="a", gpu_us=4 * S)]
    assert days_of(*records)[0] == {(DAY, "a"): (15, 100, 4.0), (DAY, "b"): (85, 0, 3.0)}


def test_a_restarted_broker_counts_no_gpu_time_twice() -> None:
    records = [
        on("a", RecordKind.GRANT, 0),
        on("a", RecordKind.USE, 10, gpu_us=7 * S),
        start(20, 15),
        on("a", RecordKind.ADOPT, 21),
        # The next one continues with a sample that is older than the record.
        on("a", RecordKind.USE, 30, gpu_us=6 * S),
        on("a", RecordKind.END, 40, granted_us=None, over_us=40 * S, gpu_us=9 * S),
    ]
    assert days_of(*records)[0] == {(DAY, "a"): (40, 400, 9.0)}


def test_a_lease_over_three_days_whose_broker_restarts_in_the_second() -> None:
    """Midnight is 35,200 s after the begin of the log, to the microsecond."""
    midnight_s, day_s = 35_200, 86_400
    records = [
        on("a", RecordKind.GRANT, midnight_s - 0.25),
        start(midnight_s + 100, midnight_s + 90),
        on("a", RecordKind.ADOPT, midnight_s + 101),
        on("a", RecordKind.USE, midnight_s + 200, gpu_us=S),
        over(midnight_s + day_s + 0.5, card="a"),
    ]
    found = UsageSum()
    for line in sealed(records)[0]:
        found.take(read_record(line))
    found.finish()
    assert {key.day: (day.lease_us, day.gpu_us) for key, day in found.days.items()} == {
        DAY: (S // 4, 0),
        NEXT_DAY: (day_s * S, S),
        "2026-09-23": (S // 2, 0),
    }


def test_days_as_csv() -> None:
    days = {DayOfTenant("2026-09-21", '=a,"b"', "GPU-a"): DayUse(1_500_000, 20, 3)}
    assert days_csv(days) == (
        "day,tenant,card,lease_seconds,byte_seconds,gpu_seconds\n"
        '2026-09-21,"\'=a,""b""",GPU-a,1.500000,0.000020,0.000003\n'
    )


odd = st.dictionaries(
    st.sampled_from(
        [
            "lease",
            "tenant",
            "card",
            "from_card",
            "gpu_us",
            "took_us",
            "size_bytes",
            "granted_us",
            "over_us",
            "previous",
            "dropped",
            "since_us",
        ]
    )
    | keys,
    values | st.sampled_from(["a", "b"]),
    max_size=6,
)


@ANY_SPEED
@given(st.lists(st.tuples(st.sampled_from(RecordKind), odd, st.integers(0, 1000), st.sampled_from([BOOT, OTHER_BOOT]))))
def test_no_records_do_harm(told: list[tuple[RecordKind, dict[str, Any], int, str]]) -> None:
    found = UsageSum()
    for kind, data, mono_us, boot in told:
        (line,), _ = sealed([draft(kind, mono_us, **data)], boot=boot)
        found.take(read_record(line))
    for used in found.finish().values():
        assert used.lease_us >= 0
        assert used.byte_us >= 0
        assert 0 <= used.open_leases <= used.leases
