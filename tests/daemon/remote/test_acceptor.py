"""The acceptor's check of relays' reports."""

from typing import Any

import pytest

from gpulease.daemon.contract.message_fields import MalformedMessage, expect_message
from gpulease.daemon.remote.remote_messages import (
    FROM_RELAY,
    MAX_NAME_BYTES,
    MAX_NAMES,
    MAX_SERIAL_CHARS,
    PeerVerified,
)

NAME = "URI:gpulease:tenant:ann"
SAID: dict[str, Any] = {"op": "verified", "names": [NAME], "serial": "1F"}


def test_whom_a_relay_speaks_of() -> None:
    assert expect_message(FROM_RELAY, SAID) == PeerVerified((NAME,), "1F")


@pytest.mark.parametrize(
    "said",
    [
        {"names": NAME},
        {"names": [7]},
        {"names": [[NAME]]},
        {"names": [NAME] * (MAX_NAMES + 1)},
        {"names": ["\U0001f40c" * (MAX_NAME_BYTES // 4 + 1)]},
        {"serial": 31},
        {"serial": "snail"},
        {"serial": "1" * (MAX_SERIAL_CHARS + 1)},
        {"serial": "0x1F"},
        {"serial": ""},
    ],
)
def test_what_no_relay_says(said: dict[str, Any]) -> None:
    with pytest.raises(MalformedMessage):
        expect_message(FROM_RELAY, SAID | said)
