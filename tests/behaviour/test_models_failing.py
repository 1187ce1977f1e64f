"""Models whose lease, worker, kernel or daemon ends: the errors of their callers, and their recovery."""

import asyncio
import os
import signal
import time
from collections.abc import Callable

import pytest

from gpulease.client.core import lease as leases
from gpulease.client.serve.models.request_queue import WaitingRequest
from gpulease.client.serve.rpc import Answer
from gpulease.client.sync.driver import ask
from gpulease.protocol import Opcode
from gpulease.protocol.messages import Drain, Empty
from gpulease.protocol.rpc import CallError, CallErrorCode
from helpers.daemon import Daemon
from helpers.lasting import LastingDaemon
from helpers.model_rig import ENDLESS, SLOW, SLOW_STEPS, STRAY, code_of, item, obey, right, serving, until
from helpers.waiting import PATIENCE_S


def test_the_lease_expires_under_a_request(daemon: Daemon) -> None:
    async def play() -> None:
        async with serving(daemon, obey(lease_secs=0.4, max_kernel_secs=30)) as rig:
            lease_id = await rig.leased()
            asked = asyncio.ensure_future(rig.ask(item(1, ENDLESS)))
            await asyncio.sleep(0.05)
            time.sleep(0.6)  # noqa: ASYNC251  # nothing of this process runs, so nothing is renewed
            outcome = await asked
            assert code_of(outcome) is CallErrorCode.LEASE_LOST
            assert "LeaseExpired" in str(outcome)
            assert await rig.ask(item(2)) == right(2)
            assert rig.lease_id() != lease_id
            assert daemon.query(lease_id)["cause"] == "expired"

    asyncio.run(play())


def test_the_lease_is_revoked_under_load(daemon: Daemon) -> None:
    async def play() -> None:
        async with serving(daemon, obey()) as rig:
            lease_id = await rig.leased()
            stop, lost, done = False, 0, 0

            async def keep_asking(value: int) -> None:
                nonlocal lost, done
                while not stop:
                    outcome = await rig.ask(item(value))
                    if isinstance(outcome, Answer):
                        assert outcome == right(value)
                        done += 1
                    else:
                        assert code_of(outcome) is CallErrorCode.LEASE_LOST
                        assert "Revoked" in outcome.text
                        lost += 1

            tasks = [asyncio.ensure_future(keep_asking(value)) for value in range(6)]
            await until(lambda: done > 50)
            await asyncio.to_thread(daemon.revoke, lease_id, "maintenance")
            before = done
            await until(lambda: done > before + 50 and rig.lease_id() not in (0, lease_id))
            stop = True
            await asyncio.gather(*tasks)
            # Only the requests of one batch may fail.
            assert lost <= 6
            assert rig.counted("kernel_fail_total") <= 1

    asyncio.run(play())


def test_the_lease_is_revoked_while_nobody_asks(daemon: Daemon) -> None:
    async def play() -> None:
        async with serving(daemon, obey()) as rig:
            lease_id = await rig.leased()
            await asyncio.to_thread(daemon.revoke, lease_id)
            await until(lambda: rig.lease_id() not in (0, lease_id))
            # The server noticed the end without a request, so no request fails.
            assert await rig.ask(item(1)) == right(1)
            assert rig.counted("kernel_fail_total") == 0

    asyncio.run(play())


def test_a_kernel_that_runs_too_long(daemon: Daemon) -> None:
    async def play() -> None:
        async with serving(daemon, obey(max_kernel_secs=0.3, max_batch=1)) as rig:
            lease_id = await rig.leased()
            asked = asyncio.ensure_future(rig.ask(item(1, ENDLESS)))
            await asyncio.sleep(0)
            behind = asyncio.ensure_future(rig.ask(item(2)))
            outcome = await asked
            assert code_of(outcome) is CallErrorCode.KERNEL_FAILED
            assert "a kernel ran for more than 0.3 s" in str(outcome)
            # The request that waited after it is computed on the next lease.
            assert await behind == right(2)
            assert rig.lease_id() != lease_id
            assert daemon.query(lease_id)["cause"] == "kernel_timeout"
            assert rig.counted("kernel_fail_total") == 1

    asyncio.run(play())


def test_one_request_that_makes_a_pure_models_kernel_fail_fails_alone(daemon: Daemon) -> None:
    async def play() -> None:
        async with serving(daemon, obey(is_pure=True)) as rig:
            good, bad, also_good = await asyncio.gather(rig.ask(item(1)), rig.ask(item(2, STRAY)), rig.ask(item(3)))
            assert (good, also_good) == (right(1), right(3))
            assert code_of(bad) is CallErrorCode.KERNEL_FAILED
            assert "SyncFailed" in str(bad)
            # The batch of all requests failed, and then the bad request alone.
            assert rig.counted("kernel_fail_total") == 2

    asyncio.run(play())


def test_what_may_not_be_computed_twice_is_not(daemon: Daemon) -> None:
    async def play() -> None:
        async with serving(daemon, obey()) as rig:
            outcomes = await asyncio.gather(rig.ask(item(1)), rig.ask(item(2, STRAY)))
            assert [code_of(outcome) for outcome in outcomes] == [CallErrorCode.KERNEL_FAILED] * 2
            assert rig.counted("kernel_launch_total") == 1
            assert await rig.ask(item(3)) == right(3)

    asyncio.run(play())


def test_the_worker_is_killed(daemon: Daemon) -> None:
    async def play() -> None:
        async with serving(daemon, obey()) as rig:
            lease_id = await rig.leased()
            asked = asyncio.ensure_future(rig.ask(item(1, ENDLESS)))
            await asyncio.sleep(0.1)
            os.kill(daemon.worker_pid(lease_id), signal.SIGKILL)
            assert code_of(await asked) is CallErrorCode.KERNEL_FAILED
            assert await rig.ask(item(2)) == right(2)
            idle = rig.lease_id()
            os.kill(daemon.worker_pid(idle), signal.SIGKILL)
            await until(lambda: rig.lease_id() not in (0, idle))
            assert await rig.ask(item(3)) == right(3)

    asyncio.run(play())


@pytest.mark.exhaustive
def test_the_daemon_is_killed_and_started_anew(start_daemon: Callable[..., Daemon]) -> None:
    daemon = start_daemon()

    async def play() -> None:
        async with serving(daemon, obey(is_pure=True)) as rig:
            assert await rig.ask(item(1)) == right(1)
            begun = asyncio.ensure_future(rig.ask(item(3 * SLOW_STEPS, SLOW)))
            await until(lambda: rig.counted("kernel_launch_total") == 2)
            daemon.kill()
            waiting = [asyncio.ensure_future(rig.ask(item(value))) for value in range(3)]
            await until(lambda: not rig.lease_id())
            again = await asyncio.to_thread(start_daemon, folder=daemon.folder)
            # The request that had begun is computed again, because the model's settings permit that.
            assert await asyncio.gather(*waiting) == [right(value) for value in range(3)]
            assert await begun == right(3 * SLOW_STEPS)
            assert rig.counted("kernel_fail_total") == 1
            assert len(again.leases()) == 1
        assert again.leases() == []

    asyncio.run(play())


@pytest.mark.exhaustive
def test_a_daemon_that_keeps_its_leases_is_killed(lasting: LastingDaemon) -> None:

    async def play() -> None:
        async with serving(lasting.now, obey()) as rig:
            lease_id = await rig.leased()
            lasting.kill()
            assert await rig.ask(item(1)) == right(1)
            await asyncio.to_thread(lasting.start)
            assert await rig.ask(item(2)) == right(2)
            assert rig.lease_id() == lease_id
            # The server also receives events from the next daemon.
            await asyncio.sleep(1)
            await asyncio.to_thread(lasting.now.revoke, lease_id)
            await until(lambda: rig.lease_id() not in (0, lease_id))
            assert await rig.ask(item(3)) == right(3)
            assert rig.counted("kernel_fail_total") == 0

    asyncio.run(play())


def test_a_model_that_does_not_load_makes_nobody_wait(daemon: Daemon) -> None:
    async def play() -> None:
        async with serving(daemon, obey("broken", module=b"not PTX"), obey(method_id=2)) as rig:
            outcome = await rig.ask(item(1), "broken")
            assert code_of(outcome) is CallErrorCode.UNAVAILABLE
            assert "can't be served" in str(outcome)
            assert await rig.ask(item(1)) == right(1, method_id=2)

    asyncio.run(play())


def test_a_drained_node(daemon: Daemon, monkeypatch: pytest.MonkeyPatch) -> None:
    # The lease is renewed some hundredths of a second after the grant.
    monkeypatch.setattr(leases, "RENEW_AT", 1e-3)

    async def play() -> None:
        async with serving(daemon, obey(lease_secs=60)) as rig:
            lease_id = await rig.leased()
            await asyncio.to_thread(ask, Opcode.DRAIN, Drain(50_000), daemon.address)
            try:
                # The lease is valid until its end, although it can't be renewed.
                await asyncio.sleep(0.3)
                assert await rig.ask(item(1)) == right(1)
                assert rig.lease_id() == lease_id
                await asyncio.to_thread(ask, Opcode.DRAIN, Drain(0), daemon.address)
                await until(lambda: not rig.lease_id())
                outcome = await rig.ask(item(2), deadline_s=0.2)
                assert code_of(outcome) in (CallErrorCode.UNAVAILABLE, CallErrorCode.TOO_LATE)
                waiting = asyncio.ensure_future(rig.ask(item(3)))
                await asyncio.sleep(0.1)
            finally:
                await asyncio.to_thread(ask, Opcode.DRAIN_CANCEL, Empty(), daemon.address)
            outcome = await waiting
            async with asyncio.timeout(PATIENCE_S):
                while isinstance(outcome, CallError) and code_of(outcome) is CallErrorCode.TOO_LATE:
                    # If a busy host was slow with a batch, the server expects the same of the next ones, for a second
                    # or two.
                    outcome = await rig.ask(item(3))
            assert outcome == right(3)

    asyncio.run(play())


def test_what_is_handed_to_a_model_that_stops_is_refused(daemon: Daemon) -> None:
    async def play() -> None:
        async with serving(daemon, obey("small", method_id=2)) as rig:
            small = rig.host._instances["small"]
            small.stop()
            request = WaitingRequest(item(1), 1, 0.0, 1e9, asyncio.get_running_loop().create_future())
            small.adopt([request])
            assert code_of(await request.answer) is CallErrorCode.UNAVAILABLE

    asyncio.run(play())
