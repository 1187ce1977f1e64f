"""All claims of a node in messages, however many there are."""

import pytest

from gpulease.daemon.contract.message_fields import expect_message
from gpulease.daemon.fleet.fleet_messages import CLAIMS_PER_MESSAGE, LiveClaimsPart
from gpulease.daemon.fleet.live_claims import LiveParts, parts_of
from gpulease.daemon.fleet.rules.fleet_events import LiveClaims
from gpulease.daemon.host.ipc import channel_pair, receive_message, send_message
from gpulease.protocol.lease_names import MAX_NAME_CHARS


@pytest.mark.parametrize("count", [0, 1, CLAIMS_PER_MESSAGE, CLAIMS_PER_MESSAGE + 1, 3 * CLAIMS_PER_MESSAGE])
def test_all_arrive_through_a_channel(count: int) -> None:
    claims = {f"{number:0{MAX_NAME_CHARS}}": (1 << 63) - 1 - number for number in range(count)}
    live = LiveClaims(claims, {f"{number:032x}": "t" * MAX_NAME_CHARS for number in range(count)})
    parts = LiveParts()
    taken = []
    ours, theirs = channel_pair()
    with ours, theirs:
        for message in parts_of(live):
            send_message(ours, message.to_map())
            received, _ = receive_message(theirs)
            taken.append(parts.take(expect_message({LiveClaimsPart.OP: LiveClaimsPart}, received)))
    assert taken[-1] == live
    assert set(map(type, taken[:-1])) <= {type(None)}


def test_a_new_beginning_forgets_the_earlier_claims() -> None:
    parts = LiveParts()
    live = LiveClaims({"a": 1}, {"00": "ann"})
    assert [parts.take(part) for part in parts_of(live)] == [live]
    assert [parts.take(part) for part in parts_of(LiveClaims())] == [LiveClaims()]
