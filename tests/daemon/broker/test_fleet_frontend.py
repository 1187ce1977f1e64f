"""The broker's end of the fleet process, with a real process that reaches no etcd."""

import asyncio
import os
import re
import signal
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path

import pytest

from gpulease.daemon.bench.lease_table import SimulatedWorkers
from gpulease.daemon.broker import fleet_frontend
from gpulease.daemon.broker.fleet_frontend import MAX_CLAIMS, MAX_CLAIMS_PER_TENANT, FleetFrontend
from gpulease.daemon.broker.name_claims import NameAnswer, NameRequest, QuotaAnswer, QuotaRequest
from gpulease.daemon.broker.runtime import Runtime
from gpulease.daemon.broker.token_service import TokenService
from gpulease.daemon.contract.control_page import boot_ns
from gpulease.daemon.fleet.etcd.etcd_certificates import open_certificates
from gpulease.daemon.fleet.etcd.transactions import StoreSize
from gpulease.daemon.fleet.fleet_messages import LiveClaimsPart, StoreMeasured, ToFleet
from gpulease.daemon.fleet.records.fleet_settings import FleetSettings
from gpulease.daemon.fleet.rules.fleet_events import (
    ClaimEnded,
    ClaimGiven,
    EndClaimed,
    MoveHorizon,
    Note,
    Noted,
    QuotaEnded,
    QuotaGiven,
    Reason,
    RecordsUnreadable,
)
from gpulease.daemon.gpus.emulated_cards import EmbeddedCards
from gpulease.daemon.leases.devices import Card
from gpulease.daemon.leases.events import AcquireRequested, ReclaimFailed, WorkerExited, WorkerReady
from gpulease.daemon.leases.membership_events import MembershipDeadlineMoved
from gpulease.daemon.leases.model import LeaseState, LeaseTerms
from gpulease.daemon.leases.table import LeaseTable
from gpulease.daemon.record.audit.recorder import FactRecorder
from gpulease.daemon.record.journal import Journal
from gpulease.daemon.sandbox.measures import SandboxSettings
from gpulease.protocol.failures import Failure
from helpers.process_messages import FROM_FLEET
from helpers.processes import stop_process
from helpers.waiting import PATIENCE_S


class Telling(FleetFrontend):
    """A frontend whose messages to its process are kept here."""

    told: list[ToFleet]

    def _send(self, message: ToFleet, fds: Sequence[int] = ()) -> bool:
        self.told.append(message)
        return True


def test_a_node_that_the_fleet_gave_up_joins_anew_though_its_last_named_lease_is_fenced() -> None:
    async def story() -> None:
        table = LeaseTable([Card("GPU-a", 0, "a", 1000, 10)])
        tokens = TokenService(table, frozenset(), None, None, {})
        runtime = Runtime(table, EmbeddedCards([1000]), SimulatedWorkers(), tokens, FactRecorder(), 1)
        settings = FleetSettings(etcd=("127.0.0.1:1",), node="node-0")
        frontend = Telling(settings, SandboxSettings(), table, [], runtime.post, Journal(), list, lambda _: None)
        frontend.told = []
        runtime.claims = frontend
        runtime.post(MembershipDeadlineMoved(time.monotonic_ns() + 10**12, boot_ns() + 10**12))
        runtime.post(AcquireRequested(1, "ann", 5, LeaseTerms(100, 60_000, name="alpha", epoch=3)))
        runtime.post(WorkerReady(5))
        frontend._on_message(EndClaimed(Reason.FENCED, "another node fenced this one"), [])
        assert [lease.state for lease in table.snapshots()] == [LeaseState.DRAINING]
        assert frontend.told == []
        runtime.post(WorkerExited(5, "it was killed"))
        runtime.post(ReclaimFailed(5, "the card lists it"))
        assert [lease.state for lease in table.snapshots()] == [LeaseState.FENCED]
        assert frontend.told == [LiveClaimsPart({}, {}, is_last=True)]
        await runtime.stop()

    asyncio.run(story())


def test_health_metrics_and_the_log_warn_before_etcd_is_full(caplog: pytest.LogCaptureFixture) -> None:
    async def story() -> None:
        settings = FleetSettings(etcd=("127.0.0.1:1",), etcd_quota_bytes=100 << 20)
        table = LeaseTable([Card("GPU-a", 0, "a", 1000, 10)])
        frontend = Telling(settings, SandboxSettings(), table, [], lambda _: None, Journal(), list, lambda _: None)
        frontend.told = []
        frontend._on_message(MoveHorizon(boot_ns() + 10**12, 1), [])

        def weigh(size_mib: int, quota_mib: int = 0) -> str:
            store = StoreSize("h2:2379", size_mib << 20, quota_mib << 20)
            frontend._on_message(StoreMeasured(store), [])
            return frontend.problem()

        assert weigh(79) == ""
        assert "etcd at h2:2379 uses 80% of its quota of 104857600 bytes" in weigh(80)
        assert "etcdctl defrag" in weigh(81)
        figures = frontend.figures()
        assert (figures.store_bytes, figures.store_quota_bytes) == (81 << 20, 100 << 20)
        # What etcd says of its quota counts before the setting.
        assert weigh(81, 200) == ""
        assert frontend.figures().store_quota_bytes == 200 << 20

    asyncio.run(story())
    assert caplog.text.count("etcd's database is close to its quota") == 1


def test_what_comes_up_while_the_process_starts_does_not_precede_its_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    """A lease of an earlier daemon is proved free, and a tenant asks, while the certificates are being read."""
    answers: list[NameAnswer] = []

    async def start() -> None:
        loop = asyncio.get_running_loop()

        async def meanwhile() -> None:
            frontend.release("alpha", 7)
            frontend.claim_name(NameRequest("beta", 1, "ann", 0), answers.append)

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


def test_claims_of_many_tenants_wait_for_a_process_that_does_not_read_and_none_is_lost() -> None:
    """The channel holds a few hundred messages. One tenant's burst is cut at its bound, and all at the node's."""
    answers: list[tuple[str, NameAnswer]] = []
    tenants = ["ann", *(f"t{number}" for number in range(2 * MAX_CLAIMS // MAX_CLAIMS_PER_TENANT))]

    async def story() -> None:
        settings = FleetSettings(etcd=("127.0.0.1:1",), node="node-0")
        frontend = FleetFrontend(
            settings, SandboxSettings(), LeaseTable([]), [], lambda _: None, Journal(), list, lambda _: None
        )
        are_answered = asyncio.Event()

        def on_answer(tenant: str, answer: NameAnswer) -> None:
            answers.append((tenant, answer))
            if len(answers) == len(tenants) * 2 * MAX_CLAIMS_PER_TENANT:
                are_answered.set()

        await frontend.start()
        process = frontend._process.pid
        stop_process(process)
        asked = 0
        for tenant in tenants:
            for _ in range(2 * MAX_CLAIMS_PER_TENANT):
                asked += 1
                want = NameRequest(f"name-{asked}", asked, tenant, 0)
                frontend.claim_name(want, partial(on_answer, tenant))
        await asyncio.sleep(0)
        refused = Counter(tenant for tenant, _ in answers)
        assert refused["ann"] == MAX_CLAIMS_PER_TENANT
        assert asked - refused.total() == MAX_CLAIMS
        os.kill(process, signal.SIGCONT)
        async with asyncio.timeout(PATIENCE_S):
            await are_answered.wait()
        assert frontend._process.pid == process
        await frontend.stop()

    asyncio.run(story())
    texts = [answer.message for tenant, answer in answers if tenant == "ann" and isinstance(answer, Failure)]
    assert "claims waiting at this node, the maximum for one tenant" in texts[0]
    assert "this node has not joined its fleet" in texts[-1]
    assert isinstance(answers[-1][1], Failure)


@pytest.mark.parametrize(
    ("note", "text", "told"),
    [
        (
            Note.REJECTED,
            "h1:2379: permission denied",
            "refuses .* record: .* permission denied: give the etcd user",
        ),
        (Note.BEAT_UNKNOWN, "h1:2379: certificate has expired", "not answered in time: .* has expired: check ca"),
        (Note.BEAT_UNKNOWN, "h1:2379: it did not answer", "not answered in time: h1:2379: it did not answer$"),
    ],
)
def test_health_tells_what_etcd_says_until_it_takes_a_beat(note: Note, text: str, told: str) -> None:
    settings = FleetSettings(etcd=("h1:2379",), node="node-0")
    frontend = FleetFrontend(
        settings, SandboxSettings(), LeaseTable([]), [], lambda _: None, Journal(), list, lambda _: None
    )
    frontend._on_message(Noted(note, text), [])
    assert re.search(told, frontend.problem())
    refusal = frontend.refusal()
    assert refusal is not None
    assert re.search(told.removesuffix("$"), refusal.message)
    frontend._on_message(Noted(Note.BEAT), [])
    assert text not in frontend.problem()


def test_claims_whose_answers_cross_their_drop_are_given_back() -> None:
    """Otherwise the process would keep a name that no lease has, for as long as it lives."""

    async def story() -> None:
        settings = FleetSettings(etcd=("127.0.0.1:1",), node="node-0")
        frontend = Telling(
            settings, SandboxSettings(), LeaseTable([]), [], lambda _: None, Journal(), list, lambda _: None
        )
        frontend.told = []
        answers: list[object] = []
        frontend.claim_name(NameRequest("alpha", 5, "ann", 0), answers.append)()
        frontend.claim_quota(QuotaRequest("ann", 6, 100, 0), answers.append)()
        frontend.told.clear()
        frontend._on_message(ClaimGiven(1, "alpha", 7), [])
        frontend._on_message(QuotaGiven(2, "ann", f"{6:032x}"), [])
        assert answers == []
        assert frontend.told == [ClaimEnded("alpha", 7), QuotaEnded("ann", f"{6:032x}")]

    asyncio.run(story())


def test_a_fault_at_an_answer_refuses_its_acquire_and_no_other_waits_for_ever() -> None:
    settings = FleetSettings(etcd=("127.0.0.1:1",), node="node-0")
    frontend = Telling(settings, SandboxSettings(), LeaseTable([]), [], lambda _: None, Journal(), list, lambda _: None)
    frontend.told = []
    answers: list[NameAnswer] = []

    def fail(answer: NameAnswer) -> None:
        answers.append(answer)
        if len(answers) in (1, 3):
            raise ZeroDivisionError

    frontend.claim_name(NameRequest("alpha", 1, "ann", 0), fail)
    frontend._on_message(ClaimGiven(1, "alpha", 7), [])
    assert isinstance(answers[1], Failure)
    assert "failed while handling" in answers[1].message
    for number in (2, 3):
        frontend.claim_name(NameRequest("beta", number, "ann", 0), fail)
    frontend._on_end()
    assert [isinstance(answer, Failure) for answer in answers] == [False, True, True, True]


def test_an_answer_that_can_t_be_read_is_an_answer_and_values_that_can_t_be_are_shown() -> None:
    """What the process says here, no process of this version does."""
    answers: list[NameAnswer | QuotaAnswer] = []
    settings = FleetSettings(etcd=("127.0.0.1:1",), node="node-0")
    frontend = Telling(settings, SandboxSettings(), LeaseTable([]), [], lambda _: None, Journal(), list, lambda _: None)
    frontend.told = []
    frontend._membership_deadline_boot_ns = boot_ns() + 10**12
    for number, message in enumerate(({"op": "refused", "why": "of later"}, {"op": "not_counted", "why": "taken"}), 1):
        if number == 1:
            frontend.claim_name(NameRequest("alpha", 1, "ann", 0), answers.append)
        else:
            frontend.claim_quota(QuotaRequest("ann", 1, 5, 0), answers.append)
        frontend._process._take(message | {"number": number, "text": "no"}, [])
    assert [isinstance(answer, Failure) and "can't be read" in answer.message for answer in answers] == [True, True]
    assert frontend.problem() == ""
    for count, text in ((2, "2 values in etcd can't be read: /a"), (3, "3 values in etcd can't be read: /a"), (3, "")):
        frontend._on_message(RecordsUnreadable(count, text), [])
        assert (frontend.problem(), frontend.figures().unreadable) == (text, count)
    for text in ("the other nodes' clocks run 1.02 times as fast as this node's", ""):
        frontend._on_message(Noted(Note.CLOCK, text), [])
        assert frontend.problem() == text
    frontend._on_end()
    frontend._on_message(RecordsUnreadable(1, ""), [])
    assert frontend.figures().unreadable == 4, "a process that follows counts from 0"


def test_the_broker_handles_every_message_of_the_fleet_process() -> None:
    async def story() -> None:
        settings = FleetSettings(etcd=("127.0.0.1:1",), node="node-0")
        table = LeaseTable([])
        frontend = Telling(settings, SandboxSettings(), table, [], lambda _: None, Journal(), list, lambda _: None)
        frontend.told = []
        for message in FROM_FLEET.messages:
            frontend._on_message(message, [])  # type: ignore[arg-type]
        assert frontend.problem()

    asyncio.run(story())
