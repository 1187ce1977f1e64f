from gpulease.daemon.record.audit.recorder import BURST_RECORDS, MAX_TENANTS, RECORDS_PER_S, Budgets

S = 1_000_000_000


def test_a_flood_is_counted_and_not_written() -> None:
    budgets = Budgets()
    assert [budgets.spend("loud", 0) for _ in range(BURST_RECORDS)] == [0] * BURST_RECORDS
    assert [budgets.spend("loud", 0) for _ in range(7)] == [None] * 7
    assert budgets.spend("quiet", 0) == 0
    assert budgets.spend("loud", S // RECORDS_PER_S) == 7
    assert budgets.spend("loud", S // RECORDS_PER_S) is None
    assert budgets.take_omitted() == {"loud": 1}
    assert budgets.take_omitted() == {}


def test_a_budget_fills_up_no_further() -> None:
    budgets = Budgets()
    budgets.spend("t", 0)
    spent = [budgets.spend("t", 10_000 * S) for _ in range(BURST_RECORDS + 1)]
    assert spent.count(None) == 1


def test_more_tenants_than_can_be_told_apart_share_one() -> None:
    budgets = Budgets()
    for number in range(MAX_TENANTS):
        budgets.spend(str(number), 0)
    spent = [budgets.spend(f"late {number}", 0) for number in range(BURST_RECORDS + 5)]
    assert spent.count(None) == 5
    assert budgets.take_omitted() == {"": 5}
