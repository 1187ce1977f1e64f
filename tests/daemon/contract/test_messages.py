"""Messages between our processes: their maps, which no version may change, and what is refused."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import msgpack
import pytest

from gpulease.daemon.contract import messages
from gpulease.daemon.contract.control_page import PageState, Transfer
from gpulease.daemon.contract.guests import Guest
from gpulease.daemon.contract.message_fields import MalformedMessage, Message, parse_message
from gpulease.daemon.contract.messages import (
    FROM_HELPER,
    FROM_WORKER,
    FROM_ZYGOTE,
    HANDOVER_MESSAGES,
    IMAGE_MESSAGES,
    TO_WORKER,
    TO_ZYGOTE,
)
from gpulease.daemon.contract.worker_spec import WorkerSpec
from gpulease.protocol.capabilities import Permission
from gpulease.protocol.opcodes import Status, Waiting

LEASE = "0000000000000000000000000000000a"
SPEC = WorkerSpec(
    *(10, "GPU-a", 1 << 30, True, 1 << 20, 11, 900, True, 1 << 29),
    max_kernel_ms=2500,
    waiting=Waiting.BLOCK,
    regions_required=True,
    latency=True,
)
SPEC_MAP = {
    "op": "spawn",
    "lease": LEASE,
    "card": "GPU-a",
    "size": 1 << 30,
    "shared": True,
    "allowance": 1 << 20,
    "max_kernel_ms": 2500,
    "waiting": int(Waiting.BLOCK),
    "submit_of": "0000000000000000000000000000000b",
    "timeout_ms": 900,
    "regions_required": True,
    "latency": True,
    "parkable": True,
    "opened": 1 << 29,
}
FINDINGS = [{"measure": "descriptors", "on": True, "detail": "none"}]
GUEST = Guest(Permission(3), 1 << 40, 2, (1 << 64) - 1)
INTRODUCTION = messages.ZygoteIntroduction(
    version="0.1.0",
    build="ab",
    handover=3,
    pid=7,
    driver="cpu",
    sandbox="available",
    findings=FINDINGS,
    wipes_heap=True,
    answers_pings=True,
)

# Literals of the version whose zygotes and workers are out there. A key's order counts, too: bytes are compared.
MAPS: list[tuple[Mapping[str, type[Message]], Message, dict[str, Any]]] = [
    (TO_ZYGOTE, SPEC, SPEC_MAP),
    (TO_ZYGOTE, messages.LeaseChanged(SPEC, 3), SPEC_MAP | {"op": "lease", "serial": 3}),
    (TO_ZYGOTE, messages.PagesRenewed(SPEC, 3), SPEC_MAP | {"op": "renew", "serial": 3}),
    (TO_ZYGOTE, messages.WorkerForgotten(3), {"op": "forget", "serial": 3}),
    (TO_ZYGOTE, messages.Retire(), {"op": "retire"}),
    (TO_ZYGOTE, messages.LivenessPing(), {"op": "ping"}),
    (FROM_ZYGOTE, messages.Preloaded(FINDINGS), {"op": "preloaded", "sandbox": FINDINGS}),
    (FROM_ZYGOTE, messages.HelperBroken("No.", "Do."), {"op": "broken", "reason": "No.", "hint": "Do."}),
    (
        FROM_ZYGOTE,
        messages.HelperBroken("No.", "Do.", True),
        {"op": "broken", "reason": "No.", "hint": "Do.", "misconfigured": True},
    ),
    (FROM_ZYGOTE, messages.Pong(), {"op": "pong"}),
    (FROM_ZYGOTE, messages.WorkerForked(10, 77, 3), {"op": "spawned", "lease": LEASE, "pid": 77, "serial": 3}),
    (FROM_ZYGOTE, messages.ForkFailed(10, "fork: no"), {"op": "no_fork", "lease": LEASE, "reason": "fork: no"}),
    (
        FROM_ZYGOTE,
        messages.WorkerReaped(10, 3, "was killed by SIGKILL"),
        {"op": "exited", "lease": LEASE, "serial": 3, "reason": "was killed by SIGKILL"},
    ),
    (
        FROM_ZYGOTE,
        messages.WorkerReaped(10, 3, "was killed by SIGKILL", True, ""),
        {
            "op": "exited",
            "lease": LEASE,
            "serial": 3,
            "reason": "was killed by SIGKILL",
            "is_overdue": True,
            "overran": "",
        },
    ),
    (HANDOVER_MESSAGES, messages.ZygoteTaken(), {"op": "taken"}),
    (
        HANDOVER_MESSAGES,
        INTRODUCTION,
        {
            "op": "zygote",
            "version": "0.1.0",
            "build": "ab",
            "handover": 3,
            "pid": 7,
            "driver": "cpu",
            "sandbox": "available",
            "findings": FINDINGS,
            "wipes_heap": True,
            "answers_pings": True,
        },
    ),
    (
        HANDOVER_MESSAGES,
        messages.LivingWorker(3, 77, SPEC, "too long"),
        {"op": "worker", "serial": 3, "pid": 77, "spec": SPEC_MAP, "overran": "too long"},
    ),
    (
        HANDOVER_MESSAGES,
        messages.EndedWorker(3, 77, "ended", SPEC, "", PageState(Status.REVOKED, 5, 6), "revoked"),
        {
            "op": "ended",
            "serial": 3,
            "pid": 77,
            "reason": "ended",
            "spec": SPEC_MAP,
            "overran": "",
            "page": [int(Status.REVOKED), 5, 6],
            "cause": "revoked",
        },
    ),
    (
        HANDOVER_MESSAGES,
        messages.EndedWorker(3, 77, "ended", SPEC, "", PageState(None, 5, 6), "", Transfer.LEFT),
        {
            "op": "ended",
            "serial": 3,
            "pid": 77,
            "reason": "ended",
            "spec": SPEC_MAP,
            "overran": "",
            "page": [None, 5, 6],
            "cause": "",
            "transfer": 1,
        },
    ),
    (HANDOVER_MESSAGES, messages.HandoverDone(), {"op": "told"}),
    (TO_WORKER, SPEC, SPEC_MAP),
    (
        TO_WORKER,
        messages.AttachOrder(1, b"rest", True, 1 << 20, False, GUEST, True, 4711, True),
        {
            "op": "attach",
            "request_id": 1,
            "rest": b"rest",
            "ring": True,
            "arena": 1 << 20,
            "is_stranger": False,
            "guest": [3, 1 << 40, 2, (1 << 64) - 1],
            "owns": True,
            "client_pid": 4711,
            "words": True,
        },
    ),
    (
        TO_WORKER,
        messages.AttachOrder(1, b"", False, 0),
        {"op": "attach", "request_id": 1, "rest": b"", "ring": False, "arena": 0, "is_stranger": True, "guest": None}
        | {"owns": False, "client_pid": 0, "words": False},
    ),
    (
        TO_WORKER,
        messages.AttachOrder(1, b"", False, 0, second=GUEST),
        {"op": "attach", "request_id": 1, "rest": b"", "ring": False, "arena": 0, "is_stranger": True, "guest": None}
        | {"owns": False, "client_pid": 0, "words": False, "second": [3, 1 << 40, 2, (1 << 64) - 1]},
    ),
    (TO_WORKER, messages.Scrub(), {"op": "scrub"}),
    (TO_WORKER, messages.EndSession(), {"op": "end"}),
    (TO_WORKER, messages.RegionsPage(), {"op": "regions"}),
    (TO_WORKER, messages.LatencyWord(3, is_own=True), {"op": "latency", "number": 3, "is_own": True}),
    (
        TO_WORKER,
        messages.OpenRegionOrder(10, 3, 9, 2 << 20),
        {"op": "region", "lease": LEASE, "slot": 3, "number": 9, "size": 2 << 20},
    ),
    (TO_WORKER, messages.EndRegionOrder(10, 50), {"op": "end_region", "lease": LEASE, "grace": 50}),
    (TO_WORKER, messages.ResizeSliceOrder(1 << 30), {"op": "resize", "size": 1 << 30}),
    (TO_WORKER, messages.ParkMemoryOrder(1 << 30), {"op": "park_memory", "size": 1 << 30}),
    (TO_WORKER, messages.CopyAheadOrder(), {"op": "copy_ahead"}),
    (TO_WORKER, messages.ParkOrder(4, 5), {"op": "park", "number": 4, "until": 5, "in_place": False}),
    (TO_WORKER, messages.ParkOrder(4, 5, True), {"op": "park", "number": 4, "until": 5, "in_place": True}),
    (TO_WORKER, messages.ReturnOrder(4), {"op": "return", "number": 4}),
    (TO_WORKER, messages.RefuseReturn(4, "It is full."), {"op": "no_return", "number": 4, "reason": "It is full."}),
    (
        TO_WORKER,
        messages.LeaveOrder(4, True),
        {"op": "leave", "number": 4, "carries": True, "by_ring": False},
    ),
    (
        TO_WORKER,
        messages.LeaveOrder(4, True, by_ring=True),
        {"op": "leave", "number": 4, "carries": True, "by_ring": True},
    ),
    (TO_WORKER, messages.StayOrder(4), {"op": "stay", "number": 4}),
    (TO_WORKER, messages.AdoptOrder(4, 2), {"op": "adopt", "number": 4, "connections": 2}),
    (
        TO_WORKER,
        messages.AdoptOrder(4, 0, "no room"),
        {"op": "adopt", "number": 4, "connections": 0, "refusal": "no room"},
    ),
    (FROM_WORKER, messages.Ready(), {"op": "ready"}),
    (FROM_WORKER, messages.Failed("no context"), {"op": "failed", "reason": "no context"}),
    (FROM_WORKER, messages.Faulted("lost"), {"op": "faulted", "reason": "lost"}),
    (FROM_WORKER, messages.Scrubbed("", 9), {"op": "scrubbed", "doubt": "", "held": 9}),
    (FROM_WORKER, messages.Attached(), {"op": "attached"}),
    (FROM_WORKER, messages.Attached(5, False), {"op": "attached", "guest": 5, "is_in": False}),
    (FROM_WORKER, messages.Attached(None, True, 6), {"op": "attached", "is_in": True, "second": 6}),
    (FROM_WORKER, messages.LastLeft(), {"op": "left"}),
    (FROM_WORKER, messages.MemoryGrew(), {"op": "look"}),
    (
        FROM_WORKER,
        messages.RegionOpenedReport(10, 1 << 40),
        {"op": "region_opened", "lease": LEASE, "address": 1 << 40},
    ),
    (FROM_WORKER, messages.RegionRefusedReport(10, "No."), {"op": "region_refused", "lease": LEASE, "reason": "No."}),
    (
        FROM_WORKER,
        messages.RegionEndedReport(10, 5, 6, -7),
        {"op": "region_ended", "lease": LEASE, "freed": 5, "kept": 6, "shown": -7},
    ),
    (
        FROM_WORKER,
        messages.RegionStuckReport(10, "it runs"),
        {"op": "region_stuck", "lease": LEASE, "reason": "it runs"},
    ),
    (FROM_WORKER, messages.RegionReleasedReport(10), {"op": "region_released", "lease": LEASE}),
    (
        FROM_WORKER,
        messages.ForwardRevokedReport(10, 18, "decode", 3, 4, 5, 6, 7),
        {
            "op": "forward_revoked",
            "lease": LEASE,
            "status": 18,
            "kernel": "decode",
            "site": 3,
            "position": 4,
            "flipped": 5,
            "seen": 6,
            "told": 7,
        },
    ),
    (FROM_WORKER, messages.SliceResizedReport(5, ""), {"op": "resized", "size": 5, "doubt": ""}),
    (
        FROM_WORKER,
        messages.ParkedReport(4, 5, -6, 7, 8, 9, 10, ahead_bytes=3),
        {"op": "parked", "number": 4, "moved": 5, "shown": -6, "waited": 7, "copied": 8, "released": 9, "kept": 10}
        | {"in_place": False, "ahead": 3},
    ),
    (
        FROM_WORKER,
        messages.ParkRefusedReport(4, messages.ParkRefusal.NO_MEMORY, "it has none", 5),
        {"op": "park_refused", "number": 4, "why": "no_memory", "reason": "it has none", "needed": 5},
    ),
    (FROM_WORKER, messages.ReturnWantedReport(4), {"op": "return_wanted", "number": 4}),
    (
        FROM_WORKER,
        messages.ReturnedReport(4, 5, 6, 7),
        {"op": "returned", "number": 4, "moved": 5, "mapped": 6, "copied": 7},
    ),
    (
        FROM_WORKER,
        messages.ReturnFailedReport(4, "no room"),
        {"op": "return_failed", "number": 4, "reason": "no room", "mismatch": False},
    ),
    (
        FROM_WORKER,
        messages.ReturnFailedReport(4, "it moved", True),
        {"op": "return_failed", "number": 4, "reason": "it moved", "mismatch": True},
    ),
    (
        FROM_WORKER,
        messages.ImagedReport(4, 5, 6, True),
        {"op": "imaged", "number": 4, "image": 5, "connections": 6, "awaited": True, "regions": []},
    ),
    (
        FROM_WORKER,
        messages.LeaveRefusedReport(4, "it has events", True),
        {"op": "leave_refused", "number": 4, "reason": "it has events", "lasting": True},
    ),
    (
        IMAGE_MESSAGES,
        messages.ImageMemory(5, 6, 2, 7, True),
        {"op": "image", "image": 5, "host": 6, "version": 2, "pages": 7, "in_place": True, "by_ring": False},
    ),
    (
        IMAGE_MESSAGES,
        messages.ImageMemory(5, 6, 2, 1, True, by_ring=True),
        {"op": "image", "image": 5, "host": 6, "version": 2, "pages": 1, "in_place": True, "by_ring": True},
    ),
    (IMAGE_MESSAGES, messages.ImagePages(), {"op": "image_pages"}),
    (
        IMAGE_MESSAGES,
        messages.ImageConnection(True, False),
        {"op": "image_connection", "ring": True, "arena": False},
    ),
    (FROM_HELPER, messages.HelperPrepared(), {"op": "prepared"}),
    (FROM_HELPER, messages.Ready(), {"op": "ready"}),
    (FROM_HELPER, messages.HelperBroken("no etcd"), {"op": "broken", "reason": "no etcd", "hint": ""}),
    (FROM_HELPER, messages.Pong(), {"op": "pong"}),
]
DIRECTIONS = (TO_ZYGOTE, FROM_ZYGOTE, HANDOVER_MESSAGES, TO_WORKER, FROM_WORKER, IMAGE_MESSAGES, FROM_HELPER)
ALL_MESSAGES = [message for _, message, _ in MAPS]
ids = [f"{type(message).__name__}-{number}" for number, message in enumerate(ALL_MESSAGES)]


def test_the_table_has_every_message() -> None:
    known = {(id(ops), message) for ops in DIRECTIONS for message in ops.values()}
    assert {(id(ops), type(message)) for ops, message, _ in MAPS} == known


def test_the_bytes_of_each_message() -> None:
    written = [msgpack.packb(message.to_map()) for _, message, _ in MAPS]
    expected = [msgpack.packb(literal) for _, _, literal in MAPS]
    assert dict(zip(ids, written, strict=True)) == dict(zip(ids, expected, strict=True))


def test_each_message_round_trips() -> None:
    read = [parse_message(ops, msgpack.unpackb(msgpack.packb(message.to_map()))) for ops, message, _ in MAPS]
    assert dict(zip(ids, read, strict=True)) == dict(zip(ids, ALL_MESSAGES, strict=True))


def test_a_newer_process_may_add_fields() -> None:
    read = [parse_message(ops, literal | {"colour": "blue"}) for ops, _, literal in MAPS]
    assert dict(zip(ids, read, strict=True)) == dict(zip(ids, ALL_MESSAGES, strict=True))


@pytest.mark.parametrize(
    ("ops", "older", "expected"),
    [
        pytest.param(
            TO_ZYGOTE,
            {
                key: SPEC_MAP[key]
                for key in SPEC_MAP
                if key not in ("submit_of", "timeout_ms", "regions_required", "latency")
            },
            replace(SPEC, submit_of=0, timeout_ms=0, regions_required=False, latency=False),
            id="from before there were submits",
        ),
        pytest.param(
            HANDOVER_MESSAGES,
            {"op": "worker", "serial": 3, "pid": 77, "spec": SPEC_MAP},
            messages.LivingWorker(3, 77, SPEC),
            id="from before zygotes bounded kernels",
        ),
        pytest.param(
            HANDOVER_MESSAGES,
            {"op": "zygote", "version": "0.1.0", "handover": 3, "driver": "cpu", "sandbox": "", "findings": []},
            messages.ZygoteIntroduction(version="0.1.0", handover=3, driver="cpu", sandbox="", findings=[]),
            id="from before builds, recycling and pings",
        ),
        pytest.param(
            TO_WORKER,
            {"op": "attach", "request_id": 1, "rest": b"", "ring": False, "arena": 0, "guest": None},
            messages.AttachOrder(1, b"", False, 0, is_stranger=True),
            id="from before brokers told strangers apart",
        ),
        pytest.param(
            TO_WORKER,
            {"op": "attach", "request_id": 1, "rest": b"", "ring": False, "arena": 0, "is_stranger": False},
            messages.AttachOrder(1, b"", False, 0, is_stranger=False, owns=False, client_pid=0),
            id="from before connections owned what they made",
        ),
    ],
)
def test_an_older_process_is_understood(
    ops: Mapping[str, type[Message]], older: dict[str, Any], expected: Message
) -> None:
    assert parse_message(ops, older) == expected


@pytest.mark.parametrize("ops", DIRECTIONS)
@pytest.mark.parametrize("op", ["tomorrow's", "", None, 1, ["ready"], {}])
def test_an_unknown_op_is_no_message(ops: Mapping[str, type[Message]], op: object) -> None:
    assert parse_message(ops, {"op": op}) is None
    assert parse_message(ops, {}) is None


@pytest.mark.parametrize("literal", [{"op": "exited"}, SPEC_MAP, {"op": "pong"}, {"op": "told"}, {"op": "end"}])
def test_a_worker_sends_no_message_of_another_direction(literal: dict[str, Any]) -> None:
    assert parse_message(FROM_WORKER, literal) is None


@pytest.mark.parametrize(("ops", "message", "literal"), MAPS, ids=ids)
def test_a_field_of_another_type_or_out_of_bounds_is_refused(
    ops: Mapping[str, type[Message]], message: Message, literal: dict[str, Any]
) -> None:
    for key in literal.keys() - {"op"}:
        beyond = [-1 << 64, 1 << 64] if type(literal[key]) is int else []
        for wrong in [1.5, {}, *beyond]:
            with pytest.raises(MalformedMessage, match=key) as failure:
                parse_message(ops, literal | {key: wrong})
            assert failure.value.op == literal["op"]


@pytest.mark.parametrize(
    ("ops", "literal"),
    [
        (TO_ZYGOTE, {key: value for key, value in SPEC_MAP.items() if key != "card"}),
        (TO_ZYGOTE, SPEC_MAP | {"op": "lease"}),
        (TO_ZYGOTE, SPEC_MAP | {"lease": "1" + "0" * 33}),
        (TO_ZYGOTE, SPEC_MAP | {"lease": "-1"}),
        (TO_ZYGOTE, SPEC_MAP | {"waiting": 99}),
        (FROM_ZYGOTE, {"op": "spawned", "lease": LEASE, "pid": (1 << 22) + 1, "serial": 3}),
        (FROM_ZYGOTE, {"op": "spawned", "lease": LEASE, "pid": True, "serial": 3}),
        (FROM_ZYGOTE, {"op": "preloaded", "sandbox": ["on"]}),
        (HANDOVER_MESSAGES, {"op": "worker", "serial": 3, "pid": 77, "spec": {"op": "spawn"}}),
        (HANDOVER_MESSAGES, {"op": "ended", "serial": 3, "pid": 77, "reason": "", "spec": SPEC_MAP, "page": [9, 5, 6]}),
        (HANDOVER_MESSAGES, {"op": "ended", "serial": 3, "pid": 77, "reason": "", "spec": SPEC_MAP, "page": [None, 5]}),
        (
            HANDOVER_MESSAGES,
            {"op": "ended", "serial": 3, "pid": 77, "reason": "", "spec": SPEC_MAP, "page": [None, 5, -1]},
        ),
        (TO_WORKER, {"op": "attach"}),
        (TO_WORKER, {"op": "attach", "request_id": 1, "rest": b"", "ring": False, "arena": 0, "guest": [1, 2, 3]}),
        (FROM_WORKER, {"op": "attached", "guest": "mark"}),
        (FROM_WORKER, {"op": "scrubbed", "doubt": ""}),
    ],
)
def test_a_malformed_message_is_refused(ops: Mapping[str, type[Message]], literal: dict[str, Any]) -> None:
    with pytest.raises(MalformedMessage):
        parse_message(ops, literal)
