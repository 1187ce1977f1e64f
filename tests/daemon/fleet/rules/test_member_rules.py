"""Each rule of a fleet's member by itself, in virtual time."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from gpulease.daemon.fleet.etcd.transactions import (
    Delete,
    Get,
    Put,
    Transaction,
    TransactionAnswer,
    TransactionRejected,
    Unknown,
)
from gpulease.daemon.fleet.records.fleet_records import (
    CLOCKS,
    COMPACTION,
    EPOCHS,
    GENERATION,
    HORIZON,
    QUOTA_DEFAULT,
    EpochsRecord,
    InventoryRecord,
    fenced_key,
    held_key,
    inventory_key,
    name_key,
    node_key,
    read_node,
)
from gpulease.daemon.fleet.records.record_reader import MAX_RECORD_BYTES
from gpulease.daemon.fleet.rules.clock_rates import SLOTS, ClockRecord
from gpulease.daemon.fleet.rules.fleet_events import (
    NO_MARK,
    Answered,
    ClaimDropped,
    ClaimEnded,
    ClaimGiven,
    ClaimRefusal,
    ClaimRefused,
    Compact,
    EndClaimed,
    FleetIdentity,
    FleetTimerFired,
    Joined,
    LiveClaims,
    MarkKept,
    MoveHorizon,
    Note,
    Noted,
    Paused,
    QuotaRefused,
    QuotaWanted,
    Reason,
    RecordChanged,
    RecordsUnreadable,
    Started,
    Stopped,
    Stopping,
)
from gpulease.daemon.fleet.rules.member import DUPLICATE_NODE_ID, EPOCH_GAP, FOREIGN, FOREIGN_DAEMON, UNSETTLED
from gpulease.daemon.fleet.rules.membership import MAX_CLOCK_ERROR
from gpulease.daemon.fleet.rules.node_claims import MAX_REQUESTS
from gpulease.daemon.fleet.rules.quota_records import shard_key
from helpers.readable import readable

from .member_host import BEAT, TERMS, Host, S, T, together
from .model_etcd import ModelEtcd


@pytest.fixture
def etcd() -> ModelEtcd:
    return ModelEtcd()


def restarted(first: Host, joined: Joined) -> Host:
    """A daemon that comes after another one, and knows what it knew; the claimed lease lives."""
    (claimed,) = first.take(ClaimGiven)
    kept: dict[str, Any] = {"incarnation": joined.incarnation, "identity": joined.identity, "mark": first.kept[-1]}
    host = Host(first.etcd, now=first.now + 5 * S, run=2, **kept)
    return host.begin({"m": claimed.epoch})


# --- joining and beats ---


def test_nothing_is_asked_before_the_broker_has_told_its_claims(etcd: ModelEtcd) -> None:
    host = Host(etcd)
    host.send(Started())
    assert host.asked == []
    host.send(LiveClaims())
    assert len(host.asked) == 1


def test_a_member_s_horizon_counts_from_when_the_beat_was_asked(etcd: ModelEtcd) -> None:
    host = Host(etcd).begin()
    assert host.take(Joined)[-1].incarnation == etcd.keys[node_key("a")].create_revision
    host.take(MoveHorizon)
    host.now += BEAT
    asked = host.now
    host.send(FleetTimerFired())
    host.now += 3 * S
    host.settle()
    assert host.take(MoveHorizon) == [MoveHorizon(asked + int(T * 0.99), host.member._membership.incarnation)]


def test_a_member_beats_six_times_within_its_horizon(etcd: ModelEtcd) -> None:
    host = Host(etcd).begin()
    host.effects.clear()
    host.run(60)
    assert len(host.take(MoveHorizon)) == 12


def test_a_beat_tells_the_record_as_it_was_changed_last(etcd: ModelEtcd) -> None:
    host = Host(etcd).begin()
    host.send(RecordChanged(("tls:h:1",), {"zone": "a"}, (), is_draining=True, version="9"))
    host.run(5)
    record = readable(InventoryRecord.read(etcd.keys[inventory_key("a")].value))
    assert (record.addresses, record.labels, record.is_draining, record.version) == (
        ("tls:h:1",),
        {"zone": "a"},
        True,
        "9",
    )


def test_an_inventory_is_written_when_it_has_changed(etcd: ModelEtcd) -> None:
    def written() -> tuple[int, ...]:
        return tuple(etcd.keys[key("a")].mod_revision for key in (inventory_key, node_key))

    host = Host(etcd).begin()
    host.send(RecordChanged(("tls:h:1",)))
    host.run(5)
    inventory, beat = written()
    assert inventory == beat
    host.run(60)
    assert written()[0] == inventory
    assert written()[1] > beat
    # An answer that is lost leaves open whether it was written, so it is written again.
    host.send(RecordChanged(("tls:h:2",)))
    host.is_cut = True
    host.run(5)
    host.is_cut = False
    host.run(10)
    assert readable(InventoryRecord.read(etcd.keys[inventory_key("a")].value)).addresses == ("tls:h:2",)


def compacted(*hosts: Host) -> list[int]:
    return [effect.revision for host in hosts for effect in host.take(Compact)]


def test_one_member_takes_history_away_that_is_old_enough(etcd: ModelEtcd) -> None:
    a, b = Host(etcd, history_s=60).begin(), Host(etcd, "b", history_s=60).begin()
    # The first rewrite of the mark ends no history: there was no mark.
    together(62, a, b)
    assert compacted(a, b) == []
    mark = etcd.keys[COMPACTION].mod_revision
    together(55, a, b)
    assert compacted(a, b) == []
    together(10, a, b)
    assert compacted(a, b) == [mark]
    assert etcd.keys[COMPACTION].mod_revision > mark
    together(600, a, b)
    found = compacted(a, b)
    # Whoever's beat comes first does it. Each at least a history's length after the one before, by a beat at most.
    assert 600 // 65 <= len(found) <= 600 // 60
    assert len(set(found)) == len(found)


def test_another_member_takes_history_away_when_the_one_that_did_is_gone(etcd: ModelEtcd) -> None:
    a, b = Host(etcd, history_s=60).begin(), Host(etcd, "b", history_s=60).begin()
    together(200, a, b)
    (first, other) = (a, b) if compacted(a) else (b, a)
    first.is_cut = True
    together(200, first, other)
    assert compacted(other)
    assert not compacted(first)


def test_a_member_of_a_store_that_was_renewed_takes_nothing_by_what_it_saw_before(etcd: ModelEtcd) -> None:
    host = Host(etcd, history_s=60).begin()
    host.run(100)
    mark = etcd.keys[COMPACTION].mod_revision
    etcd.do(Transaction(writes=(Put(GENERATION, b"second"),)))
    host.run(5)
    host.send(LiveClaims())
    host.settle()
    host.run(40)
    assert etcd.keys[COMPACTION].mod_revision == mark
    assert not compacted(host)


def test_a_member_that_is_to_keep_all_history_takes_none_away(etcd: ModelEtcd) -> None:
    host = Host(etcd, history_s=0).begin()
    host.run(1_000)
    assert COMPACTION not in etcd.keys
    assert not compacted(host)


def test_a_fenced_node_s_inventory_goes_with_its_record(etcd: ModelEtcd) -> None:
    dead, other = Host(etcd).begin(), Host(etcd, "b").begin()
    dead.ask_for()
    other.ask_for(wait_s=100)
    other.run(50)
    gone, there = [(node_key(node_id) in etcd.keys, inventory_key(node_id) in etcd.keys) for node_id in ("a", "b")]
    assert (gone, there) == ((False, False), (True, True))


def test_a_beat_whose_answer_was_lost_is_read_back_by_its_nonce(etcd: ModelEtcd) -> None:
    host = Host(etcd).begin()
    host.effects.clear()
    host.now += BEAT
    asked = host.now
    host.send(FleetTimerFired())
    (ask,) = host.asked
    host.asked.clear()
    etcd.do(ask.transaction)
    host.now += 2 * S
    host.send(Answered(ask.number, Unknown("timeout")))
    assert host.take(MoveHorizon) == []
    host.run(1)
    assert host.take(MoveHorizon)[0].horizon_ns == asked + int(T * 0.99)
    assert host.take(EndClaimed) == []


def test_a_lost_beat_that_was_not_done_moves_nothing(etcd: ModelEtcd) -> None:
    host = Host(etcd).begin()
    host.effects.clear()
    host.is_cut = True
    host.run(40)
    assert host.take(MoveHorizon) == []
    assert [noted.note for noted in host.take(Noted)].count(Note.ISOLATED) == 1
    host.is_cut = False
    host.run(1)
    assert len(host.take(MoveHorizon)) == 1


def test_a_fenced_member_ends_its_claims_and_joins_once_their_memory_is_free(etcd: ModelEtcd) -> None:
    host = Host(etcd).begin()
    host.ask_for()
    first = host.take(Joined)[-1].incarnation
    etcd.delete(node_key("a"))
    host.run(6)
    assert [end.reason for end in host.take(EndClaimed)] == [Reason.FENCED]
    host.run(60)
    assert node_key("a") not in etcd.keys
    host.send(LiveClaims())
    host.settle()
    assert host.take(Joined)[-1].incarnation > first
    assert host.claims() == "", "the claim of the earlier incarnation is deleted"


def test_a_daemon_that_remembers_its_incarnation_goes_on(etcd: ModelEtcd) -> None:
    first = Host(etcd).begin()
    joined = first.take(Joined)[-1]
    first.ask_for()
    host = restarted(first, joined)
    assert host.take(EndClaimed) == []
    assert host.take(Joined)[-1].incarnation == joined.incarnation
    assert host.claims() == "a"


def test_a_daemon_that_forgot_its_incarnation_ends_its_claims_first(etcd: ModelEtcd) -> None:
    host = Host(etcd).begin({"m": 3})
    assert [end.reason for end in host.take(EndClaimed)] == [Reason.FORGOTTEN]
    assert host.asked == []


def test_a_twin_stays_out_while_the_first_beats(etcd: ModelEtcd) -> None:
    host = Host(etcd).begin()
    host.ask_for()
    epoch = host.take(ClaimGiven)[0].epoch
    twin = Host(etcd, run=2).begin()
    together(60, host, twin)
    assert (twin.take(Joined), host.take(EndClaimed)) == ([], [])
    assert [noted.text for noted in twin.take(Noted) if noted.note is Note.REFUSED] == [
        f"{FOREIGN_DAEMON} 15 s",
        DUPLICATE_NODE_ID,
    ]
    twin.ask_for("other")
    (refused,) = twin.take(ClaimRefused)
    assert (refused.why, refused.text) == (ClaimRefusal.ISOLATED, DUPLICATE_NODE_ID)
    assert etcd.keys[name_key("m")].mod_revision == epoch


def test_a_node_that_lost_its_journal_waits_until_its_leases_of_before_are_over(etcd: ModelEtcd) -> None:
    first = Host(etcd).begin()
    first.ask_for()
    epoch = first.take(ClaimGiven)[0].epoch
    # Nobody knows that its lease lives, until its horizon.
    horizon = first.take(MoveHorizon)[-1].horizon_ns
    host = Host(etcd, now=first.now, run=2).begin()
    host.want(wait_s=100)
    host.run(14.9)
    assert host.take(Joined) == []
    host.run(1.2)
    assert host.take(Joined)[-1].incarnation == etcd.keys[node_key("a")].create_revision
    while not (claimed := host.take(ClaimGiven)):
        assert name_key("m") not in etcd.keys or etcd.keys[name_key("m")].mod_revision == epoch
        host.run(0.1)
    assert host.now > horizon
    assert claimed[0].epoch > epoch
    assert host.now < first.now + 50 * S


def test_the_claims_of_a_node_that_was_fenced_and_lost_its_journal_wait_too(etcd: ModelEtcd) -> None:
    first = Host(etcd).begin()
    first.ask_for()
    etcd.delete(node_key("a"))
    host = Host(etcd, now=first.now, run=2).begin()
    host.run(1)
    assert len(host.take(Joined)) == 1, "no other daemon's record is there"
    host.run(28)
    assert host.claims() == "a"
    host.run(8)
    assert host.claims() == ""


def test_a_twin_that_took_over_ends_the_first_once_that_is_silent(etcd: ModelEtcd) -> None:
    host = Host(etcd).begin()
    host.effects.clear()
    host.is_cut = True
    twin = Host(etcd, now=host.now, run=2).begin()
    together(20, host, twin)
    assert len(twin.take(Joined)) == 1
    host.is_cut = False
    together(6, host, twin)
    assert [(end.reason, end.text) for end in host.take(EndClaimed)] == [(Reason.FENCED, DUPLICATE_NODE_ID)]
    assert Note.DUPLICATE_NODE_ID in [noted.note for noted in host.take(Noted)]
    host.send(LiveClaims())
    together(100, host, twin)
    assert (host.take(Joined), twin.take(EndClaimed)) == ([], [])


def test_an_answer_that_comes_after_the_loss_frees_no_name_of_the_next_daemon(etcd: ModelEtcd) -> None:
    host = Host(etcd).begin()
    host.run(6)
    host.want(wait_s=100)
    held_up = host.asked.pop()
    etcd.delete(node_key("a"))
    twin = Host(etcd, now=host.now, run=2).begin()
    twin.ask_for()
    (claimed,) = twin.take(ClaimGiven)
    host.run(6)
    assert len(host.take(EndClaimed)) == 1
    host.send(Answered(held_up.number, etcd.do(held_up.transaction)))
    host.settle()
    assert etcd.keys[name_key("m")].mod_revision == claimed.epoch


def test_another_daemon_s_silence_counts_only_while_etcd_answers(etcd: ModelEtcd) -> None:
    Host(etcd).begin()
    host = Host(etcd, run=2).begin()
    host.run(10)
    host.is_cut = True
    host.run(10)
    host.is_cut = False
    host.run(14)
    assert host.take(Joined) == []
    host.run(4)
    assert len(host.take(Joined)) == 1


# --- copies of a journal ---


def test_a_copied_journal_lags_behind_and_its_daemon_waits(etcd: ModelEtcd) -> None:
    """The first beats on; the copy's daemon deletes none of its claims, and never shares its membership."""
    host = Host(etcd).begin()
    host.ask_for()
    (claimed,) = host.take(ClaimGiven)
    left = host.left()
    host.run(6)
    twin = Host(etcd, now=host.now, run=2, **left).begin()
    assert [(end.reason, end.text) for end in twin.take(EndClaimed)] == [(Reason.FORGOTTEN, FOREIGN)]
    twin.send(LiveClaims())
    together(60, host, twin)
    assert (twin.take(Joined), host.take(EndClaimed)) == ([], [])
    assert etcd.keys[name_key("m")].mod_revision == claimed.epoch


@pytest.mark.parametrize("is_cut", [False, True])
def test_a_copy_that_was_made_since_the_last_beat_ends_the_first_and_frees_nothing_before(
    etcd: ModelEtcd, is_cut: bool
) -> None:
    host = Host(etcd).begin()
    host.ask_for()
    horizon = host.take(MoveHorizon)[-1].horizon_ns
    (claimed,) = host.take(ClaimGiven)
    host.is_cut = is_cut
    twin = Host(etcd, now=host.now, run=2, **host.left()).begin()
    assert len(twin.take(Joined)) == 1
    together(6, host, twin)
    assert [end.text for end in host.take(EndClaimed)] == ([] if is_cut else [DUPLICATE_NODE_ID])
    while name_key("m") in etcd.keys:
        assert etcd.keys[name_key("m")].mod_revision == claimed.epoch
        twin.run(1)
    assert twin.now > horizon
    host.is_cut = False
    host.run(6)
    assert [end.text for end in host.take(EndClaimed)] == ([DUPLICATE_NODE_ID] if is_cut else [])
    assert twin.take(EndClaimed) == []


def test_a_first_that_a_copy_has_followed_does_not_go_on_after_a_restart(etcd: ModelEtcd) -> None:
    """It was cut off, so its journal is ahead of the record, which is another's all the same."""
    host = Host(etcd).begin()
    left = host.left()
    host.is_cut = True
    Host(etcd, now=host.now, run=2, **left).begin()
    host.run(20)
    again = Host(etcd, now=host.now, run=3, **(left | {"mark": host.kept[-1]})).begin()
    assert [end.text for end in again.take(EndClaimed)] == [FOREIGN]


def test_the_end_of_a_lease_that_only_a_copy_tells_of_frees_no_name(etcd: ModelEtcd) -> None:
    host = Host(etcd).begin()
    host.ask_for()
    (claimed,) = host.take(ClaimGiven)
    twin = Host(etcd, now=host.now, run=2).begin({"m": claimed.epoch})
    twin.send(ClaimEnded("m", claimed.epoch))
    twin.send(LiveClaims())
    together(60, host, twin)
    assert etcd.keys[name_key("m")].mod_revision == claimed.epoch


def test_what_a_journal_has_lost_since_the_last_beat_may_live_until_the_horizon(etcd: ModelEtcd) -> None:
    host = Host(etcd).begin()
    left = host.left()
    host.ask_for()
    horizon = host.take(MoveHorizon)[-1].horizon_ns
    again = Host(etcd, now=host.now, run=2, **left).begin()
    again.want(wait_s=100)
    while not (claimed := again.take(ClaimGiven)):
        again.run(1)
    assert again.now > horizon
    assert claimed[0].epoch > host.take(ClaimGiven)[0].epoch


def test_each_beat_waits_for_its_mark(etcd: ModelEtcd) -> None:
    """Of a process that went on, and of one that joined; a process that comes after any of them knows the record."""
    host = Host(etcd).begin()
    for run in range(1, 4):
        if run > 1:
            host = Host(etcd, now=host.now, run=run, **host.left()).begin()
        host.run(6)
        record = readable(read_node(etcd.keys[node_key("a")].value))
        assert host.kept[-1].covers(record)
        assert (record.beat, record.nonce.startswith(f"a.{run}-")) == (host.kept[-1].beat, True)


def test_a_join_waits_for_its_mark(etcd: ModelEtcd) -> None:
    """A journal that does not answer is asked again, and what it answers late is no answer to that."""
    host = Host(etcd)
    host.keeps = False
    host.begin().run(6)
    early, late = host.kept
    assert early.beat < late.beat
    host.send(MarkKept(early.beat))
    assert (host.asked, node_key("a") in etcd.keys) == ([], False)
    host.keeps = True
    host.send(MarkKept(late.beat))
    host.settle()
    assert host.take(Joined)[-1].mark.beat == late.beat
    assert host.kept[-1].beat == readable(read_node(etcd.keys[node_key("a")].value)).beat == late.beat + 1


def lose_the_answer_to_the_join(host: Host) -> None:
    """Reply to transactions until etcd has the node's record, and not to the one that wrote it."""
    while True:
        (ask,) = host.asked
        host.asked.clear()
        outcome = host.etcd.do(ask.transaction)
        if node_key("a") in host.etcd.keys:
            host.send(Answered(ask.number, Unknown("cut")))
            return
        host.send(Answered(ask.number, outcome))


@pytest.mark.parametrize("has_joined_before", [False, True])
def test_a_daemon_whose_join_s_answer_was_lost_is_back_at_once_after_a_restart(
    etcd: ModelEtcd, has_joined_before: bool
) -> None:
    """The next process finds the record in its journal's mark, deletes it, and joins. No time passes."""
    left: dict[str, Any] = {}
    if has_joined_before:
        left = Host(etcd).begin().left() | {"incarnation": 0}
        etcd.delete(node_key("a"))
    host = Host(etcd, run=2, **left)
    host.send(Started())
    host.send(LiveClaims())
    lose_the_answer_to_the_join(host)
    assert host.take(Joined) == []
    again = Host(etcd, now=host.now, run=3, **(left | {"mark": host.kept[-1]})).begin()
    assert (len(again.take(Joined)), len(again.take(MoveHorizon))) == (1, 1)


def test_a_copy_from_before_a_join_waits_for_the_first_daemon(etcd: ModelEtcd) -> None:
    """The same process joins again, with a number above the copy's, so the copy's daemon does not delete the record."""
    host = Host(etcd).begin()
    etcd.delete(node_key("a"))
    host.run(6)
    left = host.left() | {"incarnation": 0}
    host.send(LiveClaims())
    lose_the_answer_to_the_join(host)
    copy = Host(etcd, now=host.now, run=2, **left).begin()
    copy.run(14)
    assert copy.take(Joined) == []
    copy.run(3)
    assert len(copy.take(Joined)) == 1


def test_a_record_of_a_version_that_did_not_count_is_known_by_its_revision(etcd: ModelEtcd) -> None:
    first = Host(etcd).begin()
    left = first.left() | {"mark": NO_MARK}
    key = node_key("a")
    record = replace(readable(read_node(etcd.keys[key].value)), beat=0)
    etcd.do(Transaction(writes=(Put(key, record.encode()),)))
    again = Host(etcd, now=first.now, run=2, **left).begin()
    assert (len(again.take(Joined)), again.take(EndClaimed)) == (1, [])
    third = Host(etcd, now=first.now, run=3, **left).begin()
    assert [end.text for end in third.take(EndClaimed)] == [FOREIGN]


def test_a_record_that_does_not_count_is_another_s_to_a_daemon_without_a_journal(etcd: ModelEtcd) -> None:
    Host(etcd).begin()
    key = node_key("a")
    etcd.do(Transaction(writes=(Put(key, replace(readable(read_node(etcd.keys[key].value)), beat=0).encode()),)))
    heir = Host(etcd, run=2).begin()
    heir.run(14)
    assert heir.take(Joined) == []


# --- the store ---


def test_a_backup_older_than_a_minute_is_noticed_after_a_restart(etcd: ModelEtcd) -> None:
    host = Host(etcd).begin()
    backup = etcd.copy()
    host.run(130)
    left = host.left()
    assert left["identity"].revision > backup.revision
    host = Host(backup, now=host.now, run=2, **left).begin()
    assert host.take(Joined) == []
    assert "was at" in host.take(Noted)[0].text


def test_a_living_lease_s_epoch_shows_that_the_store_went_back(etcd: ModelEtcd) -> None:
    host = Host(etcd).begin()
    backup = etcd.copy()
    host.ask_for()
    epoch = host.take(ClaimGiven)[0].epoch
    host = Host(backup, now=host.now, run=2, **host.left()).begin({"m": epoch})
    assert [end.reason for end in host.take(EndClaimed)] == [Reason.RESTORED]


def test_a_store_that_went_back_is_refused_until_an_operator_renews_it(etcd: ModelEtcd) -> None:
    host = Host(etcd).begin()
    backup = etcd.copy()
    host.run(30)
    host.effects.clear()
    host.etcd = backup
    host.run(6)
    assert [end.reason for end in host.take(EndClaimed)] == [Reason.RESTORED]
    host.send(LiveClaims())
    host.run(100)
    assert host.take(MoveHorizon) == []
    host.ask_for()
    (refused,) = host.take(ClaimRefused)
    assert refused.why is ClaimRefusal.STALE
    assert "etcdctl put /gpulease/v1/generation" in refused.text
    backup.do(Transaction(writes=(Put(GENERATION, b"second"),)))
    host.run(6)
    assert host.take(Joined)[-1].identity.generation == "second"
    host.ask_for(request=2)
    (refused,) = host.take(ClaimRefused)
    assert UNSETTLED in refused.text
    host.run(T * 1.01 / S)
    host.ask_for(request=3)
    assert len(host.take(ClaimGiven)) == 1


def test_a_store_that_went_back_is_refused_though_its_revisions_were_raised(etcd: ModelEtcd) -> None:
    """By the next process, too: nothing but another generation tells it from the store that was joined."""
    host = Host(etcd).begin()
    backup = etcd.copy()
    host.run(30)
    backup.revision = etcd.revision + 1_000
    host.etcd = backup
    host.run(6)
    assert [end.reason for end in host.take(EndClaimed)] == [Reason.RESTORED]
    host.send(LiveClaims())
    left = host.left() | {"incarnation": 0}
    for member in (host, Host(backup, now=host.now, run=2, **left).begin()):
        member.take(Joined)
        member.run(100)
        assert member.take(Joined) == []
        member.ask_for()
        assert [refused.why for refused in member.take(ClaimRefused)] == [ClaimRefusal.STALE]


def test_a_claim_in_a_store_that_went_back_gives_nothing_before_the_beat_shows_it(etcd: ModelEtcd) -> None:
    host = Host(etcd).begin()
    backup = etcd.copy()
    host.run(12)
    backup.revision = etcd.revision + 1_000
    host.etcd = backup
    host.ask_for()
    assert host.take(ClaimGiven) == []
    assert [end.reason for end in host.take(EndClaimed)] == [Reason.RESTORED]


def test_a_node_that_the_backup_does_not_know_was_not_fenced(etcd: ModelEtcd) -> None:
    Host(etcd, "b").begin()
    backup = etcd.copy()
    host = Host(etcd).begin()
    backup.revision = etcd.revision + 1_000
    host.etcd = backup
    host.run(6)
    assert [end.reason for end in host.take(EndClaimed)] == [Reason.RESTORED]


@pytest.mark.parametrize("is_raised", [False, True])
def test_a_restored_store_s_names_wait_for_leases_that_it_does_not_know(etcd: ModelEtcd, is_raised: bool) -> None:
    """One node is cut off and serves a name until its horizon; a third has never known the store that was lost."""
    host, other = Host(etcd).begin(), Host(etcd, "b").begin()
    backup = etcd.copy()
    together(40, host, other)
    host.ask_for()
    (claimed,) = host.take(ClaimGiven)
    horizon = host.take(MoveHorizon)[-1].horizon_ns
    backup.revision = etcd.revision + 1_000 if is_raised else backup.revision
    backup.do(Transaction(writes=(Put(GENERATION, b"second"),)))
    other.etcd = backup
    third = Host(backup, "c", now=host.now).begin()
    other.run(6)
    other.send(LiveClaims())
    other.settle()
    for node in (other, third):
        node.want(wait_s=100)
    while not (given := [*other.take(ClaimGiven), *third.take(ClaimGiven)]):
        together(1, other, third)
    assert third.now > horizon
    assert given[0].epoch > claimed.epoch


def test_a_claim_that_was_asked_before_the_generation_changed_fails(etcd: ModelEtcd) -> None:
    host = Host(etcd).begin()
    host.want()
    etcd.do(Transaction(writes=(Put(GENERATION, b"second"),)))
    host.settle()
    assert host.take(ClaimGiven) == []
    assert host.claims() == ""


def claimed_under_a_base_of_epochs(etcd: ModelEtcd) -> tuple[Host, ClaimGiven]:
    """Have a member claim under a renewed generation."""
    host = Host(etcd).begin()
    etcd.do(Transaction(writes=(Put(GENERATION, b"second"),)))
    host.run(6)
    host.send(LiveClaims())
    host.ask_for(wait_s=100)
    host.run(40)
    (claimed,) = host.take(ClaimGiven)
    return host, claimed


def test_a_restarted_member_knows_its_leases_under_a_base_of_epochs(etcd: ModelEtcd) -> None:
    host, claimed = claimed_under_a_base_of_epochs(etcd)
    assert claimed.epoch > EPOCH_GAP
    again = Host(etcd, now=host.now, run=2, **host.left()).begin({"m": claimed.epoch})
    again.run(40)
    assert again.take(EndClaimed) == []
    again.send(ClaimEnded("m", claimed.epoch))
    again.settle()
    assert again.claims() == ""


@pytest.mark.parametrize("value", [None, b"\xff", b'{"generation":"first","base":1e999}', b'{"generation":"first"}'])
def test_a_lost_or_foreign_record_of_epochs_is_written_anew_and_ends_nothing(
    etcd: ModelEtcd, value: bytes | None
) -> None:
    host = Host(etcd).begin()
    host.ask_for()
    (claimed,) = host.take(ClaimGiven)
    etcd.do(Transaction(writes=(Delete(EPOCHS) if value is None else Put(EPOCHS, value),)))
    host.run(6)
    assert readable(EpochsRecord.read(etcd.keys[EPOCHS].value)).base == 0
    host.ask_for("other", request=2)
    assert host.take(ClaimGiven)[0].epoch > claimed.epoch
    assert host.take(EndClaimed) == []


def test_a_node_that_joins_sets_no_base_of_epochs_in_place_of_one_that_it_can_t_read(etcd: ModelEtcd) -> None:
    """A member writes what it knows. Where there is none, the base rises once no lease of before lives."""
    host, claimed = claimed_under_a_base_of_epochs(etcd)
    host.take(EndClaimed)
    etcd.do(Transaction(writes=(Put(EPOCHS, b"?"),)))
    other = Host(etcd, "b", now=host.now).begin()
    other.ask_for("other")
    assert other.take(ClaimGiven) == []
    together(12, host, other)
    assert host.take(EndClaimed) == []
    other.ask_for("other")
    assert other.take(ClaimGiven)[0].epoch > claimed.epoch
    etcd.do(Transaction(writes=(Put(EPOCHS, b"?"),)))
    third = Host(etcd, "c", now=host.now).begin()
    third.ask_for("third", wait_s=100)
    third.run(30)
    assert third.take(ClaimGiven) == []
    third.run(6)
    assert third.take(ClaimGiven)[0].epoch > EPOCH_GAP


def test_epochs_are_raised_above_what_any_node_knows_of(etcd: ModelEtcd) -> None:
    host, other = Host(etcd).begin(), Host(etcd, "b", identity=FleetIdentity(8, "zero", 10**12)).begin()
    together(12, host, other)
    assert [end.reason for end in host.take(EndClaimed)] == [Reason.RENEWED]
    other.ask_for()
    assert other.take(ClaimGiven)[0].epoch > 10**12


def test_another_cluster_is_refused(etcd: ModelEtcd) -> None:
    host = Host(ModelEtcd(cluster_id=8), identity=FleetIdentity(7, "first", 1)).begin()
    assert host.take(Joined) == []
    assert Note.REFUSED in [noted.note for noted in host.take(Noted)]


def test_a_claim_s_answer_from_an_earlier_state_grants_nothing(etcd: ModelEtcd) -> None:
    host = Host(etcd).begin()
    backup = ModelEtcd()
    host.run(30)
    host.want()
    (ask,) = host.asked
    backup.keys[node_key("a")] = etcd.keys[node_key("a")]
    host.send(Answered(ask.number, backup.do(ask.transaction)))
    assert host.take(ClaimGiven) == []
    assert [end.reason for end in host.take(EndClaimed)] == [Reason.RESTORED]


def test_a_store_without_a_generation_waits_until_old_leases_are_over(etcd: ModelEtcd) -> None:
    del etcd.keys[GENERATION]
    host = Host(etcd).begin()
    host.run(30)
    assert host.take(Joined) == []
    host.run(1)
    assert len(host.take(Joined)) == 1
    assert GENERATION in etcd.keys


def test_an_operator_s_new_generation_ends_and_joins_anew(etcd: ModelEtcd) -> None:
    host = Host(etcd).begin()
    etcd.do(Transaction(writes=(Put(GENERATION, b"second"),)))
    host.run(6)
    assert [end.reason for end in host.take(EndClaimed)] == [Reason.RENEWED]
    host.send(LiveClaims())
    host.settle()
    assert host.take(Joined)[-1].identity.generation == "second"


def test_the_first_node_writes_down_the_fleet_s_horizon(etcd: ModelEtcd) -> None:
    Host(etcd).begin()
    assert etcd.keys[HORIZON].value == b"30"
    Host(etcd, "b").begin()
    assert etcd.keys[HORIZON].mod_revision == etcd.keys[node_key("a")].create_revision


def test_a_node_with_another_horizon_stays_out_until_the_fleet_s_is_deleted(etcd: ModelEtcd) -> None:
    etcd.do(Transaction(writes=(Put(HORIZON, b"4"),)))
    host = Host(etcd).begin()
    host.run(60)
    assert host.take(Joined) == []
    host.ask_for()
    (refused,) = host.take(ClaimRefused)
    assert refused.why is ClaimRefusal.STALE
    assert "the fleet has horizon_s = 4, but this node has 30: use the fleet's" in refused.text
    etcd.delete(HORIZON)
    host.run(6)
    assert len(host.take(Joined)) == 1
    assert etcd.keys[HORIZON].value == b"30"


def test_two_nodes_that_join_at_once_agree_on_a_horizon(etcd: ModelEtcd) -> None:
    one, other = Host(etcd), Host(etcd, "b")
    for horizon_s, host in ((30.0, one), (40.0, other)):
        host.member._horizon_s = horizon_s
        host.send(Started())
        host.send(LiveClaims({}))
    for host in (one, other, one, other):
        (ask,) = host.asked
        host.asked.clear()
        host.send(Answered(ask.number, etcd.do(ask.transaction)))
    other.run(60)
    assert [len(host.take(Joined)) for host in (one, other)] == [1, 0]


@pytest.mark.parametrize("value", [None, b"4"])
def test_a_member_whose_fleet_gets_another_horizon_ends_its_claims(etcd: ModelEtcd, value: bytes | None) -> None:
    host = Host(etcd).begin()
    host.ask_for()
    etcd.do(Transaction(writes=(Put(HORIZON, value) if value else Delete(HORIZON),)))
    host.run(6)
    assert [end.reason for end in host.take(EndClaimed)] == [Reason.RENEWED]


def test_a_daemon_that_comes_back_to_another_horizon_ends_its_claims(etcd: ModelEtcd) -> None:
    first = Host(etcd).begin()
    first.ask_for()
    etcd.do(Transaction(writes=(Put(HORIZON, b"4"),)))
    host = restarted(first, first.take(Joined)[-1])
    assert len(host.take(EndClaimed)) == 1
    host.send(LiveClaims())
    host.run(20)
    assert host.take(Joined) == []


# --- claims ---


def test_a_claim_s_epoch_is_its_revision(etcd: ModelEtcd) -> None:
    host = Host(etcd).begin()
    host.ask_for()
    assert host.take(ClaimGiven) == [ClaimGiven(1, "m", etcd.keys[name_key("m")].mod_revision)]
    assert etcd.keys[held_key("a", "m")].mod_revision == etcd.revision


def test_nothing_is_granted_on_an_unknown_claim_until_it_is_read_back(etcd: ModelEtcd) -> None:
    host = Host(etcd).begin()
    host.want(wait_s=10)
    (ask,) = host.asked
    host.asked.clear()
    epoch = etcd.do(ask.transaction).revision
    host.send(Answered(ask.number, Unknown("timeout")))
    assert host.take(ClaimGiven) == []
    host.run(1)
    assert host.take(ClaimGiven) == [ClaimGiven(1, "m", epoch)]


def test_an_unknown_claim_that_nobody_waits_for_is_deleted(etcd: ModelEtcd) -> None:
    host = Host(etcd).begin()
    host.want()
    (ask,) = host.asked
    host.asked.clear()
    host.send(Answered(ask.number, Unknown("timeout")))
    assert [refused.why for refused in host.take(ClaimRefused)] == [ClaimRefusal.UNKNOWN]
    etcd.do(ask.transaction)
    assert host.claims() == "a"
    host.run(6)
    assert host.claims() == ""
    assert host.take(ClaimGiven) == []


def test_a_claim_made_after_its_tenant_left_is_deleted(etcd: ModelEtcd) -> None:
    host = Host(etcd).begin()
    host.want(wait_s=10)
    host.send(ClaimDropped(1))
    host.settle()
    assert host.claims() == ""
    assert host.take(ClaimGiven) == []
    assert host.take(ClaimRefused) == []


def test_a_cut_off_member_grants_nothing_after_its_horizon(etcd: ModelEtcd) -> None:
    host = Host(etcd).begin()
    host.want()
    host.now += T
    host.settle()
    assert host.take(ClaimGiven) == []
    assert [refused.why for refused in host.take(ClaimRefused)] == [ClaimRefusal.ISOLATED]


def test_a_rejected_claim_says_that_an_operator_must_act(etcd: ModelEtcd) -> None:
    host = Host(etcd).begin()
    host.want()
    host.send(Answered(host.asked.pop().number, TransactionRejected("no space")))
    (refused,) = host.take(ClaimRefused)
    assert refused.why is ClaimRefusal.REJECTED
    assert "no space" in refused.text
    assert "operator" in refused.text


def test_a_name_is_given_to_who_waits_when_its_lease_has_ended(etcd: ModelEtcd) -> None:
    one, other = Host(etcd).begin(), Host(etcd, "b").begin()
    one.ask_for()
    other.ask_for(wait_s=20)
    other.run(3)
    assert other.take(ClaimGiven) == []
    assert other.take(ClaimRefused) == []
    one.send(ClaimEnded("m", one.take(ClaimGiven)[0].epoch))
    one.settle()
    other.run(3)
    assert len(other.take(ClaimGiven)) == 1
    assert other.claims() == "b"


def test_a_waiter_is_refused_when_its_wait_is_over(etcd: ModelEtcd) -> None:
    one, other = Host(etcd).begin(), Host(etcd, "b").begin()
    one.ask_for()
    other.want(wait_s=7)
    together(7.2, one, other)
    assert [refused.why for refused in other.take(ClaimRefused)] == [ClaimRefusal.TAKEN]


def test_claims_that_wait_are_bounded(etcd: ModelEtcd) -> None:
    host = Host(etcd)
    for request in range(MAX_REQUESTS + 1):
        host.want(wait_s=100, request=request)
    assert [(refused.request, refused.why) for refused in host.take(ClaimRefused)] == [
        (MAX_REQUESTS, ClaimRefusal.BUSY)
    ]


def test_a_living_lease_whose_claim_somebody_deleted_ends(etcd: ModelEtcd) -> None:
    host = Host(etcd).begin()
    host.ask_for()
    etcd.delete(name_key("m"), held_key("a", "m"))
    host.run(6)
    assert [end.reason for end in host.take(EndClaimed)] == [Reason.LOST]


def test_a_leftover_among_a_node_s_claims_is_deleted(etcd: ModelEtcd) -> None:
    host = Host(etcd).begin()
    host.ask_for()
    etcd.delete(name_key("m"))
    host.send(ClaimEnded("m", host.take(ClaimGiven)[0].epoch))
    host.settle()
    assert held_key("a", "m") not in etcd.keys


# --- fences ---


def died(etcd: ModelEtcd, count: int) -> tuple[list[str], int]:
    """Return the names of so many nodes, and when they had their last beat; then they died together."""
    hosts = [Host(etcd, f"d{number}").begin() for number in range(count)]
    names = [f"m{number}" for number in range(count)]
    for host, name in zip(hosts, names, strict=True):
        host.ask_for(name)
        host.run(7)
    return names, max(host.now for host in hosts) - 2 * S


def seconds_until_claimed(names: list[str], waiting: list[Host], since: int) -> float:
    """Let time pass until hosts that wait have all names, and return when that is."""
    free: set[str] = set()
    while free < set(names):
        together(0.1, *waiting)
        for host in waiting:
            free |= {claimed.name for claimed in host.take(ClaimGiven)}
        assert waiting[0].now < since + 200 * S, f"of {names} came back: {free}"
    return (waiting[0].now - since) / S


@pytest.mark.parametrize("count", [1, 2, 9])
@pytest.mark.parametrize("is_spread", [False, True])
def test_the_names_of_nodes_that_die_together_are_all_back_within_a_horizon_and_a_half(
    etcd: ModelEtcd, count: int, is_spread: bool
) -> None:
    waiting = [Host(etcd, f"w{number}").begin() for number in range(3)]
    names, last_beat = died(etcd, count)
    for host in waiting:
        host.run(7)
    for number, name in enumerate(names):
        waiting[number % 3 if is_spread else 0].ask_for(name, wait_s=100, request=number + 1)
    seconds = seconds_until_claimed(names, waiting, last_beat)
    # Never before T (1 + rho) after the last beat: so long may the leases live.
    assert 30.3 <= seconds <= 45
    assert all(host.take(EndClaimed) == [] for host in waiting)


def test_each_node_that_is_fenced_is_told_once(etcd: ModelEtcd) -> None:
    waiting = [Host(etcd, f"w{number}").begin() for number in range(3)]
    names, last_beat = died(etcd, 4)
    for host in waiting:
        host.run(7)
        for number, name in enumerate(names):
            host.ask_for(name, wait_s=100, request=number + 1)
    seconds_until_claimed(names, waiting, last_beat)
    notes = [noted for host in waiting for noted in host.take(Noted) if noted.note is not Note.BEAT]
    fenced = sorted(noted.node_id for noted in notes if noted.note is Note.FENCED_OTHER)
    assert fenced == ["d0", "d1", "d2", "d3"]
    assert {noted.note for noted in notes} == {Note.JOINED, Note.FENCED_OTHER}


def test_a_node_that_was_dead_for_long_gives_its_name_to_whoever_asks_first(etcd: ModelEtcd) -> None:
    dead, other = Host(etcd).begin(), Host(etcd, "b").begin()
    dead.ask_for()
    other.run(40)
    other.ask_for(wait_s=5)
    other.run(3)
    assert [claimed.name for claimed in other.take(ClaimGiven)] == ["m"]


def test_a_node_that_joined_lately_waits_as_if_the_silence_had_begun_then(etcd: ModelEtcd) -> None:
    dead = Host(etcd).begin()
    dead.ask_for()
    other = Host(etcd, "b", now=dead.now + 500 * S).begin()
    other.ask_for(wait_s=100)
    other.run(30)
    assert other.take(ClaimGiven) == []
    other.run(3)
    assert [claimed.name for claimed in other.take(ClaimGiven)] == ["m"]


def test_a_fence_s_mark_frees_all_names_of_the_node_at_every_node(etcd: ModelEtcd) -> None:
    dead, one, other = Host(etcd).begin(), Host(etcd, "b").begin(), Host(etcd, "c").begin()
    for request, name in enumerate(("m", "other"), 1):
        dead.ask_for(name, request=request)
    one.ask_for("m", wait_s=100)
    together(35, one, other)
    assert one.claims("m") == "b"
    assert fenced_key("a") in etcd.keys
    late = Host(etcd, "d", now=other.now).begin()
    late.ask_for("other", wait_s=5)
    late.run(3)
    assert late.claims("other") == "d"


def test_a_membership_that_began_behind_a_fence_is_not_taken_for_over(etcd: ModelEtcd) -> None:
    dead, other = Host(etcd).begin(), Host(etcd, "b").begin()
    dead.ask_for()
    other.ask_for(wait_s=100)
    other.run(35)
    again = Host(etcd, now=other.now, run=2).begin()
    again.ask_for("mine")
    other.ask_for("mine", wait_s=60, request=2)
    together(70, again, other)
    assert (other.claims("mine"), again.take(EndClaimed)) == ("a", [])


def test_a_record_that_somebody_removed_is_waited_for_from_then_on(etcd: ModelEtcd) -> None:
    dead, other = Host(etcd).begin(), Host(etcd, "b").begin()
    dead.ask_for()
    other.ask_for(wait_s=100)
    other.run(20)
    etcd.delete(node_key("a"))
    other.run(30)
    assert other.take(ClaimGiven) == []
    other.run(3)
    assert [claimed.name for claimed in other.take(ClaimGiven)] == ["m"]


def test_a_living_node_is_not_fenced(etcd: ModelEtcd) -> None:
    one, other = Host(etcd).begin(), Host(etcd, "b").begin()
    one.ask_for()
    other.ask_for(wait_s=90)
    together(80, one, other)
    assert other.take(ClaimGiven) == []
    assert one.take(EndClaimed) == []


def test_nodes_that_come_back_together_do_not_fence_each_other(etcd: ModelEtcd) -> None:
    one, other = Host(etcd).begin(), Host(etcd, "b").begin()
    one.ask_for()
    together(5, one, other)
    one.is_cut = other.is_cut = True
    together(50, one, other)
    other.is_cut = False
    other.ask_for(wait_s=200)
    together(2, one, other)
    one.is_cut = False
    together(30, one, other)
    assert one.take(EndClaimed) == other.take(EndClaimed) == []


def test_an_earlier_state_of_the_store_fences_nobody(etcd: ModelEtcd) -> None:
    one, other = Host(etcd).begin(), Host(etcd, "b").begin()
    one.ask_for()
    backup = etcd.copy()
    together(40, one, other)
    backup.revision = etcd.revision + 1_000
    one.is_cut = True
    other.etcd = backup
    other.ask_for(wait_s=0.1)
    other.run(1)
    assert fenced_key("a") not in backup.keys


# --- pauses of the machine ---


def test_a_machine_that_was_paused_ends_its_claimed_leases_and_joins_anew(etcd: ModelEtcd) -> None:
    host = Host(etcd).begin()
    host.ask_for()
    host.take(Joined)
    host.send(Paused(20 * S, "a.2"))
    assert [end.reason for end in host.take(EndClaimed)] == [Reason.PAUSED]
    host.send(LiveClaims())
    host.settle()
    host.run(1)
    assert (len(host.take(Joined)), host.claims()) == (1, "")


def test_a_machine_that_was_paused_between_two_processes_ends_its_claimed_leases(etcd: ModelEtcd) -> None:
    first = Host(etcd).begin()
    first.ask_for()
    host = restarted(first, first.take(Joined)[-1])
    host.take(EndClaimed)
    host.send(Paused(20 * S, "a.2"))
    assert [end.reason for end in host.take(EndClaimed)] == [Reason.PAUSED]


def test_a_short_pause_ends_nothing_and_has_the_node_beat_at_once(etcd: ModelEtcd) -> None:
    host = Host(etcd).begin()
    host.take(MoveHorizon)
    host.now += S
    host.send(Paused(S // 5, "a.2"))
    host.settle()
    assert host.take(EndClaimed) == []
    assert [moved.horizon_ns for moved in host.take(MoveHorizon)] == [host.now + int(T * 0.99)]


def test_a_pause_while_claimed_leases_end_ends_them_once(etcd: ModelEtcd) -> None:
    host = Host(etcd).begin()
    host.ask_for()
    host.send(Paused(20 * S, "a.2"))
    host.send(Paused(20 * S, "a.2"))
    host.send(Paused(None, "a.2"))
    assert len(host.take(EndClaimed)) == 1


def test_a_copied_machine_takes_its_record_for_the_other_copy_s(etcd: ModelEtcd) -> None:
    one = Host(etcd).begin()
    one.ask_for()
    epochs = {"m": one.take(ClaimGiven)[-1].epoch}
    copy = Host(etcd, now=one.now, run=2, **one.left())
    copy.send(Started())
    copy.send(LiveClaims(epochs))
    copy.send(Paused(None, "a.3"))
    assert [end.reason for end in copy.take(EndClaimed)] == [Reason.PAUSED]
    copy.send(LiveClaims())
    copy.settle()
    together(60, one, copy)
    assert (one.claims(), one.take(EndClaimed), copy.take(Joined)) == ("a", [], [])
    assert DUPLICATE_NODE_ID in [noted.text for noted in copy.take(Noted)]


def test_a_pause_makes_no_clock_a_wrong_one(etcd: ModelEtcd) -> None:
    hosts = [Host(etcd, f"n{number}").begin() for number in range(4)]
    together(20, *hosts)
    for _ in range(16):
        together(1, *hosts[1:])
    hosts[0].send(Paused(16 * S, "n0.2"))
    hosts[0].send(LiveClaims())
    together(60, *hosts)
    assert [[end.reason for end in host.take(EndClaimed)] for host in hosts] == [[Reason.PAUSED], [], [], []]


# --- clock rates ---


def horizon_and_wait_s(host: Host) -> tuple[float, float]:
    """How long a beat lets claimed leases live, and how long the host waits for a silent node's to end."""
    return host.member._membership.cap_ns / S, host.member._membership.wait_ns / S


@pytest.mark.parametrize("rate", [0.98, 1.0, 1.003, 1.02])
def test_a_node_whose_clock_is_wrong_makes_up_for_it(etcd: ModelEtcd, rate: float) -> None:
    """By the true time its horizons end no later, and its waits no sooner, than those of a clock within the bounds."""
    hosts = [Host(etcd, f"n{number}").begin() for number in range(4)]
    for _ in range(700):
        for host in hosts:
            host.run(2.5 * (rate if host is hosts[0] else 1))
    is_wrong = abs(rate - 1) > TERMS.rho
    horizon_s, wait_s = horizon_and_wait_s(hosts[0])
    assert horizon_s / rate <= TERMS.horizon_s * (1 - TERMS.rho) * (1 + TERMS.rho)
    assert wait_s / rate >= TERMS.horizon_s * (1 + TERMS.rho) * (1 - TERMS.rho)
    assert [bool(noted.text) for noted in hosts[0].take(Noted) if noted.note is Note.CLOCK] == [True] * is_wrong
    for host in hosts:
        assert host.take(EndClaimed) == []
    for host in hosts[1:]:
        assert horizon_and_wait_s(host) == (TERMS.horizon_s * (1 - TERMS.rho), TERMS.horizon_s * (1 + TERMS.rho))


def forge_clocks(etcd: ModelEtcd, now_s: float, node_ids: Sequence[str] = ()) -> None:
    """Write into all slots, in the first ones as those nodes themselves."""
    names = [*(f"{node_id}.1" for node_id in node_ids), *(f"forged-{number}" for number in range(SLOTS))]
    for number, name in enumerate(names[:SLOTS]):
        record = ClockRecord(name, etcd.revision, int(now_s * S), int(now_s * S))
        etcd.do(Transaction(writes=(Put(CLOCKS + b"%02d" % number, record.encode()),)))


@pytest.mark.parametrize("their_rate", [0.0, 0.5, 0.9, 1.1, 3.0])
def test_forged_clocks_end_no_membership_and_move_horizons_within_bounds(etcd: ModelEtcd, their_rate: float) -> None:
    """A forger writes into all slots between all beats, as other runs or as the very nodes that are there."""
    hosts = [Host(etcd, f"n{number}").begin() for number in range(2)]
    for step in range(400):
        forge_clocks(etcd, 1_000 + step * 2.5 * their_rate, [host.node_id for host in hosts] if step % 2 else [])
        for host in hosts:
            host.run(2.5)
    for host in hosts:
        assert host.take(EndClaimed) == []
        assert host.now < host.member.horizon_ns
        horizon_s, wait_s = horizon_and_wait_s(host)
        assert TERMS.horizon_s * (1 - TERMS.rho) / MAX_CLOCK_ERROR - 0.001 <= horizon_s
        assert horizon_s <= TERMS.horizon_s * (1 - TERMS.rho)
        assert TERMS.horizon_s * (1 + TERMS.rho) <= wait_s
        assert (horizon_s, wait_s) != (TERMS.horizon_s * (1 - TERMS.rho), TERMS.horizon_s * (1 + TERMS.rho))
        assert wait_s <= TERMS.horizon_s * (1 + TERMS.rho) * MAX_CLOCK_ERROR + 0.001
    etcd.delete(*(CLOCKS + b"%02d" % number for number in range(SLOTS)))
    together(400, *hosts)
    assert horizon_and_wait_s(hosts[0]) == (TERMS.horizon_s * (1 - TERMS.rho), TERMS.horizon_s * (1 + TERMS.rho))


def test_a_name_of_a_dead_node_comes_free_though_forged_clocks_make_the_wait_longer(etcd: ModelEtcd) -> None:
    dead, host = Host(etcd, "b").begin(), Host(etcd).begin()
    dead.ask_for()
    for step in range(218):
        forge_clocks(etcd, 1_000 + step * 1.25)
        host.run(2.5)
        if step < 200:
            dead.run(2.5)
        if step == 200:
            assert horizon_and_wait_s(host)[1] > TERMS.horizon_s * 1.2
            host.ask_for(wait_s=100)
    assert [claimed.name for claimed in host.take(ClaimGiven)] == ["m"]


def test_a_slot_that_can_t_be_read_and_that_nobody_writes_is_taken(etcd: ModelEtcd) -> None:
    etcd.do(Transaction(writes=tuple(Put(CLOCKS + b"%02d" % number, b"?") for number in range(SLOTS))))
    host = Host(etcd).begin()
    host.run(60)
    assert [
        isinstance(ClockRecord.read(kv.value), ClockRecord) for key, kv in etcd.keys.items() if key.startswith(CLOCKS)
    ].count(True) == 1


# --- values that can't be read ---

NO_RECORDS = [
    b"",
    b"\xff",
    b"[" * 60_000,
    b'{"used":1e999,"total":1e999,"revision":1,"low_ns":1e999,"high_ns":1}',
    b'{"nonce":"n","boot_ms":%s}' % (b"9" * 5_000),
    b'{"nonce":"n","incarnation":%d}' % 2**70,
    b'{"nonce":"\\ud800"}',
    b'{"budget":1e999,"used":{},"default":0}',
    b'{"budget":1,"used":{"%s":["n",1,-9]},"default":0}' % (b"a" * 32),
    bytes(MAX_RECORD_BYTES + 1),
]
"""Values that are no record of any kind."""


@pytest.mark.parametrize("value", NO_RECORDS)
def test_no_value_stops_a_member_or_an_answer(etcd: ModelEtcd, value: bytes) -> None:
    host, other = Host(etcd).begin(), Host(etcd, "b").begin()
    keys = (
        *(CLOCKS + name for name in (b"zz", b"03", b"\xff")),
        EPOCHS,
        inventory_key("a"),
        inventory_key("b"),
        HORIZON,
        QUOTA_DEFAULT,
        name_key("m"),
        shard_key("t", 3),
        *(held_key("a") + name for name in (b"m", b"\xff", b"a b", b"t/1", b"t%zz/" + b"a" * 32)),
    )
    etcd.do(Transaction(writes=tuple(Put(key, value) for key in keys)))
    host.ask_for("m", wait_s=3, request=1)
    host.send(QuotaWanted(2, "t", 1 << 20, "cd" * 16, host.now))
    host.settle()
    other.is_cut = True
    host.run(120)
    assert [(refused.request, refused.why) for refused in host.take(ClaimRefused)] == [(1, ClaimRefusal.TAKEN)]
    assert [(refused.request, refused.why) for refused in host.take(QuotaRefused)] == [(2, ClaimRefusal.REJECTED)]
    assert host.take(EndClaimed) == []
    assert host.now < host.member.horizon_ns
    assert [noted.text for noted in host.take(Noted) if noted.note is Note.FAULT] == []
    shown = host.take(RecordsUnreadable)
    assert shown[-1].count < 64, "a revision counts once"
    assert "values in etcd can't be read: /gpulease/v1/" in shown[-1].text
    host.ask_for("n", request=3)
    assert [claimed.name for claimed in host.take(ClaimGiven)] == ["n"]
    etcd.delete(*keys[:3], *keys[3:4], *keys[5:])
    etcd.do(Transaction(writes=(Put(HORIZON, b"30"),)))
    host.run(120)
    assert host.take(RecordsUnreadable)[-1].text == ""


@pytest.mark.parametrize("value", [b"", b"\xff", b'{"nonce":1e999}', bytes(MAX_RECORD_BYTES + 1)])
def test_a_member_writes_its_record_anew_where_another_value_lies_there(etcd: ModelEtcd, value: bytes) -> None:
    host = Host(etcd).begin()
    host.ask_for()
    etcd.do(Transaction(writes=(Put(node_key("a"), value),)))
    host.run(6)
    assert host.take(EndClaimed) == []
    assert host.kept[-1].covers(readable(read_node(etcd.keys[node_key("a")].value)))
    host.run(30)
    assert host.now < host.member.horizon_ns


def test_a_node_that_joins_stays_out_while_it_can_t_read_the_fleet_s_horizon(etcd: ModelEtcd) -> None:
    etcd.do(Transaction(writes=(Put(HORIZON, b"1e999"),)))
    host = Host(etcd).begin()
    host.ask_for()
    assert "a value that can't be read as its horizon_s" in host.take(ClaimRefused)[0].text
    etcd.do(Transaction(writes=(Put(HORIZON, b"30"),)))
    host.run(20)
    assert len(host.take(Joined)) == 1


def test_any_generation_is_one(etcd: ModelEtcd) -> None:
    """One of a megabyte must fit into the journal and into messages."""
    host = Host(etcd).begin()
    for value in (bytes(1 << 20), b"\xff", b"", b"b"):
        host.take(EndClaimed)
        etcd.do(Transaction(writes=(Put(GENERATION, value),)))
        host.run(20)
        assert [end.reason for end in host.take(EndClaimed)] == [Reason.RENEWED]
        host.send(LiveClaims())
        host.settle()
        assert len(host.take(Joined)[-1].identity.generation) <= 64


def test_a_fault_in_an_answer_s_handler_leaves_no_request_without_an_answer(etcd: ModelEtcd) -> None:
    """The store's answer lacks what was asked for, which no rule looks for."""
    host = Host(etcd).begin()
    host.want("m", wait_s=3)
    host.send(QuotaWanted(2, "t", 1 << 20, "cd" * 16, host.now))
    for ask in [*host.asked]:
        host.send(Answered(ask.number, TransactionAnswer(False, etcd.revision, (), 7)))
    host.asked.clear()
    host.is_cut = True
    host.run(10)
    assert [(refused.request, refused.why) for refused in host.take(ClaimRefused)] == [(1, ClaimRefusal.UNKNOWN)]
    assert [(refused.request, refused.why) for refused in host.take(QuotaRefused)] == [(2, ClaimRefusal.UNKNOWN)]
    assert Note.FAULT in {noted.note for noted in host.take(Noted)}


def test_foreign_values_in_slots_and_records_harm_nobody(etcd: ModelEtcd) -> None:
    host = Host(etcd).begin()
    writes = (
        Put(b"/gpulease/v1/clocks/03", b"\xff"),
        Put(fenced_key("b"), b"[]"),
        Put(name_key("m"), b"?"),
        Delete(b"x"),
    )
    etcd.do(Transaction(writes=writes, reads=(Get(fenced_key("b")),)))
    host.ask_for(wait_s=3)
    host.run(20)
    assert [refused.why for refused in host.take(ClaimRefused)] == [ClaimRefusal.TAKEN]
    assert host.take(EndClaimed) == []
    assert isinstance(etcd.do(Transaction()), TransactionAnswer)


# --- the end ---


def test_a_node_that_stops_deletes_what_has_ended_and_then_its_record(etcd: ModelEtcd) -> None:
    host = Host(etcd).begin()
    host.ask_for("m")
    (claimed,) = host.take(ClaimGiven)
    host.send(ClaimEnded("m", claimed.epoch))
    host.send(Stopping())
    assert host.take(Stopped) == []
    host.settle()
    assert host.take(Stopped) == [Stopped(has_left=True)]
    assert (host.claims(), node_key("a") in etcd.keys) == ("", False)
    host.run(60)
    assert node_key("a") not in etcd.keys
    assert Host(etcd, now=host.now, run=2).begin().take(Joined), "the next process joins without a wait"


def test_a_node_that_stops_keeps_its_record_for_the_leases_that_go_on(etcd: ModelEtcd) -> None:
    host = Host(etcd).begin()
    host.ask_for("m")
    host.send(Stopping())
    host.settle()
    assert host.take(Stopped) == [Stopped(has_left=False)]
    assert (host.claims(), node_key("a") in etcd.keys) == ("a", True)


def test_a_claim_that_is_under_way_when_a_node_stops_is_deleted_first(etcd: ModelEtcd) -> None:
    host = Host(etcd).begin()
    host.want("m")
    host.send(ClaimDropped(1))
    host.send(Stopping())
    assert host.take(Stopped) == []
    host.settle()
    assert host.take(Stopped) == [Stopped(has_left=True)]
    assert (host.claims(), node_key("a") in etcd.keys) == ("", False)


def test_a_node_that_stops_while_it_is_cut_off_says_that_it_has_not_left(etcd: ModelEtcd) -> None:
    host = Host(etcd).begin()
    host.is_cut = True
    host.send(Stopping())
    host.settle()
    assert host.take(Stopped) == [Stopped(has_left=False)]
