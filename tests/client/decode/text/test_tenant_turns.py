import pytest

from gpulease.client.decode.text.tenant_turns import TenantTurns


def taken(turns: TenantTurns[str]) -> list[str]:
    """All jobs in their turns, each done at once."""
    jobs = []
    while (job := turns.take()) is not None:
        jobs.append(job)
        turns.done(job[0])
    return jobs


def test_tenants_take_turns_and_a_tenant_s_jobs_keep_their_order() -> None:
    turns = TenantTurns[str](1)
    for job in ("a1", "a2", "a3", "b1", "c1", "c2"):
        turns.add(job[0], job)
    assert taken(turns) == ["a1", "b1", "c1", "a2", "c2", "a3"]


@pytest.mark.parametrize("max_concurrent", [1, 3])
def test_a_tenant_has_no_more_under_way_than_it_may(max_concurrent: int) -> None:
    turns = TenantTurns[str](max_concurrent)
    for number in range(5):
        turns.add("a", f"a{number}")
    assert [turns.take() for _ in range(max_concurrent)] == [f"a{number}" for number in range(max_concurrent)]
    assert turns.take() is None
    turns.add("b", "b0")
    assert turns.take() == "b0"
    turns.done("a")
    assert turns.take() == f"a{max_concurrent}"
    assert turns.take() is None


def test_a_job_that_is_done_again_is_its_tenant_s_first() -> None:
    turns = TenantTurns[str](1)
    for job in ("a1", "a2", "b1"):
        turns.add(job[0], job)
    assert turns.take() == "a1"
    turns.add("a", "a1", is_first=True)
    assert turns.take() == "b1"
    turns.done("a")
    assert turns.take() == "a1"


def test_a_job_that_is_dropped_has_no_turn() -> None:
    turns = TenantTurns[str](1)
    for job in ("a1", "b1", "a2"):
        turns.add(job[0], job)
    turns.drop("a", "a1")
    turns.drop("b", "b1")
    turns.drop("b", "b1")
    turns.drop("nobody", "c1")
    assert taken(turns) == ["a2"]


def test_what_waits_can_be_taken_out_at_once() -> None:
    turns = TenantTurns[str](1)
    for job in ("a1", "b1", "a2"):
        turns.add(job[0], job)
    assert turns.take() == "a1"
    assert sorted(turns.drain()) == ["a2", "b1"]
    turns.done("a")
    assert turns.take() is None
