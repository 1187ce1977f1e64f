"""Records of the real lease table's life."""

import pytest

from gpulease.daemon.leases.devices import Card
from gpulease.daemon.leases.events import (
    AcquireRequested,
    DrainCancelled,
    DrainRequested,
    DrainTimerFired,
    Event,
    FenceClearRequested,
    FreeRequested,
    LeaseMoved,
    LeaseRestored,
    ParkRequested,
    PoolTimerFired,
    ReclaimFailed,
    ReclaimProved,
    RegionProved,
    RenewRequested,
    RequesterGone,
    RevokeRequested,
    SessionFaulted,
    SessionParked,
    TimerFired,
    TimerKind,
    WorkerExited,
    WorkerFound,
    WorkerReady,
)
from gpulease.daemon.leases.model import FIRST_SUBMIT_ID, FIRST_WARM_ID, LeaseTerms, SubmitRequested
from gpulease.daemon.leases.quotas import CoreLimits
from gpulease.daemon.leases.table import LeaseTable
from gpulease.daemon.leases.time_account import LeaseTimeUse
from gpulease.daemon.record.audit.projector import Entry, entry_of
from gpulease.daemon.record.audit.records import canonical_bytes
from gpulease.daemon.record.lease_facts import THE_DAEMON
from gpulease.daemon.record.lease_history import LeaseHistory

MS = 1_000_000
LEASE = f"{5:032x}"
WHO = {"lease": LEASE, "tenant": "t", "card": "GPU-a", "size_bytes": 100}


class Life:
    """A lease table, and the records of its life."""

    def __init__(self, warm_contexts: int = 0) -> None:
        self.table = LeaseTable([Card("GPU-a", 0, "a", 1000, 10)], CoreLimits(grace_ms={}), warm_contexts)
        self.history = LeaseHistory(self.table.get, self.table.submits.lease_of)
        self.now_ns = 0

    def do(self, event: Event, after_ms: int = 0) -> list[Entry]:
        self.now_ns += after_ms * MS
        facts = self.history.on_event(event, self.table.handle(event, self.now_ns), self.now_ns)
        told = [entry for entry in map(entry_of, facts) if entry is not None]
        for _, data in told:
            canonical_bytes(data)
        return told

    def granted(self) -> "Life":
        self.do(AcquireRequested(1, "t", 5, LeaseTerms(100, 60_000)), 1)
        self.do(WorkerReady(5), 1)
        return self

    def is_empty(self) -> bool:
        return self.history.is_at_rest


def times(granted_ms: int, over_ms: int) -> dict[str, int]:
    return {"granted_us": granted_ms * 1000, "over_us": over_ms * 1000}


def test_a_whole_life() -> None:
    life = Life()
    assert life.do(AcquireRequested(1, "t", 5, LeaseTerms(100, 60_000)), 1) == []
    ((kind, told),) = life.do(WorkerReady(5), 2)
    grant = {"exclusivity": "session_exclusive", "generation": 1, "ttl_ms": 60_000, "waited_us": 2000}
    assert (kind.value, told) == ("grant", WHO | grant)
    ((kind, told),) = life.do(RenewRequested(2, 5, "t", 5000), 1)
    assert (kind.value, told) == ("renew", WHO | {"generation": 2, "ttl_ms": 5000, "by": "t"})
    ((kind, told),) = life.do(SessionFaulted(5, "an illegal\naddress"), 1)
    assert (kind.value, told["reason"]) == ("fault", "an illegal\N{REPLACEMENT CHARACTER}address")
    assert life.do(SessionFaulted(5, "an illegal\naddress")) == []
    ((kind, told),) = life.do(FreeRequested(3, 5, "t"), 1)
    why = {"cause": "freed", "reason": "freed by its tenant"}
    assert (kind.value, told) == ("over", WHO | times(3, 6) | why)
    assert life.do(WorkerExited(5, "was killed"), 1) == []
    ((kind, told),) = life.do(ReclaimProved(5), 1)
    assert (kind.value, told) == ("end", WHO | times(3, 6) | why | {"latency_us": 2000})
    assert life.is_empty()


@pytest.mark.parametrize(("why", "way"), [("", "direct"), ("the cards can't access each other's memory", "host")])
def test_a_move_records_its_way_and_what_the_lease_used_on_the_card_that_it_left(why: str, way: str) -> None:
    lease = Life().granted().table.get(5)
    assert lease is not None
    history = LeaseHistory(lambda _: lease, use_of=lambda _: LeaseTimeUse(2_500_000.0, 3_000_000, 1000))
    (fact,) = history.on_event(PoolTimerFired(), [LeaseMoved(lease, "GPU-b", 100, 9000, why)], 1)
    how = {"from_card": "GPU-b", "way": way, "through_host": why, "moved_bytes": 100, "took_us": 9}
    assert entry_of(fact) == ("move", WHO | how | {"gpu_us": 2500, "busy_us": 3000, "held_back_us": 1})


def test_an_expiry() -> None:
    life = Life().granted()
    ((kind, told),) = life.do(TimerFired(5, 1, TimerKind.EXPIRY), 60_000)
    assert (kind.value, told["cause"], told["over_us"]) == ("over", "expired", 60_002_000)


def test_a_revocation_and_who_asked_for_it() -> None:
    life = Life().granted()
    life.history.note_requester(9, "uid:0")
    assert [kind.value for kind, _ in life.do(RevokeRequested(9, 5, "mainte\x1bnance"), 1)] == ["over"]
    life.do(WorkerExited(5, "was killed"), 3)
    operator, end = life.do(ReclaimProved(5), 4)
    said = {"reason": "mainte\N{REPLACEMENT CHARACTER}nance", "outcome": "torn_down", "latency_us": 7000}
    assert operator == ("operator", {"action": "revoke", "by": "uid:0", "lease": LEASE} | said)
    assert (end[0].value, end[1]["cause"], end[1]["latency_us"]) == ("end", "revoked", 7000)
    life.history.note_requester(10, "uid:0")
    ((kind, told),) = life.do(RevokeRequested(10, 77, "nobody"))
    assert (kind.value, told["outcome"]) == ("operator", "not_found")
    assert life.is_empty()


def test_the_daemons_own_revocation_is_no_operators() -> None:
    life = Life().granted()
    life.do(RevokeRequested(0, 5, "not recorded"))
    life.do(WorkerExited(5, "was killed"))
    ((kind, told),) = life.do(ReclaimProved(5))
    assert (kind.value, told["cause"], told["reason"]) == ("end", "revoked", "not recorded")


def test_an_operator_in_a_tenants_stead() -> None:
    life = Life().granted()
    ((_, renewed),) = life.do(RenewRequested(2, 5, "uid:0", 5000, is_operator=True))
    assert (renewed["tenant"], renewed["by"]) == ("t", "uid:0")
    life.do(FreeRequested(3, 5, "uid:0", is_operator=True))
    life.do(WorkerExited(5, "was killed"))
    operator, _ = life.do(ReclaimProved(5), 2)
    assert operator == ("operator", {"action": "free", "by": "uid:0", "lease": LEASE, "latency_us": 2000})


def test_a_fence_and_its_clearing() -> None:
    life = Life().granted()
    life.do(FreeRequested(3, 5, "t"))
    life.do(WorkerExited(5, "was killed"))
    denied, fence = life.do(ReclaimFailed(5, "not shown free"), 30)
    assert (denied[0].value, denied[1]["reason"], denied[1]["operation"]) == ("deny", "fenced", "free")
    assert (fence[0].value, fence[1]["latency_us"]) == ("fence", 30_000)
    assert "not shown free" in fence[1]["reason"]
    life.history.note_requester(4, "uid:0")
    operator, cleared = life.do(FenceClearRequested(4, "0"))
    assert operator == ("operator", {"action": "fence_clear", "by": "uid:0", "count": 1, "contexts": 0, "card": "0"})
    assert cleared == ("clear", WHO | {"by": "uid:0"})
    assert life.is_empty()


def test_the_bearer_of_a_token_in_a_tenants_stead() -> None:
    life = Life().granted()
    life.history.note_requester(2, "uid:7")
    ((_, renewed),) = life.do(RenewRequested(2, 5, "t", 5000))
    assert (renewed["tenant"], renewed["by"]) == ("t", "uid:7")
    life.history.note_requester(3, "uid:7")
    life.do(FreeRequested(3, 5, "t"))
    life.do(WorkerExited(5, "was killed"))
    operator, _ = life.do(ReclaimProved(5), 2)
    assert operator == ("operator", {"action": "free", "by": "uid:7", "lease": LEASE, "latency_us": 2000})
    assert life.is_empty()


def test_a_submit_is_told_from_who_asked_for_it_to_its_end() -> None:
    life = Life().granted()
    refused = life.do(SubmitRequested(2, 5, "t", 0))
    assert [(kind.value, told["operation"], told["lease"]) for kind, told in refused] == [("deny", "submit", LEASE)]
    life = Life()
    life.do(AcquireRequested(1, "t", 5, LeaseTerms(100, 60_000, submit_bytes=40)), 1)
    life.do(WorkerReady(5), 1)
    life.history.note_requester(2, "uid:7")
    assert life.do(SubmitRequested(2, 5, "t", 1000)) == []
    begun = WHO | {"what": "begun", "by": "uid:7", "submit_bytes": 40}
    assert life.do(WorkerReady(FIRST_SUBMIT_ID)) == [("submit", begun)]
    assert life.do(WorkerExited(FIRST_SUBMIT_ID, "was\nkilled")) == []
    ended = {"what": "ended", "reason": "was\N{REPLACEMENT CHARACTER}killed"}
    assert life.do(ReclaimProved(FIRST_SUBMIT_ID)) == [("submit", WHO | ended)]
    life.do(SubmitRequested(3, 5, "t", 1000))
    life.do(WorkerExited(FIRST_SUBMIT_ID + 1, "was killed"))
    ((kind, told),) = life.do(ReclaimFailed(FIRST_SUBMIT_ID + 1, "not shown free"))
    assert (kind.value, told["what"], told["reason"]) == ("submit", "fenced", "was killed; not shown free")


def test_of_contexts_made_ahead_only_fences_are_told() -> None:
    life = Life(warm_contexts=2)
    assert life.do(PoolTimerFired()) == []
    assert life.do(WorkerReady(FIRST_WARM_ID)) == []
    assert life.do(WorkerExited(FIRST_WARM_ID, "was\nkilled")) == []
    told = life.do(ReclaimFailed(FIRST_WARM_ID, "not shown free"))
    said = {"what": "fenced", "card": "GPU-a", "reason": "was\N{REPLACEMENT CHARACTER}killed; not shown free"}
    assert told == [("pool", said)]
    life.history.note_requester(4, "uid:0")
    assert life.do(FenceClearRequested(4, None)) == [
        ("operator", {"action": "fence_clear", "by": "uid:0", "count": 1, "contexts": 1, "card": ""})
    ]


def test_denials_say_what_was_asked() -> None:
    life = Life()
    ((kind, told),) = life.do(AcquireRequested(1, "t", 5, LeaseTerms(1 << 100, 60_000), selector="\u202eGPU" * 300))
    assert (kind.value, told["tenant"], told["operation"]) == ("deny", "t", "acquire")
    assert told["size_bytes"] == 2**53 - 1
    assert "\u202e" not in told["card"] + told["message"]
    ((kind, told),) = life.do(RenewRequested(2, 6, "t", 5000))
    assert (told["operation"], told["lease"], told["reason"]) == ("renew", f"{6:032x}", "not_found")
    life.history.note_requester(3, "uid:0")
    ((kind, told),) = life.do(FenceClearRequested(3, "no such card"))
    assert (told["operation"], told["tenant"]) == ("fence_clear", "uid:0")
    assert life.is_empty()


def test_one_that_never_began() -> None:
    life = Life()
    life.do(AcquireRequested(1, "t", 5, LeaseTerms(100, 60_000)))
    assert [kind.value for kind, _ in life.do(WorkerExited(5, "no fork"), 1)] == ["deny"]
    ((kind, told),) = life.do(ReclaimProved(5), 1)
    assert (kind.value, told["granted_us"], told["cause"]) == ("end", None, "spawn_failed")
    assert life.is_empty()


def test_one_whose_requester_left() -> None:
    life = Life()
    life.do(AcquireRequested(1, "t", 5, LeaseTerms(100, 60_000)))
    assert life.do(RequesterGone(1)) == []
    life.do(WorkerExited(5, "was killed"))
    ((_, told),) = life.do(ReclaimProved(5))
    assert told["cause"] == "abandoned"
    assert life.is_empty()


def test_who_asked_is_the_daemon_if_nobody_did() -> None:
    life = Life().granted()
    life.do(RevokeRequested(9, 5, "why"))
    life.do(WorkerExited(5, "was killed"))
    (_, told), _ = life.do(ReclaimProved(5))
    assert told["by"] == THE_DAEMON


@pytest.mark.parametrize("has_worker", [True, False])
def test_a_lease_of_an_earlier_daemon(has_worker: bool) -> None:
    before = Life().granted()
    kept = before.table.lease_row(5)
    assert kept is not None
    life = Life()
    told = life.do(LeaseRestored(kept, has_worker), 9)
    going_on = [("adopt", WHO | {"generation": 1, "ttl_ms": 60_000})]
    assert [(kind.value, data) for kind, data in told] == (going_on if has_worker else [])
    told = life.do(FreeRequested(3, 5, "t"), 1) + life.do(WorkerExited(5, "was killed"))
    assert [kind.value for kind, _ in told] == (["over"] if has_worker else ["deny"])
    ((kind, data),) = life.do(ReclaimProved(5), 1)
    assert (kind.value, data["granted_us"]) == ("end", None)
    assert life.is_empty()


def test_a_worker_of_no_lease() -> None:
    life = Life()
    assert life.do(WorkerFound(5, "GPU-a", 50)) == []
    life.do(WorkerExited(5, "was killed"))
    ((kind, data),) = life.do(ReclaimProved(5))
    assert (kind.value, data["tenant"], data["granted_us"]) == ("end", "", None)
    assert life.is_empty()


def test_a_drain_of_a_card() -> None:
    life = Life().granted()
    life.history.note_requester(7, "root")
    ((kind, told),) = life.do(DrainRequested(7, 500, "0"), 1)
    assert (kind.value, told["action"], told["card"], told["within_ms"]) == ("operator", "drain", "0", 500)
    ((_, told),) = life.do(DrainCancelled(8, "GPU-a"))
    assert (told["action"], told["card"]) == ("drain_cancel", "GPU-a")


def test_a_drain() -> None:
    life = Life().granted()
    life.history.note_requester(7, "root")
    ((kind, told),) = life.do(DrainRequested(7, 500), 1)
    assert (kind.value, told) == ("operator", {"action": "drain", "by": "root", "leases": 1, "within_ms": 500})
    ((kind, told),) = life.do(DrainTimerFired(), 500)
    assert (kind.value, told["cause"], told["reason"]) == ("over", "drained", "the node is drained")
    life.do(WorkerExited(5, "was killed"))
    life.do(ReclaimProved(5))
    ((_, told),) = life.do(DrainCancelled(8))
    assert told == {"action": "drain_cancel", "by": THE_DAEMON, "leases": 0}
    assert life.is_empty()


@pytest.mark.parametrize("ahead_bytes", [0, 70])
def test_a_park_says_how_much_was_copied_ahead(ahead_bytes: int) -> None:
    life = Life()
    life.table = LeaseTable([Card("GPU-a", 0, "a", 1000, 10)], CoreLimits(grace_ms={}, park_memory_bytes=1 << 30))
    life.history = LeaseHistory(life.table.get, life.table.submits.lease_of)
    life.do(AcquireRequested(1, "t", 5, LeaseTerms(100, 60_000, park_idle_ms=0)), 1)
    life.do(WorkerReady(5), 1)
    life.do(ParkRequested(7, 5, "t"))
    life.do(SessionParked(5, life.now_ns, 90, ahead_bytes=ahead_bytes))
    ((kind, told),) = life.do(RegionProved(5), 3)
    park = {"why": "tenant", "moved_bytes": 90, "ahead_bytes": ahead_bytes, "took_us": 3000}
    assert (kind.value, told) == ("park", WHO | park)
