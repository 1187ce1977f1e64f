"""The targets detect faults: with a fault planted in the product, one of their seeds fails."""

import importlib
from collections.abc import Callable
from typing import Any

import pytest

from gpulease.daemon.broker.handlers.attach_requests import AttachHandler
from gpulease.daemon.broker.handlers.query_requests import QueryHandler
from gpulease.daemon.broker.runtime import Runtime
from gpulease.daemon.broker.token_service import ConnectionTokens
from gpulease.daemon.capabilities import tokens
from gpulease.daemon.capabilities.authority import CapabilityAuthority
from gpulease.daemon.config import settings as daemon_settings
from gpulease.daemon.contract.control_page import WorkerPage
from gpulease.daemon.contract.guests import Guest
from gpulease.daemon.native.compiler import BadIr
from gpulease.daemon.ptx import image, kernel_code
from gpulease.daemon.record.audit.verification import Verifier
from gpulease.daemon.session.ledger import Ledger
from gpulease.daemon.session.replies import SyncPattern
from gpulease.daemon.session.submit_run import SubmitOperations
from gpulease.protocol import fastpath
from gpulease.protocol.framing import FrameReader
from gpulease.protocol.ring import RingReader, RingWriter

Plant = Callable[[Any], Any]
"""Takes an object of the product, and returns its replacement."""


def raising(error: Exception) -> Plant:
    def plant(_: Any) -> Any:
        def fail(*_arguments: Any, **_named: Any) -> Any:
            raise error

        return fail

    return plant


def returning(value: Any) -> Plant:
    return lambda _: lambda *_arguments, **_named: value


def owner_of(_: Any) -> Any:
    """Whoever sends a request acts in the name of the lease's owner."""

    def acting_tenant(self: ConnectionTokens, lease_id: int, permission: Any) -> str:
        lease = self._service.lease(lease_id)
        return self._peer.tenant if lease is None else lease.tenant

    return acting_tenant


def keeping_the_sum(_: Any) -> Any:
    return lambda self, handle: self._allocations.pop(handle)


def one_more(real: Any) -> Any:
    def parse(payload: memoryview) -> Any:
        handle, offset, data = real(payload)
        return handle, offset + 1, data

    return parse


def swallowing(real: Any) -> Any:
    """One in several replies is never sent."""
    count = 0

    def answer(self: Runtime, outcome: Any) -> None:
        nonlocal count
        count += 1
        if count % 5:
            real(self, outcome)

    return answer


FAULTS: tuple[tuple[str, Any, str, Plant], ...] = (
    ("audit", Verifier, "_check_place", returning(None)),
    ("audit", Verifier, "_check_torn_bytes", returning(None)),
    ("control", ConnectionTokens, "acting_tenant", owner_of),
    ("control", ConnectionTokens, "may_revoke", returning(True)),
    ("control", AttachHandler, "_check_own", returning(None)),
    ("control", QueryHandler, "_may_query", returning(True)),
    ("control", Runtime, "_answer", swallowing),
    ("frames", fastpath, "parse_mem_write", one_more),
    ("frames", FrameReader, "next_frame", raising(IndexError())),
    ("images", kernel_code, "emit_object", raising(BadIr("no such thing"))),
    ("ptx", image, "parse", raising(KeyError("b1"))),
    ("rings", RingReader, "take", returning(3)),
    ("rings", RingWriter, "room", returning(1 << 20)),
    ("serving", SyncPattern, "reply", returning(bytes(40))),
    ("sessions", Ledger, "remove_allocation", keeping_the_sum),
    ("sessions", WorkerPage, "refusal", returning(None)),
    ("settings", daemon_settings, "_check", returning(None)),
    ("submits", Guest, "refuse", returning(None)),
    ("submits", SubmitOperations, "_read", returning(b"")),
    ("submits", WorkerPage, "refusal", returning(None)),
    ("tokens", tokens, "_read", lambda _: tokens._authority),
    ("tokens", CapabilityAuthority, "_check_lease", returning(None)),
)


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("name", "place", "what", "plant"), FAULTS, ids=lambda value: str(getattr(value, "__name__", value))
)
def test_a_planted_fault_is_found(
    monkeypatch: pytest.MonkeyPatch, name: str, place: Any, what: str, plant: Plant
) -> None:
    target = importlib.import_module(f".{name}", __package__)
    real = getattr(place, what)
    fault = plant(real)
    monkeypatch.setattr(place, what, fault)
    if vars(target).get(what) is real:
        monkeypatch.setattr(target, what, fault)
    found = None
    for seed in target.seeds():
        try:
            target.check(seed)
        except Exception as error:
            found = error
            break
    assert found is not None
