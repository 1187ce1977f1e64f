"""Models on a real daemon: leases that are kept, batches, admission, and smaller variants if there is no room."""

import asyncio
import time
from collections.abc import Callable

import pytest

from gpulease.client import GpuBuilder
from gpulease.client.core import lease as leases
from gpulease.protocol.rpc import CallErrorCode
from helpers.daemon import Daemon
from helpers.model_rig import SLOW, SLOW_STEPS, code_of, item, obey, right, serving, until
from helpers.waiting import PATIENCE_S


def test_one_lease_for_all_requests(daemon: Daemon) -> None:
    async def play() -> None:
        async with serving(daemon, obey()) as rig:
            lease_id = await rig.leased()
            for value in range(5):
                assert await rig.ask(item(value)) == right(value)
            assert await rig.ask(item(1) + item(2) + item(3)) == right(1, 2, 3)
            assert rig.lease_id() == lease_id
            assert [report["lease_id"] for report in daemon.leases()] == [f"{lease_id:032x}"]
            assert rig.counted("kernel_launch_total") == 6
            assert rig.counted("bytes_in_total") == 8 * 8
            assert rig.counted("bytes_out_total") == 8 * 4
            assert rig.counted("inference_latency_ms_count") == 6
            assert rig.counted("requests_total", outcome="done") == 6
            assert rig.counted("gpu_lease_seconds_total") > 0
        assert daemon.query(lease_id)["cause"] == "freed"

    asyncio.run(play())


def test_the_lease_is_renewed_for_as_long_as_the_model_is_served(
    daemon: Daemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Renew the lease as often as a short one, but make it so long that a busy host can't miss its end.
    monkeypatch.setattr(leases, "RENEW_AT", 1e-3)

    async def play() -> None:
        async with serving(daemon, obey(lease_secs=60)) as rig:
            lease_id = await rig.leased()
            generation = daemon.query(lease_id)["generation"]
            await until(lambda: daemon.query(lease_id)["generation"] >= generation + 3)
            assert await rig.ask(item(7)) == right(7)
            assert rig.lease_id() == lease_id

    asyncio.run(play())


@pytest.mark.parametrize("max_batch", [1, 4, 8])
def test_what_waits_together_is_computed_together(daemon: Daemon, max_batch: int) -> None:
    async def play() -> None:
        # All requests arrive before the model has a lease.
        async with serving(daemon, obey(max_batch=max_batch)) as rig:
            outcomes = await asyncio.gather(*(rig.ask(item(value)) for value in range(20)))
            assert outcomes == [right(value) for value in range(20)]
            assert rig.counted("kernel_launch_total") == -(-20 // max_batch)
            assert rig.counted("batch_items_sum") == 20
            assert rig.counted("queue_depth") == 0

    asyncio.run(play())


def test_a_batch_waits_for_more_until_it_is_full_or_its_time_is_over(daemon: Daemon) -> None:
    async def play() -> None:
        async with serving(daemon, obey(max_batch=3, max_delay_ms=300)) as rig:
            await rig.leased()
            began = time.monotonic()
            assert list(await asyncio.gather(rig.ask(item(1)), rig.ask(item(2)))) == [right(1), right(2)]
            assert time.monotonic() - began >= 0.3
            assert rig.counted("kernel_launch_total") == 1
        async with serving(daemon, obey(max_batch=3, max_delay_ms=1000 * round(PATIENCE_S))) as rig:
            await rig.leased()
            async with asyncio.timeout(PATIENCE_S):
                await asyncio.gather(*(rig.ask(item(value)) for value in range(3)))
            assert rig.counted("kernel_launch_total") == 1

    asyncio.run(play())


# --- what is admitted ---


def test_what_makes_no_sense(daemon: Daemon) -> None:
    async def play() -> None:
        async with serving(daemon, obey(max_batch=2)) as rig:
            for payload in (b"", b"1234", item(1) + b"1", item(1) * 3):
                assert code_of(await rig.ask(payload)) is CallErrorCode.INVALID_REQUEST
            assert code_of(await rig.host.call(9, item(1))) is CallErrorCode.NO_SUCH_METHOD
            assert await rig.host.call(1, item(1)) == right(1)

    asyncio.run(play())


def test_the_line_is_bounded(daemon: Daemon) -> None:
    async def play() -> None:
        async with serving(daemon, obey(max_queue=3, max_batch=2)) as rig:
            asked = [asyncio.ensure_future(rig.ask(item(value))) for value in range(3)]
            await asyncio.sleep(0)
            outcome = await rig.ask(item(3))
            assert code_of(outcome) is CallErrorCode.QUEUE_FULL
            assert await asyncio.gather(*asked) == [right(0), right(1), right(2)]

    asyncio.run(play())


def test_what_can_not_be_done_in_time_is_refused_at_once(daemon: Daemon) -> None:
    async def play() -> None:
        async with serving(daemon, obey(max_batch=1, lease_secs=60)) as rig:
            for steps in (1, SLOW_STEPS):  # The first batch compiles, so it does not count for the estimate.
                assert await rig.ask(item(steps, SLOW)) == right(steps)
            launches = rig.counted("kernel_launch_total")
            outcome = await rig.ask(item(1), deadline_s=0.01)
            assert code_of(outcome) is CallErrorCode.TOO_LATE
            assert code_of(await rig.host.call(1, item(1), 0.01)) is CallErrorCode.TOO_LATE
            # No kernel was launched. Later a request is tried again, because otherwise nothing could correct the
            # estimate.
            assert rig.counted("kernel_launch_total") == launches
            for _ in range(200):
                if await rig.ask(item(1), deadline_s=0.2) == right(1):
                    return
                await asyncio.sleep(0.05)
            pytest.fail("an estimate lasts for ever")

    asyncio.run(play())


def test_what_the_lease_can_not_outlast_is_refused(daemon: Daemon, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(leases, "RENEW_AT", 0.1)

    async def play(scale: int) -> bool:
        # The batch takes longer than the lease lasts, so the lease must be renewed meanwhile. A busy host may fail to
        # do that.
        async with serving(daemon, obey(max_batch=1, lease_secs=0.6 * scale)) as rig:
            for steps in (1, 9 * SLOW_STEPS * scale):
                answer = await rig.ask(item(steps, SLOW))
                if answer != right(steps):
                    assert code_of(answer) is CallErrorCode.LEASE_LOST
                    return False
            outcome = await rig.ask(item(1))
            assert code_of(outcome) is CallErrorCode.TOO_LATE
            assert "the lease ends in" in str(outcome)
            return True

    # If the host is too busy to renew in time, try a longer lease.
    assert any(asyncio.run(play(scale)) for scale in (1, 4, 16))


def test_who_is_not_begun_in_time_or_went_away_is_not_computed(daemon: Daemon) -> None:
    async def play() -> None:
        async with serving(daemon, obey(max_batch=1)) as rig:
            await rig.leased()
            slow = asyncio.ensure_future(rig.ask(item(2 * SLOW_STEPS, SLOW)))
            await asyncio.sleep(0)
            gone = rig.host.submit("obey", item(1))
            late = asyncio.ensure_future(rig.ask(item(2), deadline_s=0.05))
            await asyncio.sleep(0)
            gone.cancel()
            assert code_of(await late) is CallErrorCode.TOO_LATE
            assert await slow == right(2 * SLOW_STEPS)
            assert rig.counted("kernel_launch_total") == 1
            assert rig.counted("requests_total", outcome="cancelled") == 1

    asyncio.run(play())


# --- leases on demand, and pressure ---


def test_a_burst_model_is_leased_while_it_is_warm(daemon: Daemon) -> None:
    async def play(idle_s: float) -> bool:
        async with serving(daemon, obey(idle_secs=idle_s)) as rig:
            await asyncio.sleep(0.1)
            assert daemon.leases() == []
            assert await rig.ask(item(1)) == right(1)
            first = rig.lease_id()
            assert await rig.ask(item(2)) == right(2)
            is_first = rig.lease_id() == first
            await until(lambda: not daemon.leases())
            assert daemon.query(first)["cause"] == "freed"
            assert await rig.ask(item(3)) == right(3)
            assert rig.lease_id() != first
            return is_first

    # On a busy host, more time may pass between requests than the model is kept. Then try a longer time.
    assert any(asyncio.run(play(idle_s)) for idle_s in (0.3, 3.0, 30.0))


@pytest.mark.exhaustive
def test_a_smaller_variant_stands_in_while_there_is_no_room(start_daemon: Callable[..., Daemon]) -> None:
    daemon = start_daemon(vram=("1GiB",))

    async def play() -> None:
        large = obey(min_vram_bytes=900 << 20, smaller="small")
        small = obey("small", method_id=2, idle_secs=0.3)
        lease = GpuBuilder(daemon.address).min_vram(512 << 20).acquire()
        async with serving(daemon, large, small) as rig:
            assert await rig.ask(item(5)) == right(5, method_id=2)
            assert await rig.ask(item(6)) == right(6, method_id=2)
            lease.free()
            assert await rig.leased()
            assert await rig.ask(item(7)) == right(7)
            # The smaller variant that served meanwhile is unloaded.
            await until(lambda: not rig.lease_id("small"))

    asyncio.run(play())


@pytest.mark.exhaustive
def test_without_one_requests_wait_for_room_and_no_longer_than_they_may(start_daemon: Callable[..., Daemon]) -> None:
    daemon = start_daemon(vram=("1GiB",))

    async def play() -> None:
        lease = GpuBuilder(daemon.address).min_vram(512 << 20).acquire()
        async with serving(daemon, obey(min_vram_bytes=900 << 20)) as rig:
            outcome = await rig.ask(item(1), deadline_s=0.2)
            assert code_of(outcome) in (CallErrorCode.UNAVAILABLE, CallErrorCode.TOO_LATE)
            waiting = asyncio.ensure_future(rig.ask(item(2)))
            await asyncio.sleep(0.1)
            assert not waiting.done()
            lease.free()
            assert await waiting == right(2)

    asyncio.run(play())


# --- the end ---


def test_what_waits_is_done_before_the_end(daemon: Daemon) -> None:
    async def play() -> None:
        async with serving(daemon, obey(max_batch=1)) as rig:
            await rig.leased()
            asked = [asyncio.ensure_future(rig.ask(item(value, SLOW))) for value in range(5)]
            await asyncio.sleep(0)
        assert await asyncio.gather(*asked) == [right(value) for value in range(5)]
        assert code_of(await rig.ask(item(1))) is CallErrorCode.UNAVAILABLE
        assert daemon.leases() == []

    asyncio.run(play())
