import logging

import h11
import pytest

from gpulease.daemon.web.complaints import PAUSE_S, Sparing


def record(error: Exception | None = None) -> logging.LogRecord:
    info = None if error is None else (type(error), error, None)
    return logging.LogRecord("uvicorn.error", logging.ERROR, "", 1, "said", (), info)


def test_one_line_in_so_long() -> None:
    now_s = 7.0
    sparing = Sparing(lambda: now_s)
    assert [sparing.filter(record()) for _ in range(3)] == [True, False, False]
    now_s += PAUSE_S
    assert [sparing.filter(record(ValueError())) for _ in range(3)] == [True, False, False]


@pytest.mark.parametrize("error", [h11.LocalProtocolError("late"), h11.RemoteProtocolError("no HTTP")])
def test_what_a_peer_does_is_no_trouble(error: Exception) -> None:
    sparing = Sparing()
    assert not sparing.filter(record(error))
    assert sparing.filter(record()), "and takes nobody's line"
