import pytest

from gpulease.daemon.broker.requests import Refusal, exclusivity_of
from gpulease.protocol.opcodes import EXCLUSIVITY_TAG, Exclusivity, Status
from gpulease.protocol.primitives import LeaseParameter


def classes(*values: bytes) -> tuple[LeaseParameter, ...]:
    return tuple(LeaseParameter(EXCLUSIVITY_TAG, value) for value in values)


def test_the_class_if_none_is_given() -> None:
    assert exclusivity_of(()) is Exclusivity.SESSION_EXCLUSIVE
    assert exclusivity_of((LeaseParameter(0x0904, b"\x02"),)) is Exclusivity.SESSION_EXCLUSIVE


@pytest.mark.parametrize("member", Exclusivity)
def test_known_classes(member: Exclusivity) -> None:
    assert exclusivity_of(classes(bytes([member]))) is member
    assert exclusivity_of((LeaseParameter(7, b"xy"), *classes(bytes([member])))) is member


@pytest.mark.parametrize("number", range(4, 255))
def test_unknown_classes(number: int) -> None:
    with pytest.raises(Refusal, match=str(number)) as caught:
        exclusivity_of(classes(bytes([number])))
    assert caught.value.failure.status is Status.UNSUPPORTED


@pytest.mark.parametrize("values", [(b"\xff",), (b"",), (b"\0\0",), (b"\0", b"\0"), (b"\0", b"\1"), (b"\0" * 60000,)])
def test_what_is_no_class(values: tuple[bytes, ...]) -> None:
    with pytest.raises(Refusal) as caught:
        exclusivity_of(classes(*values))
    assert caught.value.failure.status is Status.INVALID_REQUEST
