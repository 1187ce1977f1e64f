"""All claims of a node in messages, however many there are."""

import pytest

from gpulease.daemon.fleet.live_claims import CLAIMS_PER_MESSAGE, NOTHING_LIVES, Live, LiveParts, live_messages
from gpulease.daemon.host.ipc import channel_pair, receive_message, send_message
from gpulease.protocol.lease_names import MAX_NAME_CHARS


@pytest.mark.parametrize("count", [0, 1, CLAIMS_PER_MESSAGE, CLAIMS_PER_MESSAGE + 1, 3 * CLAIMS_PER_MESSAGE])
def test_all_arrive_through_a_channel(count: int) -> None:
    claims = {f"{number:0{MAX_NAME_CHARS}}": (1 << 63) - 1 - number for number in range(count)}
    live = Live(claims, {f"{number:032x}": "t" * MAX_NAME_CHARS for number in range(count)})
    parts = LiveParts()
    taken = []
    ours, theirs = channel_pair()
    with ours, theirs:
        for message in live_messages(live):
            send_message(ours, message)
            received, _ = receive_message(theirs)
            taken.append(parts.take(received["claims"], received["quotas"], is_last=received["is_last"]))
    assert taken[-1] == live
    assert set(map(type, taken[:-1])) <= {type(None)}


def test_a_new_beginning_forgets_the_earlier_claims() -> None:
    parts = LiveParts()
    assert parts.take([("a", 1)], [("00", "ann")], is_last=True) == Live({"a": 1}, {"00": "ann"})
    assert parts.take([], [], is_last=True) == NOTHING_LIVES
