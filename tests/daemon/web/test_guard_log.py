import logging
from collections.abc import Callable

import h11
import pytest

from gpulease.daemon.log.writer import ATTRIBUTE
from gpulease.daemon.web.guard import PAUSE_S, ServerLogFilter, WrongTokens


def record(error: Exception | None = None) -> logging.LogRecord:
    info = None if error is None else (type(error), error, None)
    return logging.LogRecord("uvicorn.error", logging.ERROR, "", 1, "said", (), info)


def test_one_line_in_so_long() -> None:
    now_s = 7.0
    server_filter = ServerLogFilter(lambda: now_s)
    assert [server_filter.filter(record()) for _ in range(3)] == [True, False, False]
    now_s += PAUSE_S
    assert [server_filter.filter(record(ValueError())) for _ in range(3)] == [True, False, False]


@pytest.mark.parametrize("error", [h11.LocalProtocolError("late"), h11.RemoteProtocolError("no HTTP")])
def test_what_a_peer_does_is_no_trouble(error: Exception) -> None:
    server_filter = ServerLogFilter()
    assert not server_filter.filter(record(error))
    assert server_filter.filter(record()), "and takes nobody's line"


def test_wrong_tokens_are_told_with_how_many(caplog: pytest.LogCaptureFixture) -> None:
    later: list[Callable[[], None]] = []
    wrong = WrongTokens(lambda delay_s, call: later.append(call))

    def counts() -> list[int]:
        told = [getattr(record, ATTRIBUTE) for record in caplog.records]
        caplog.clear()
        assert all(event == "web.wrong_token" for event, _ in told)
        return [fields["count"] for _, fields in told]

    for _ in range(5):
        wrong.add()
    assert counts() == [1]
    later.pop()()
    assert counts() == [4], "though no more came"
    wrong.add()
    later.pop()()
    assert counts() == [1]
    later.pop()()
    assert (counts(), later) == ([], []), "nothing is left to be told"
    wrong.add()
    assert counts() == [1], "at once"
