from dataclasses import dataclass, field
from typing import cast

from gpulease.daemon.broker.control_connection import OPERATOR_CONNECTIONS, ConnectionLimiter, ControlConnection
from gpulease.daemon.broker.peer import Peer
from gpulease.protocol.failures import Failure
from gpulease.protocol.opcodes import Status


@dataclass(eq=False)
class Visitor:
    """All a doorkeeper sees of a connection."""

    peer: Peer
    heard: list[Failure] = field(default_factory=list)

    def say_goodbye(self, failure: Failure) -> None:
        self.heard.append(failure)


def visitor(tenant: str = "uid:1", *, is_operator: bool = False) -> ControlConnection:
    return cast(ControlConnection, Visitor(Peer(tenant, is_operator, is_known=True)))


def test_the_limit_in_all() -> None:
    door = ConnectionLimiter(3, 3)
    inside = [visitor(f"uid:{number}") for number in range(3)]
    assert [door.admit(one) for one in inside] == [None] * 3
    late = visitor("uid:9")
    refusal = door.admit(late)
    assert refusal is not None
    assert refusal.status is Status.BUSY
    assert "3 control connections" in refusal.message
    assert refusal.hint
    door.release(late)
    assert door.admit(late) is not None
    door.release(inside[0])
    assert door.admit(late) is None


def test_the_limit_of_one_tenant() -> None:
    door = ConnectionLimiter(10, 2)
    mine = [visitor() for _ in range(2)]
    assert [door.admit(one) for one in mine] == [None, None]
    refusal = door.admit(visitor())
    assert refusal is not None
    assert "tenant uid:1 has 2" in refusal.message
    assert door.admit(visitor("uid:2")) is None
    door.release(mine[0])
    assert door.admit(visitor()) is None


def test_operators_get_in_when_tenants_fill_it() -> None:
    door = ConnectionLimiter(2, 2)
    for _ in range(2):
        assert door.admit(visitor()) is None
    for _ in range(OPERATOR_CONNECTIONS):
        assert door.admit(visitor("uid:0", is_operator=True)) is None
    assert door.admit(visitor("uid:0", is_operator=True)) is not None


def test_a_release_counts_once() -> None:
    door = ConnectionLimiter(1, 1)
    one = visitor()
    assert door.admit(one) is None
    for _ in range(3):
        door.release(one)
    assert door.admit(visitor()) is None
    assert door.admit(visitor()) is not None


def test_everybody_inside_hears_the_goodbye() -> None:
    door = ConnectionLimiter(2, 2)
    inside = [visitor(), visitor()]
    for one in inside:
        door.admit(one)
    outside = visitor()
    door.admit(outside)
    failure = Failure(Status.BUSY, "stopping")
    door.say_goodbye(failure)
    assert [cast(Visitor, one).heard for one in (*inside, outside)] == [[failure], [failure], []]
