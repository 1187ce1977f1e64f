"""The broker's end of the fleet process, with a real process that reaches no etcd."""

import asyncio
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from gpulease.daemon.bench.lease_table import SimulatedWorkers
from gpulease.daemon.broker import fleet_frontend
from gpulease.daemon.broker.fleet_frontend import FleetFrontend
from gpulease.daemon.broker.name_claims import ClaimAnswer, ClaimWant
from gpulease.daemon.broker.runtime import Runtime
from gpulease.daemon.broker.token_service import TokenService
from gpulease.daemon.contract.control_page import boot_ns
from gpulease.daemon.fleet.etcd.etcd_certificates import open_certificates
from gpulease.daemon.fleet.fleet_settings import FleetSettings
from gpulease.daemon.gpus.emulated_cards import EmbeddedCards
from gpulease.daemon.leases import (
    AcquireRequested,
    Card,
    HorizonMoved,
    LeaseState,
    LeaseTable,
    LeaseTerms,
    ReclaimFailed,
    WorkerExited,
    WorkerReady,
)
from gpulease.daemon.record.audit.recorder import Recorder
from gpulease.daemon.record.journal import Journal
from gpulease.daemon.sandbox.measures import SandboxSettings
from gpulease.protocol.failures import Failure


class Telling(FleetFrontend):
    """A frontend whose messages to its process are kept here."""

    told: list[dict[str, Any]]

    def _tell(self, message: dict[str, Any], fds: Sequence[int] = ()) -> bool:
        self.told.append(message)
        return True


def test_a_node_that_the_fleet_gave_up_joins_anew_though_its_last_named_lease_is_fenced() -> None:
    async def story() -> None:
        table = LeaseTable([Card("GPU-a", 0, "a", 1000, 10)])
        tokens = TokenService(table, frozenset(), None, None, {})
        runtime = Runtime(table, EmbeddedCards([1000]), SimulatedWorkers(), tokens, Recorder(), 1)
        settings = FleetSettings(etcd=("127.0.0.1:1",), node="node-0")
        frontend = Telling(settings, SandboxSettings(), table, [], runtime.post, Journal(), list, lambda _: None)
        frontend.told = []
        runtime.claims = frontend
        runtime.post(HorizonMoved(time.monotonic_ns() + 10**12, boot_ns() + 10**12))
        runtime.post(AcquireRequested(1, "ann", 5, LeaseTerms(100, 60_000, name="alpha", epoch=3)))
        runtime.post(WorkerReady(5))
        frontend._on_message({"op": "lost", "text": "another node fenced this one"}, [])
        assert [lease.state for lease in table.snapshots()] == [LeaseState.DRAINING]
        assert frontend.told == []
        runtime.post(WorkerExited(5, "it was killed"))
        runtime.post(ReclaimFailed(5, "the card lists it"))
        assert [lease.state for lease in table.snapshots()] == [LeaseState.FENCED]
        assert frontend.told == [{"op": "live", "claims": [], "quotas": [], "is_last": True}]
        await runtime.stop()

    asyncio.run(story())


def test_what_comes_up_while_the_process_starts_does_not_precede_its_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    """A lease of an earlier daemon is proved free, and a tenant asks, while the certificates are being read."""
    answers: list[ClaimAnswer] = []

    async def start() -> None:
        loop = asyncio.get_running_loop()

        async def meanwhile() -> None:
            frontend.release("alpha", 7)
            frontend.claim(ClaimWant("beta", 1, "ann", 0), answers.append)

        def opening(files: Mapping[str, Path]) -> object:
            asyncio.run_coroutine_threadsafe(meanwhile(), loop).result()
            return open_certificates(files)

        monkeypatch.setattr(fleet_frontend, "open_certificates", opening)
        settings = FleetSettings(etcd=("127.0.0.1:1",), node="node-0")
        frontend = FleetFrontend(
            settings, SandboxSettings(), LeaseTable([]), [], lambda _: None, Journal(), list, lambda _: None
        )
        await frontend.start()
        await frontend.stop()

    asyncio.run(start())
    assert len(answers) == 1
    assert isinstance(answers[0], Failure)
    assert "'beta' can't be claimed" in answers[0].message
