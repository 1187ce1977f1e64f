from dataclasses import dataclass

import pytest

from gpulease.daemon.remote.pending_connections import oldest_of_largest_source, oldest_of_smallest_source, source_of


@dataclass(frozen=True)
class One:
    source: str
    number: int


WAITING = [One("b", 1), One("a", 2), One("a", 3), One("c", 4), One("b", 5), One("a", 6)]


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
    assert oldest_of_largest_source(WAITING) == One("a", 2)
    assert oldest_of_largest_source(WAITING, lambda one: one.number > 3) == One("a", 6)
    assert oldest_of_largest_source(WAITING, lambda one: one.number in (4, 5)) == One("b", 5)
    assert oldest_of_largest_source(WAITING, lambda one: False) is None


def test_the_first_of_those_of_whom_fewest_are_in_comes_in() -> None:
    assert oldest_of_smallest_source(WAITING, [One("b", 7), One("a", 8)]) == One("c", 4)
    assert oldest_of_smallest_source(WAITING, []) == One("b", 1)
