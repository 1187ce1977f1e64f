import pytest

from gpulease.protocol import BodyError, FramingError, LocalProtocolError, ProtocolError, RemoteProtocolError, Status


def test_errors_say_whose_fault_it_is() -> None:
    assert issubclass(FramingError, RemoteProtocolError)
    assert issubclass(BodyError, RemoteProtocolError)
    assert not issubclass(LocalProtocolError, RemoteProtocolError)
    assert issubclass(RemoteProtocolError, ProtocolError)


@pytest.mark.parametrize("kind", [LocalProtocolError, FramingError, BodyError])
def test_an_error_carries_its_status(kind: type[ProtocolError]) -> None:
    assert kind("why").status is Status.INVALID_REQUEST
    error = kind("why", Status.UNSUPPORTED)
    assert (error.status, str(error)) == (Status.UNSUPPORTED, "why")
