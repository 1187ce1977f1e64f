"""What readings of a machine's clocks say about its pauses."""

from dataclasses import replace

import pytest

from gpulease.daemon.fleet.rules.pauses import MachineReading, is_new_generation, missed_ns, stolen_of

S = 10**9
MS = 10**6
BEFORE = MachineReading(100 * S, 100 * S, 9_000 * S, {"cpu0": 5 * S, "cpu1": 6 * S})


def after(own_s: float, **said: object) -> MachineReading:
    """Return a reading so many seconds later by the machine's own clock."""
    end_ns = BEFORE.ended_ns + int(own_s * S)
    return replace(BEFORE, began_ns=end_ns, ended_ns=end_ns, **said)  # type: ignore[arg-type]


def test_a_machine_that_runs_on_has_missed_nothing() -> None:
    assert missed_ns(BEFORE, after(0.25, host_ns=9_000 * S + 250 * MS)) == 0


def test_the_host_s_clock_shows_a_pause() -> None:
    assert missed_ns(BEFORE, after(0.25, host_ns=9_020 * S)) == 20 * S - 250 * MS


def test_stolen_time_beyond_what_went_on_shows_a_pause() -> None:
    assert missed_ns(BEFORE, after(0.25, host_ns=None, stolen_ns={"cpu0": 5 * S, "cpu1": 26 * S})) == 20 * S - 250 * MS


def test_a_busy_host_that_steals_a_processor_is_no_pause() -> None:
    assert missed_ns(BEFORE, after(2, host_ns=9_002 * S, stolen_ns={"cpu0": 7 * S, "cpu1": 8 * S})) == 0


def test_a_reader_that_is_held_up_while_it_reads_sees_no_pause() -> None:
    now = replace(after(0.25, host_ns=9_003 * S), ended_ns=BEFORE.ended_ns + 3 * S)
    assert missed_ns(BEFORE, now) == 0


@pytest.mark.parametrize("host_ns", [None, 8_000 * S])
def test_a_host_s_clock_that_is_gone_or_set_back_is_no_pause(host_ns: int | None) -> None:
    assert missed_ns(BEFORE, after(0.25, host_ns=host_ns, stolen_ns={})) == 0


def test_a_processor_that_was_added_is_not_compared() -> None:
    assert missed_ns(BEFORE, after(0.25, host_ns=None, stolen_ns={"cpu2": 900 * S})) == 0


def test_a_machine_of_another_generation_was_paused_nobody_knows_how_long() -> None:
    assert missed_ns(BEFORE, after(0.25, host_ns=9_000 * S + 250 * MS, generation_changes=1)) is None


def test_stolen_times_are_read_for_each_processor() -> None:
    stat = b"cpu  1 2 3 4 5 6 7 300 0 0\ncpu0 1 2 3 4 5 6 7 100 0 0\ncpu1 1 2 3 4 5 6 7 200 0 0\nintr 5 6\nctxt 7\n"
    assert stolen_of(stat) == {"cpu0": S, "cpu1": 2 * S}


@pytest.mark.parametrize("stat", [b"", b"cpu0 1 2 3\n", b"cpu0 1 2 3 4 5 6 7 -1 0 0\n", b"\xff\xfe\n\n"])
def test_a_stat_without_stolen_times_has_none(stat: bytes) -> None:
    assert stolen_of(stat) == {}


def test_the_kernel_s_message_of_another_generation_is_known() -> None:
    head = b"change@/devices/platform/vmgenid\0ACTION=change\0SUBSYSTEM=platform\0"
    assert is_new_generation(head + b"NEW_VMGENID=1\0SEQNUM=9\0")
    assert not is_new_generation(head + b"SYNTH_ARG_NEW_VMGENID=1\0SEQNUM=9\0")
    assert not is_new_generation(b"")
