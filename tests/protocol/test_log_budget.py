from gpulease.protocol.log_budget import LogBudget
from gpulease.protocol.time_units import NS_PER_S


def test_a_burst_is_admitted_and_what_follows_is_counted() -> None:
    budget = LogBudget(3, NS_PER_S)
    assert [budget.spend(0) for _ in range(5)] == [0, 0, 0, None, None]
    assert budget.spend(NS_PER_S - 1) is None
    assert budget.spend(NS_PER_S) == 3
    assert budget.spend(NS_PER_S) is None


def test_silence_fills_the_budget_no_further_than_a_burst() -> None:
    budget = LogBudget(3, NS_PER_S)
    assert budget.spend(1000 * NS_PER_S, 3) == 0
    assert budget.spend(2000 * NS_PER_S, 4) is None
    assert budget.spend(2000 * NS_PER_S, 3) == 1
