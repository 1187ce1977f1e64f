"""Quotas over all nodes: never more than the sum, whatever is lost, and all of it where it is wanted."""

from json import loads

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpulease.daemon.fleet.etcd.transactions import Get, Put, Transaction, Unknown
from gpulease.daemon.fleet.records.fleet_records import HELD, QUOTAS, node_key
from gpulease.daemon.fleet.rules.fleet_events import (
    Answered,
    ClaimRefusal,
    EndClaimed,
    LiveClaims,
    QuotaDropped,
    QuotaEnded,
    QuotaGiven,
    QuotaRefused,
    QuotaWanted,
    Reason,
)
from gpulease.daemon.fleet.rules.quota_records import (
    SHARDS,
    DefaultQuota,
    all_shards,
    quota_prefix,
    read_shards,
    spread,
)

from .member_host import Host, S
from .model_etcd import ModelEtcd

TENANT = "team/a"


def ask(host: Host, size: int, request: int, wait_s: float = 0) -> None:
    host.send(QuotaWanted(request, TENANT, size, f"{request:032x}", host.now + int(wait_s * S)))


def budgets(etcd: ModelEtcd) -> tuple[int, int]:
    """Return the sum of the budgets, and that of the entries."""
    records = [loads(kv.value) for key, kv in etcd.keys.items() if key.startswith(QUOTAS)]
    used = sum(size for record in records for _, _, size in record["used"].values())
    return sum(record["budget"] for record in records), used


def set_quota(etcd: ModelEtcd, total: int) -> None:
    """Set the quota as an operator's command does."""
    found = etcd.read(Get(quota_prefix(TENANT), is_prefix=True))
    shards = all_shards(TENANT, read_shards(found)).values()
    spread(shards, total)
    assert etcd.do(Transaction(writes=tuple(shard.put() for shard in shards))).succeeded


def set_default(etcd: ModelEtcd, total: int) -> None:
    etcd.do(Transaction(writes=(DefaultQuota(total, 0).put(),)))


def held(etcd: ModelEtcd) -> list[bytes]:
    return [key for key in etcd.keys if key.startswith(HELD)]


def given_to(host: Host) -> list[int]:
    return [given.request for given in host.take(QuotaGiven)]


@pytest.fixture
def etcd() -> ModelEtcd:
    return ModelEtcd()


@pytest.fixture
def hosts(etcd: ModelEtcd) -> list[Host]:
    hosts = [Host(etcd, f"n{number}").begin() for number in range(3)]
    set_quota(etcd, 1_000)
    return hosts


def test_a_tenant_without_a_quota_is_refused(etcd: ModelEtcd) -> None:
    host = Host(etcd).begin()
    ask(host, 1, 1)
    host.settle()
    assert [refused.why for refused in host.take(QuotaRefused)] == [ClaimRefusal.NO_QUOTA]


def test_more_than_the_quota_is_refused_at_once(hosts: list[Host]) -> None:
    ask(hosts[0], 1_001, 1, wait_s=100)
    hosts[0].settle()
    assert [refused.why for refused in hosts[0].take(QuotaRefused)] == [ClaimRefusal.TOO_LARGE]


def test_a_tenant_without_a_quota_has_the_default_and_a_later_one_too(etcd: ModelEtcd) -> None:
    hosts = [Host(etcd, f"n{number}").begin() for number in range(2)]
    set_default(etcd, 1_000)
    ask(hosts[0], 700, 1)
    hosts[0].settle()
    assert (given_to(hosts[0]), budgets(etcd)) == ([1], (1_000, 700))
    set_default(etcd, 800)
    ask(hosts[1], 101, 2)
    hosts[1].settle()
    assert given_to(hosts[1]) == []
    ask(hosts[1], 100, 3)
    hosts[1].settle()
    assert (given_to(hosts[1]), budgets(etcd)) == ([3], (800, 800))


def test_a_tenants_own_quota_outlives_the_default(etcd: ModelEtcd, hosts: list[Host]) -> None:
    set_default(etcd, 10)
    ask(hosts[0], 1_000, 1)
    hosts[0].settle()
    assert given_to(hosts[0]) == [1]


def test_budgets_move_to_the_node_that_wants_all_of_them(etcd: ModelEtcd, hosts: list[Host]) -> None:
    ask(hosts[0], 1_000, 1)
    hosts[0].settle()
    assert given_to(hosts[0]) == [1]
    assert budgets(etcd) == (1_000, 1_000)
    ask(hosts[1], 1, 2)
    hosts[1].settle()
    assert [refused.why for refused in hosts[1].take(QuotaRefused)] == [ClaimRefusal.TAKEN]


def test_bytes_that_were_given_back_go_to_who_waits(etcd: ModelEtcd, hosts: list[Host]) -> None:
    ask(hosts[0], 900, 1)
    hosts[0].settle()
    ask(hosts[1], 200, 2, wait_s=10)
    hosts[1].settle()
    hosts[0].send(QuotaEnded(TENANT, f"{1:032x}"))
    hosts[0].settle()
    hosts[1].run(2)
    assert given_to(hosts[1]) == [2]
    assert budgets(etcd) == (1_000, 200)


def test_nothing_is_given_on_an_unknown_answer_until_it_is_read_back(etcd: ModelEtcd, hosts: list[Host]) -> None:
    ask(hosts[0], 100, 1, wait_s=10)
    host = hosts[0]
    reading = host.asked.pop(0)
    host.send(Answered(reading.number, etcd.do(reading.transaction)))
    writing = host.asked.pop(0)
    etcd.do(writing.transaction)
    host.send(Answered(writing.number, Unknown("timeout")))
    assert given_to(host) == []
    host.run(2)
    assert given_to(host) == [1]
    assert budgets(etcd) == (1_000, 100)


def test_an_attempt_that_is_done_after_it_was_given_up_fails(etcd: ModelEtcd, hosts: list[Host]) -> None:
    host = hosts[0]
    ask(host, 100, 1, wait_s=10)
    reading = host.asked.pop(0)
    host.send(Answered(reading.number, etcd.do(reading.transaction)))
    writing = host.asked.pop(0)
    host.send(QuotaDropped(1))
    host.settle()
    assert not etcd.do(writing.transaction).succeeded
    host.send(Answered(writing.number, Unknown("timeout")))
    host.run(2)
    assert budgets(etcd) == (1_000, 0)
    assert given_to(host) == []


def test_a_dead_node_s_bytes_come_back_when_its_leases_are_surely_over(etcd: ModelEtcd, hosts: list[Host]) -> None:
    ask(hosts[0], 1_000, 1)
    hosts[0].settle()
    began = hosts[1].now
    ask(hosts[1], 10, 2, wait_s=100)
    hosts[1].settle()
    while not given_to(hosts[1]):
        hosts[1].run(0.1)
        assert hosts[1].now < began + 100 * S
    assert hosts[1].now - began >= 30 * S
    assert node_key("n0") not in etcd.keys


def test_a_dead_node_s_bytes_come_back_though_nobody_waits(etcd: ModelEtcd, hosts: list[Host]) -> None:
    ask(hosts[0], 1_000, 1)
    hosts[0].settle()
    for request in range(2, 100):
        ask(hosts[1], 10, request)
        hosts[1].settle()
        if given_to(hosts[1]):
            break
        hosts[1].run(1)
    assert budgets(etcd) == (1_000, 10)
    assert request >= 32, "its leases may live for so long"


def test_a_lower_quota_leaves_leases_and_admits_none(etcd: ModelEtcd, hosts: list[Host]) -> None:
    ask(hosts[0], 500, 1)
    hosts[0].settle()
    set_quota(etcd, 300)
    ask(hosts[1], 1, 2)
    hosts[1].settle()
    assert given_to(hosts[1]) == []
    hosts[0].send(QuotaEnded(TENANT, f"{1:032x}"))
    hosts[0].settle()
    assert given_to(hosts[0]) == [1]
    for request, size, expected in ((3, 301, []), (4, 300, [4]), (5, 1, [])):
        ask(hosts[0], size, request)
        hosts[0].settle()
        assert given_to(hosts[0]) == expected
    assert budgets(etcd) == (300, 300)


def test_two_nodes_never_both_get_what_a_lower_quota_has_left(etcd: ModelEtcd, hosts: list[Host]) -> None:
    """Leases of three nodes fill the quota. It is lowered, two end, and those nodes ask at the same time."""
    for number, host in enumerate(hosts):
        ask(host, (300, 300, 400)[number], number)
        host.settle()
        assert given_to(host) == [number]
    set_quota(etcd, 500)
    for number, host in enumerate(hosts[:2]):
        host.send(QuotaEnded(TENANT, f"{number:032x}"))
        host.settle()
        ask(host, 100, 10 + number)
    for _ in range(2):
        readings = [host.asked.pop(0) for host in hosts[:2]]
        for host, reading in zip(hosts[:2], readings, strict=True):
            host.send(Answered(reading.number, etcd.do(reading.transaction)))
    for host in hosts[:2]:
        host.settle()
    assert len(given_to(hosts[0]) + given_to(hosts[1])) == 1
    assert budgets(etcd) == (500, 500)


def test_a_fenced_node_s_own_bytes_are_free_when_it_has_joined_again(etcd: ModelEtcd, hosts: list[Host]) -> None:
    ask(hosts[0], 1_000, 1)
    hosts[0].settle()
    assert given_to(hosts[0]) == [1]
    etcd.delete(node_key("n0"))
    hosts[0].run(6)
    hosts[0].send(LiveClaims())
    hosts[0].settle()
    ask(hosts[0], 1_000, 2)
    hosts[0].settle()
    assert given_to(hosts[0]) == [2]


@pytest.mark.parametrize("is_late", [False, True])
def test_a_restarted_process_gives_back_what_no_lease_has(etcd: ModelEtcd, hosts: list[Host], is_late: bool) -> None:
    """A lease's entry, or an attempt that is done after the restart, once it can be no other daemon's."""
    host = hosts[0]
    left = host.left()
    ask(host, 100, 1)
    host.settle()
    ask(host, 100, 2, wait_s=10)
    reading = host.asked.pop(0)
    host.send(Answered(reading.number, etcd.do(reading.transaction)))
    attempt = host.asked.pop(0).transaction
    if not is_late:
        assert etcd.do(attempt).succeeded
    again = Host(etcd, "n0", host.now, run=2, **left)
    again.begin(quotas={f"{1:032x}": TENANT})
    if is_late:
        assert etcd.do(attempt).succeeded
    again.run(30)
    assert budgets(etcd) == (1_000, 200)
    again.run(12)
    assert budgets(etcd) == (1_000, 100)
    assert [key.rpartition(b"/")[2] for key in held(etcd)] == [b"%032x" % 1]


def test_nothing_is_joined_while_a_lease_of_a_lost_membership_counts(etcd: ModelEtcd) -> None:
    host = Host(etcd)
    host.begin(quotas={f"{1:032x}": TENANT})
    assert [lost.reason for lost in host.take(EndClaimed)] == [Reason.FORGOTTEN]
    assert node_key("a") not in etcd.keys
    host.send(LiveClaims())
    host.settle()
    assert node_key("a") in etcd.keys


@pytest.mark.parametrize("value", [b"\xff", b"[]", b'{"used":{"x":[1]},"budget":9}', b'{"used":{}}', b"0" * 70_000])
def test_a_foreign_value_in_a_shard_gives_no_bytes(etcd: ModelEtcd, hosts: list[Host], value: bytes) -> None:
    for key in [key for key in etcd.keys if key.startswith(QUOTAS)]:
        etcd.do(Transaction(writes=(Put(key, value),)))
    ask(hosts[0], 1, 1)
    hosts[0].settle()
    assert given_to(hosts[0]) == []


def test_a_node_that_was_fenced_asks_for_bytes_no_more_until_it_has_beaten(etcd: ModelEtcd) -> None:
    host = Host(etcd).begin()
    set_quota(etcd, 1_000)
    del etcd.keys[node_key("a")]
    ask(host, 100, 1, wait_s=100)
    host.settle()
    assert given_to(host) == []
    host.run(12)
    host.send(LiveClaims())
    host.settle()
    assert node_key("a") in etcd.keys, "a beat showed it, and the node joined again"
    assert given_to(host) == [1]


STEPS = st.lists(
    st.tuples(st.integers(0, 2), st.sampled_from(["ask", "ask", "end", "drop", "answer", "do", "lose", "pass"])),
    max_size=60,
)


@settings(max_examples=100, deadline=None)
@given(steps=STEPS, size=st.integers(100, 600))
def test_never_more_is_given_than_the_quota(steps: list[tuple[int, str]], size: int) -> None:
    """Leases that were given and have not ended are never above the sum, in any order of answers, losses and drops."""
    etcd = ModelEtcd()
    hosts = [Host(etcd, f"n{number}").begin() for number in range(3)]
    set_quota(etcd, 1_000)
    living: dict[int, Host] = {}
    late = []
    for request, (number, step) in enumerate(steps, 1):
        host = hosts[number]
        match step:
            case "ask":
                ask(host, size, request, wait_s=20)
            case "end":
                for ended in [lease for lease, owner in living.items() if owner is host]:
                    del living[ended]
                    host.send(QuotaEnded(TENANT, f"{ended:032x}"))
            case "drop":
                host.send(QuotaDropped(request - 2))
            case "answer":
                host.settle()
            case "do" if host.asked:
                asked = host.asked.pop(0)
                host.send(Answered(asked.number, etcd.do(asked.transaction)))
            case "lose" if host.asked:
                asked = host.asked.pop(0)
                late.append(asked.transaction)
                host.send(Answered(asked.number, Unknown("timeout")))
            case "pass":
                for transaction in late:
                    etcd.do(transaction)
                late.clear()
                for other in hosts:
                    other.run(0.6)
        for other in hosts:
            living |= dict.fromkeys(given_to(other), other)
        assert len(living) * size <= 1_000
        assert budgets(etcd)[0] == 1_000
    for host in hosts:
        host.settle()
        living |= dict.fromkeys(given_to(host), host)
    for host in hosts:
        host.run(25)
        living |= dict.fromkeys(given_to(host), host)
    assert len(living) * size <= 1_000
    assert budgets(etcd) == (1_000, len(living) * size)
    assert len(held(etcd)) == len(living)


def test_there_are_sixteen_shards(etcd: ModelEtcd, hosts: list[Host]) -> None:
    assert len([key for key in etcd.keys if key.startswith(QUOTAS)]) == SHARDS == 16
