"""Subscriptions between two peers: when one is there, and what may come of it."""

import pytest

from gpulease.protocol import (
    Connection,
    Failure,
    LocalProtocolError,
    Notification,
    Opcode,
    RegionNotification,
    State,
    Status,
    StreamBroken,
)
from gpulease.protocol import messages as m
from gpulease.protocol.codec import build_body
from gpulease.protocol.connection import Rejected
from gpulease.protocol.framing import build_frame
from gpulease.protocol.opcodes import Flag

from .peers import Pair, events_of, pair_in


def event(sequence: int, phase: int = 1) -> m.LeaseEvent:
    return m.LeaseEvent(7, sequence, 0, phase, 0, 1, "", "")


def subscribed() -> tuple[Pair, int]:
    pair = pair_in(State.CONTROL)
    request = pair.ask(Opcode.LEASE_SUBSCRIBE, m.LeaseSubscribe(7))
    pair.answer(request, m.Empty())
    return pair, request.request_id


def region_event(sequence: int) -> m.RegionEvent:
    return m.RegionEvent(7, sequence, 0, Status.REVOKED, "k", 0, 0, 1, 2)


def watched() -> tuple[Pair, int]:
    pair = pair_in(State.CONTROL)
    request = pair.ask(Opcode.REGION_WATCH, m.LeaseRef(7))
    pair.answer(request, m.Empty())
    return pair, request.request_id


def told(client: Connection, wire: bytes) -> list[object]:
    client.receive_data(wire)
    return list(events_of(client))


def test_events_come_between_replies_to_anything_else() -> None:
    pair, number = subscribed()
    ping = pair.ask(Opcode.PING, m.Ping(1))
    wire = pair.server.send_event(number, event(1)) + pair.server.send_event(number, event(4))
    assert told(pair.client, wire) == [Notification(number, event(1)), Notification(number, event(4))]
    assert pair.client.in_flight == 1
    assert pair.answer(ping, m.Ping(1)).result == m.Ping(1)
    assert pair.client.subscriptions == pair.server.subscriptions == 1


def test_it_ends_with_the_reply_to_unsubscribe() -> None:
    pair, number = subscribed()
    request = pair.ask(Opcode.LEASE_UNSUBSCRIBE, m.LeaseUnsubscribe(number))
    assert told(pair.client, pair.server.send_event(number, event(1))) == [Notification(number, event(1))], (
        "on its way still"
    )
    pair.answer(request, m.Empty())
    assert pair.client.subscriptions == pair.server.subscriptions == 0
    with pytest.raises(LocalProtocolError):
        pair.server.send_event(number, event(2))


def test_a_watch_of_regions_is_a_subscription_until_it_is_ended() -> None:
    pair, number = watched()
    wire = pair.server.send_event(number, region_event(1))
    assert told(pair.client, wire) == [RegionNotification(number, region_event(1))]
    pair.answer(pair.ask(Opcode.LEASE_UNSUBSCRIBE, m.LeaseUnsubscribe(number)), m.Empty())
    assert pair.client.subscriptions == pair.server.subscriptions == 0


@pytest.mark.parametrize("of_regions", [False, True])
def test_a_subscription_gets_events_of_its_own_kind_alone(of_regions: bool) -> None:
    pair, number = watched() if of_regions else subscribed()
    foreign = event(1) if of_regions else region_event(1)
    with pytest.raises(LocalProtocolError):
        pair.server.send_event(number, foreign)
    op = Opcode.LEASE_EVENT if of_regions else Opcode.REGION_EVENT
    (found,) = told(pair.client, build_frame(op, build_body(foreign), request_id=number, flags=Flag.REPLY))
    assert isinstance(found, StreamBroken)


@pytest.mark.parametrize("op", [Opcode.LEASE_SUBSCRIBE, Opcode.LEASE_UNSUBSCRIBE])
def test_a_refusal_changes_nothing(op: Opcode) -> None:
    pair, number = subscribed()
    body = m.LeaseSubscribe(8) if op is Opcode.LEASE_SUBSCRIBE else m.LeaseUnsubscribe(number)
    request = pair.ask(op, body)
    pair.client.receive_data(pair.server.send_failure(request, Failure(Status.BUSY, "no")))
    events_of(pair.client)
    assert pair.client.subscriptions == pair.server.subscriptions == 1
    assert told(pair.client, pair.server.send_event(number, event(1))) == [Notification(number, event(1))]


@pytest.mark.parametrize("wrong", ["not subscribed", "repeated", "a status", "malformed", "no reply"])
def test_what_breaks_the_connection(wrong: str) -> None:
    pair, number = subscribed()
    told(pair.client, pair.server.send_event(number, event(5)))
    payload = build_body(event(5 if wrong == "repeated" else 6))
    wire = build_frame(
        Opcode.LEASE_EVENT,
        payload[:-1] if wrong == "malformed" else payload,
        request_id=number + (wrong == "not subscribed"),
        flags=0 if wrong == "no reply" else Flag.REPLY,
        status=Status.BUSY if wrong == "a status" else 0,
    )
    (found,) = told(pair.client, wire)
    assert isinstance(found, StreamBroken)


def test_no_attach_while_subscribed() -> None:
    pair, _ = subscribed()
    with pytest.raises(LocalProtocolError):
        pair.client.send_request(Opcode.ATTACH, m.Attach(()), session_id=7)
    wire = build_frame(Opcode.ATTACH, build_body(m.Attach(())), request_id=99, session_id=7)
    pair.server.receive_data(wire)
    (found,) = events_of(pair.server)
    assert isinstance(found, Rejected)
    assert "subscriptions" in found.failure.message


@pytest.mark.parametrize("op", [Opcode.LEASE_SUBSCRIBE, Opcode.REGION_WATCH])
def test_no_second_subscription_of_one_number(op: Opcode) -> None:
    pair, number = subscribed()
    wire = build_frame(op, build_body(m.LeaseRef(8)), request_id=number)
    pair.server.receive_data(wire)
    (found,) = events_of(pair.server)
    assert isinstance(found, Rejected)
    assert found.failure.status is Status.INVALID_REQUEST
    assert told(pair.client, pair.server.send_event(number, event(1))) == [Notification(number, event(1))]
