from dataclasses import dataclass, field

from gpulease.daemon.broker.connection_limiter import OPERATOR_CONNECTIONS, ConnectionLimiter
from gpulease.daemon.broker.peer import Peer
from gpulease.protocol.failures import Failure
from gpulease.protocol.opcodes import Status


@dataclass(eq=False)
class Visitor:
    """A connection as the limiter sees it."""

    peer: Peer
    heard: list[Failure] = field(default_factory=list)

    def close_with(self, failure: Failure) -> None:
        self.heard.append(failure)

    def turn_away(self, failure: Failure) -> None:
        raise NotImplementedError


def visitor(tenant: str = "uid:1", *, is_operator: bool = False) -> Visitor:
    return Visitor(Peer(tenant, is_operator, is_known=True))


def test_the_limit_in_all() -> None:
    limiter = ConnectionLimiter(3, 3)
    inside = [visitor(f"uid:{number}") for number in range(3)]
    assert [limiter.admit(one) for one in inside] == [None] * 3
    late = visitor("uid:9")
    refusal = limiter.admit(late)
    assert refusal is not None
    assert refusal.status is Status.BUSY
    assert "3 control connections" in refusal.message
    assert refusal.hint
    limiter.release(late)
    assert limiter.admit(late) is not None
    limiter.release(inside[0])
    assert limiter.admit(late) is None


def test_the_limit_of_one_tenant() -> None:
    limiter = ConnectionLimiter(10, 2)
    mine = [visitor() for _ in range(2)]
    assert [limiter.admit(one) for one in mine] == [None, None]
    refusal = limiter.admit(visitor())
    assert refusal is not None
    assert "tenant uid:1 has 2" in refusal.message
    assert limiter.admit(visitor("uid:2")) is None
    limiter.release(mine[0])
    assert limiter.admit(visitor()) is None


def test_operators_get_in_when_tenants_fill_it() -> None:
    limiter = ConnectionLimiter(2, 2)
    for _ in range(2):
        assert limiter.admit(visitor()) is None
    for _ in range(OPERATOR_CONNECTIONS):
        assert limiter.admit(visitor("uid:0", is_operator=True)) is None
    assert limiter.admit(visitor("uid:0", is_operator=True)) is not None


def test_a_release_counts_once() -> None:
    limiter = ConnectionLimiter(1, 1)
    one = visitor()
    assert limiter.admit(one) is None
    for _ in range(3):
        limiter.release(one)
    assert limiter.admit(visitor()) is None
    assert limiter.admit(visitor()) is not None


def test_everybody_inside_hears_the_goodbye() -> None:
    limiter = ConnectionLimiter(2, 2)
    inside = [visitor(), visitor()]
    for one in inside:
        limiter.admit(one)
    outside = visitor()
    limiter.admit(outside)
    failure = Failure(Status.BUSY, "stopping")
    limiter.close_all_with(failure)
    assert [one.heard for one in (*inside, outside)] == [[failure], [failure], []]
