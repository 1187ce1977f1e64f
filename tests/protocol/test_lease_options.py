"""What the declarations of lease options accept, and that they say all that a table needs."""

from dataclasses import fields
from typing import Any

import pytest

from gpulease.protocol.failures import Failure, Refused
from gpulease.protocol.lease_options import (
    EXCLUSIVITY,
    KEPT_OPTIONS,
    LABELS,
    LATENCY,
    LEASE_NAME,
    MAX_KERNEL,
    OPTIONS,
    ORPHAN,
    PARKABLE,
    REGIONS_REQUIRED,
    REQUEST_ID,
    SUBMIT,
    WAITING,
    WEIGHT,
    LeaseOption,
    LeaseOptions,
    options_for_worker,
    read_options,
)
from gpulease.protocol.limits import MAX_LABELS
from gpulease.protocol.opcodes import Exclusivity, Status, Waiting
from gpulease.protocol.primitives import LeaseParameter


def given(option: LeaseOption[Any, Any], *values: bytes) -> tuple[LeaseParameter, ...]:
    """A request with the option, between others."""
    return (LeaseParameter(7, b"xy"), *(LeaseParameter(option.tag, value) for value in values), LeaseParameter(8, b""))


def refusal(option: LeaseOption[Any, Any], *values: bytes) -> Failure:
    with pytest.raises(Refused) as caught:
        option.read(given(option, *values))
    return caught.value.failure


VALUES: list[tuple[LeaseOption[Any, Any], Any, bytes]] = [
    *((EXCLUSIVITY, member, bytes([member])) for member in Exclusivity),
    (MAX_KERNEL, 2500, b"\0\0\x09\xc4"),
    *((WAITING, member, bytes([member])) for member in Waiting),
    (SUBMIT, 5, bytes(7) + b"\5"),
    (ORPHAN, 0, bytes(4)),
    (REGIONS_REQUIRED, True, b"\1"),
    (REGIONS_REQUIRED, False, b"\0"),
    (LEASE_NAME, "model-a.1_B", b"model-a.1_B"),
    (LABELS, {"zone": "a", "tier": "gold"}, b"zone=a,tier=gold"),
    (REQUEST_ID, "000102030405060708090a0b0c0d0e0f", bytes(range(16))),
    (WEIGHT, 3, b"\0\3"),
    (WEIGHT, 65535, b"\xff\xff"),
    (PARKABLE, 0, bytes(4)),
    (PARKABLE, 30_000, b"\0\0\x75\x30"),
    (LATENCY, True, b"\1"),
    (LATENCY, False, b"\0"),
]


@pytest.mark.parametrize(("option", "value", "data"), VALUES)
def test_a_value_and_its_bytes(option: LeaseOption[Any, Any], value: Any, data: bytes) -> None:
    assert option.parameter(value) == LeaseParameter(option.tag, data)
    assert option.read(given(option, data)) == value


def test_every_option_has_such_a_value() -> None:
    assert {option.tag for option, _, _ in VALUES} == {option.tag for option in OPTIONS}


def test_a_request_without_options_has_the_defaults() -> None:
    assert LeaseOptions(**read_options(())) == LeaseOptions()
    assert EXCLUSIVITY.read(()) is Exclusivity.SESSION_EXCLUSIVE
    assert LABELS.read(()) == {}


@pytest.mark.parametrize("option", OPTIONS)
def test_an_option_given_twice_is_refused(option: LeaseOption[Any, Any]) -> None:
    data = next(data for one, _, data in VALUES if one is option)
    assert refusal(option, data, data) == Failure(Status.INVALID_REQUEST, option.rule)


MALFORMED: list[tuple[LeaseOption[Any, Any], tuple[bytes, ...]]] = [
    (EXCLUSIVITY, (b"\xff", b"", b"\0\0", bytes(60000))),
    (MAX_KERNEL, (b"", bytes(4), b"\0\0\1")),
    (WAITING, (b"", b"\0\0")),
    (SUBMIT, (b"", bytes(8), b"\0\0\0\1")),
    (ORPHAN, (b"", bytes(3), bytes(5))),
    (REGIONS_REQUIRED, (b"", b"\2", b"\0\1")),
    (LEASE_NAME, (b"", b"-a", b"a/b", b"a b", b"\xff", b"a" * 129)),
    (LABELS, (b"", b"zone", b"zone=", b"a=b,a=c", b"a=b,", b",".join(b"k%d=v" % n for n in range(MAX_LABELS + 1)))),
    (REQUEST_ID, (b"", bytes(16), b"a" * 15, b"a" * 17)),
    (WEIGHT, (b"", b"\0\0", b"\1", b"\0\0\1")),
    (LATENCY, (b"", b"\2", b"\0\1")),
    (PARKABLE, (b"", bytes(3), bytes(5))),
]


@pytest.mark.parametrize(("option", "data"), [(option, data) for option, values in MALFORMED for data in values])
def test_a_malformed_value_is_refused(option: LeaseOption[Any, Any], data: bytes) -> None:
    assert refusal(option, data).status is Status.INVALID_REQUEST


@pytest.mark.parametrize(("option", "number"), [(EXCLUSIVITY, 4), (EXCLUSIVITY, 254), (WAITING, 3), (WAITING, 255)])
def test_an_unknown_member_is_unsupported(option: LeaseOption[Any, Any], number: int) -> None:
    failure = refusal(option, bytes([number]))
    assert failure.status is Status.UNSUPPORTED
    assert str(number) in failure.message
    assert "0 (s" in failure.hint


@pytest.mark.parametrize(
    ("option", "value"),
    [
        (MAX_KERNEL, 0),
        (MAX_KERNEL, 2**32),
        (ORPHAN, -1),
        (LEASE_NAME, "a/b"),
        (WEIGHT, 0),
        (WEIGHT, 65536),
        (REQUEST_ID, "00" * 16),
    ],
)
def test_a_value_out_of_bounds_is_not_sent(option: LeaseOption[Any, Any], value: Any) -> None:
    with pytest.raises(ValueError, match=str(value)):
        option.parameter(value)


def test_a_lease_s_worker_gets_its_options_and_a_submit_s_those_that_it_obeys() -> None:
    lease = LeaseOptions(max_kernel_ms=5, regions_required=True, name="model-a")
    of_session = {"max_kernel_ms": 5, "waiting": None, "regions_required": True, "latency": False}
    assert options_for_worker(lease, is_submit=False) == of_session
    assert options_for_worker(lease, is_submit=True) == {"max_kernel_ms": 5, "waiting": None}


def test_each_option_but_the_labels_is_kept() -> None:
    assert {item.name for item in fields(LeaseOptions)} == KEPT_OPTIONS.keys()
    assert [option for option in OPTIONS if option not in KEPT_OPTIONS.values()] == [LABELS]
