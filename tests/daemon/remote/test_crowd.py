from dataclasses import dataclass

import pytest

from gpulease.daemon.remote.acceptor import first_of_the_fewest, first_of_the_largest, source_of


@dataclass(frozen=True)
class One:
    source: str
    number: int


CROWD = [One("b", 1), One("a", 2), One("a", 3), One("c", 4), One("b", 5), One("a", 6)]


@pytest.mark.parametrize(
    ("host", "source"),
    [
        ("10.0.0.1", "10.0.0.1"),
        ("2001:db8:1:2:3::4", "2001:db8:1:2::/64"),
        ("fe80::1%eth0", "fe80::/64"),
    ],
)
def test_an_address_or_a_site_is_a_source(host: str, source: str) -> None:
    assert source_of(host) == source


def test_the_first_of_those_of_whom_there_are_most_goes() -> None:
    assert first_of_the_largest(CROWD) == One("a", 2)
    assert first_of_the_largest(CROWD, lambda one: one.number > 3) == One("a", 6)
    assert first_of_the_largest(CROWD, lambda one: one.number in (4, 5)) == One("b", 5)
    assert first_of_the_largest(CROWD, lambda one: False) is None


def test_the_first_of_those_of_whom_fewest_are_in_comes_in() -> None:
    assert first_of_the_fewest(CROWD, [One("b", 7), One("a", 8)]) == One("c", 4)
    assert first_of_the_fewest(CROWD, []) == One("b", 1)
