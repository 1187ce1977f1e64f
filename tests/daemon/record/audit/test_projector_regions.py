"""Records of regions: a lease's, with the lease that they lie in."""

from typing import Any

from gpulease.daemon.leases.events import (
    FreeRequested,
    RegionCancelRequested,
    RegionEnded,
    RegionOpened,
    RegionRequested,
    RenewRequested,
    ResizeRequested,
    RevokeRequested,
    SliceResized,
    TimerFired,
    TimerKind,
    WorkerExited,
)

from .test_projector import LEASE, WHO, Life, times

GRANULE = 2
REGION = f"{50:032x}"
REGION_WHO = {"lease": REGION, "tenant": "bob", "card": "GPU-a", "size_bytes": 4, "parent": LEASE}


class RegionLife(Life):
    """A lease of t's, and a region of bob's in it, opened at 4 ms."""

    def request(self, size_bytes: int = 4, request: int = 2) -> list[Any]:
        return self.do(RegionRequested(request, 5, 50, "t", "bob", size_bytes, 1000, GRANULE), 1)

    def opened(self) -> "RegionLife":
        self.granted()
        self.request()
        self.do(RegionOpened(50, 1 << 40), 1)
        return self


def test_a_whole_life() -> None:
    life = RegionLife()
    life.granted()
    assert life.request() == []
    ((kind, told),) = life.do(RegionOpened(50, 1 << 40), 2)
    grant = {"exclusivity": "session_exclusive", "generation": 1, "ttl_ms": 1000, "waited_us": 2000}
    assert told["exclusivity"]
    assert (kind.value, told | {"exclusivity": "session_exclusive"}) == ("grant", REGION_WHO | grant)
    ((kind, told),) = life.do(RenewRequested(3, 50, "bob", 5000), 1)
    assert (kind.value, told) == ("renew", REGION_WHO | {"generation": 2, "ttl_ms": 5000, "by": "bob"})
    ((kind, told),) = life.do(FreeRequested(4, 50, "bob"), 1)
    why = {"cause": "freed", "reason": "freed by its tenant"}
    assert (kind.value, told) == ("over", REGION_WHO | times(5, 7) | why)
    ((kind, told),) = life.do(RegionEnded(50, 4, 0, True), 3)
    assert (kind.value, told) == ("end", REGION_WHO | times(5, 7) | why | {"latency_us": 3000})


def test_an_expiry() -> None:
    life = RegionLife().opened()
    ((kind, told),) = life.do(TimerFired(50, 1, TimerKind.EXPIRY), 1000)
    assert (kind.value, told["cause"], told["parent"]) == ("over", "expired", LEASE)


def test_a_revocation_and_who_asked_for_it() -> None:
    life = RegionLife().opened()
    life.history.note_requester(9, "t")
    assert [kind.value for kind, _ in life.do(RevokeRequested(9, 50, "because", "t", False), 1)] == ["over"]
    told = {kind.value: data for kind, data in life.do(RegionEnded(50, 4, 0, True), 1)}
    assert told["operator"] == {
        "action": "revoke",
        "by": "t",
        "lease": REGION,
        "reason": "because",
        "outcome": "torn_down",
        "latency_us": 1000,
    }
    assert told["end"]["cause"] == "revoked"


def test_the_lease_s_end_is_told_for_each_of_its_regions() -> None:
    life = RegionLife().opened()
    told = life.do(WorkerExited(5, "died"), 1)
    assert [(kind.value, data["lease"]) for kind, data in told] == [("over", LEASE), ("over", REGION)]


def test_one_that_was_refused_is_a_denial_that_names_the_lease() -> None:
    life = RegionLife()
    life.granted()
    ((kind, told),) = life.request(size_bytes=1000)
    assert (kind.value, told["operation"], told["tenant"], told["lease"]) == ("deny", "region_open", "t", LEASE)
    assert (told["size_bytes"], told["ttl_ms"]) == (1000, 1000)


def test_a_cancel_is_no_record_and_one_that_is_denied_is() -> None:
    life = RegionLife().opened()
    assert life.do(RegionCancelRequested(7, 50, "t", True), 1) == []
    ((kind, told),) = life.do(RegionCancelRequested(8, 50, "eve", True), 1)
    assert (kind.value, told["operation"], told["tenant"], told["lease"]) == ("deny", "region_cancel", "eve", REGION)


def test_another_size_and_who_asked_for_it() -> None:
    life = RegionLife()
    life.granted()
    assert life.do(ResizeRequested(7, 5, "t", 300), 1) == []
    ((kind, told),) = life.do(SliceResized(5, 300), 1)
    assert (kind.value, told) == ("resize", WHO | {"size_bytes": 300, "by": "t"})
