import pytest

from gpulease.daemon.broker.handlers.lease_requests import (
    check_labels,
    exclusivity_of,
    labels_of,
    max_kernel_ms_of,
    name_of,
    request_id_of,
    waiting_of,
)
from gpulease.daemon.broker.refusal import Refused
from gpulease.protocol.limits import MAX_LABELS
from gpulease.protocol.opcodes import (
    EXCLUSIVITY_TAG,
    LABELS_TAG,
    MAX_KERNEL_TAG,
    NAME_TAG,
    REQUEST_ID_TAG,
    WAITING_TAG,
    Exclusivity,
    Status,
    Waiting,
)
from gpulease.protocol.primitives import LeaseParameter


def classes(*values: bytes) -> tuple[LeaseParameter, ...]:
    return tuple(LeaseParameter(EXCLUSIVITY_TAG, value) for value in values)


def test_the_class_if_none_is_given() -> None:
    assert exclusivity_of(()) is Exclusivity.SESSION_EXCLUSIVE
    assert exclusivity_of((LeaseParameter(0x0905, b"\x02"),)) is Exclusivity.SESSION_EXCLUSIVE


@pytest.mark.parametrize("member", Exclusivity)
def test_known_classes(member: Exclusivity) -> None:
    assert exclusivity_of(classes(bytes([member]))) is member
    assert exclusivity_of((LeaseParameter(7, b"xy"), *classes(bytes([member])))) is member


@pytest.mark.exhaustive
@pytest.mark.parametrize("number", range(4, 255))
def test_unknown_classes(number: int) -> None:
    with pytest.raises(Refused, match=str(number)) as caught:
        exclusivity_of(classes(bytes([number])))
    assert caught.value.failure.status is Status.UNSUPPORTED


@pytest.mark.parametrize("values", [(b"\xff",), (b"",), (b"\0\0",), (b"\0", b"\0"), (b"\0", b"\1"), (b"\0" * 60000,)])
def test_what_is_no_class(values: tuple[bytes, ...]) -> None:
    with pytest.raises(Refused) as caught:
        exclusivity_of(classes(*values))
    assert caught.value.failure.status is Status.INVALID_REQUEST


def test_how_long_a_kernel_may_run() -> None:
    assert max_kernel_ms_of(classes(b"\0")) == 0
    assert max_kernel_ms_of((*classes(b"\0"), LeaseParameter(MAX_KERNEL_TAG, b"\0\0\x09\xc4"))) == 2500


@pytest.mark.parametrize("values", [(b"",), (b"\0\0\0\0",), (b"\0\0\1",), (b"\0\0\0\1", b"\0\0\0\1")])
def test_what_is_no_time_for_a_kernel(values: tuple[bytes, ...]) -> None:
    with pytest.raises(Refused) as caught:
        max_kernel_ms_of(tuple(LeaseParameter(MAX_KERNEL_TAG, value) for value in values))
    assert caught.value.failure.status is Status.INVALID_REQUEST


@pytest.mark.parametrize("waiting", [None, *Waiting])
def test_how_a_session_waits(waiting: Waiting | None) -> None:
    said = () if waiting is None else (LeaseParameter(WAITING_TAG, bytes([waiting])),)
    assert waiting_of((*classes(b"\0"), *said)) is waiting


@pytest.mark.parametrize(
    ("values", "status"),
    [
        ((b"",), Status.INVALID_REQUEST),
        ((b"\0\0",), Status.INVALID_REQUEST),
        ((b"\0", b"\0"), Status.INVALID_REQUEST),
        ((b"\3",), Status.UNSUPPORTED),
        ((b"\xff",), Status.UNSUPPORTED),
    ],
)
def test_what_is_no_way_to_wait(values: tuple[bytes, ...], status: Status) -> None:
    with pytest.raises(Refused) as caught:
        waiting_of(tuple(LeaseParameter(WAITING_TAG, value) for value in values))
    assert caught.value.failure.status is status


def given(tag: int, *values: bytes) -> tuple[LeaseParameter, ...]:
    return tuple(LeaseParameter(tag, value) for value in values)


def test_a_name_labels_and_a_request_id() -> None:
    assert (name_of(()), labels_of(()), request_id_of(())) == ("", {}, "")
    assert name_of(given(NAME_TAG, b"model-a.1_B")) == "model-a.1_B"
    assert labels_of(given(LABELS_TAG, b"zone=a,tier=gold")) == {"zone": "a", "tier": "gold"}
    assert request_id_of(given(REQUEST_ID_TAG, bytes(range(16)))) == "000102030405060708090a0b0c0d0e0f"


@pytest.mark.parametrize("values", [(b"",), (b"-a",), (b"a/b",), (b"a b",), (b"\xff",), (b"a" * 129,), (b"a", b"a")])
def test_what_is_no_name(values: tuple[bytes, ...]) -> None:
    with pytest.raises(Refused, match="name") as caught:
        name_of(given(NAME_TAG, *values))
    assert caught.value.failure.status is Status.INVALID_REQUEST


TOO_MANY = b",".join(b"k%d=v" % number for number in range(MAX_LABELS + 1))


@pytest.mark.parametrize(
    "values", [(b"",), (b"zone",), (b"zone=",), (b"a=b,a=c",), (b"a=b,",), (TOO_MANY,), (b"a=b",) * 2]
)
def test_what_are_no_labels(values: tuple[bytes, ...]) -> None:
    with pytest.raises(Refused, match="label") as caught:
        labels_of(given(LABELS_TAG, *values))
    assert caught.value.failure.status is Status.INVALID_REQUEST


@pytest.mark.parametrize("values", [(b"",), (bytes(16),), (b"a" * 15,), (b"a" * 17,), (b"a" * 16, b"a" * 16)])
def test_what_is_no_request_id(values: tuple[bytes, ...]) -> None:
    with pytest.raises(Refused, match="request id") as caught:
        request_id_of(given(REQUEST_ID_TAG, *values))
    assert caught.value.failure.status is Status.INVALID_REQUEST


def test_a_node_needs_the_labels_that_are_asked_for() -> None:
    check_labels({}, {})
    check_labels({"zone": "a"}, {"zone": "a", "tier": "gold"})
    for own in ({}, {"zone": "b"}):
        with pytest.raises(Refused, match="zone=a") as caught:
            check_labels({"zone": "a"}, own)
        assert caught.value.failure.status is Status.UNSUPPORTED
