"""Shares of the contexts that wait for a tenant, however many another tenant leaves."""

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from gpulease.daemon.leases.events import RecycleWorker, RenameWorker, WorkerScrubbed
from gpulease.daemon.leases.model import WarmContext, WarmState, contexts_to_drop

from .scenario import one
from .test_warm_pool import WARM, killed
from .test_warm_pool_recycling import BOUNDS, RecyclingScenario


def test_a_tenant_with_fewer_takes_the_place_of_the_oldest_of_the_one_with_most() -> None:
    s = RecyclingScenario(1, capacity=1000)
    for lease_id, tenant in enumerate(("ann", "ann", "bob", "bob", "cy"), start=1):
        s.active(lease_id, tenant=tenant)
        s.at(1)
        s.fill()

    def left_by(lease_id: int, tenant: str) -> tuple[int, list[int]]:
        s.free(lease_id, tenant)
        effects = s.do(WorkerScrubbed(lease_id))
        return one(effects, RecycleWorker).warm_id, killed(effects)

    oldest, _ = left_by(1, "ann")
    anns, none = left_by(2, "ann")
    bobs, gone = left_by(3, "bob")
    assert (none, gone) == ([], [oldest])
    s.gone_warm(oldest)
    assert killed(s.free(4, "bob")) == [4], "they have as many"
    assert killed(s.free(5, "cy")) == [5], "nobody has so many that one can be taken"
    assert s.card().recycled_contexts == BOUNDS.max_idle
    taken = [one(s.acquire(6 + number, tenant=who), RenameWorker) for number, who in enumerate(("ann", "bob"))]
    assert [effect.from_id for effect in taken] == [anns, bobs]


@given(st.integers(1, 16), st.lists(st.sampled_from("abcdefgh"), max_size=60))
def test_nobody_keeps_others_from_their_share(most: int, leaving: list[str]) -> None:
    waiting: list[WarmContext] = []
    for number, tenant in enumerate(leaving):
        before = Counter(context.tenant for context in waiting)
        going = contexts_to_drop(waiting, tenant, most)
        if going is None:
            assert len(waiting) == most
            assert before[tenant] >= most // len({*before, tenant}), "whoever has less than its share gets it"
            continue
        assert len(going) == (len(waiting) == most)
        for gone in going:
            assert gone.tenant is not None
            assert before[gone.tenant] == max(before.values())
            assert gone is next(context for context in waiting if context.tenant == gone.tenant), "its oldest"
            assert before[gone.tenant] - 1 >= before[tenant] + 1, "nobody takes from who has no more"
            waiting.remove(gone)
        waiting.append(WarmContext(WARM + number, "GPU-a", 1, 0, WarmState.READY, tenant=tenant, leases=1))
    assert len(waiting) <= most
