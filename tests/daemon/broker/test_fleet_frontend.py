"""The broker's end of the fleet process, with a real process that reaches no etcd."""

import asyncio
from collections.abc import Mapping
from pathlib import Path

import pytest

from gpulease.daemon.broker import fleet_frontend
from gpulease.daemon.broker.fleet_frontend import FleetFrontend
from gpulease.daemon.broker.name_claims import ClaimAnswer, ClaimWant
from gpulease.daemon.fleet.etcd.etcd_certificates import open_certificates
from gpulease.daemon.fleet.fleet_settings import FleetSettings
from gpulease.daemon.leases import LeaseTable
from gpulease.daemon.record.journal import Journal
from gpulease.daemon.sandbox.measures import SandboxSettings
from gpulease.protocol.failures import Failure


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
