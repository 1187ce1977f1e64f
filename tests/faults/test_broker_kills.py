"""The broker is killed at random moments. Everything that clients and operators were told must remain true.

GPULEASE_KILLS is the number of kills, GPULEASE_KILLS_SEED the seed of the random numbers.
"""

import os
import random
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Final

import pytest

from gpulease.client import Fenced, GpuBuilder, GpuLeaseError, NotFound
from gpulease.client.sync.driver import ask
from gpulease.protocol import Opcode
from gpulease.protocol.messages import FenceClear, LeaseRenew
from helpers.daemon import Daemon, Faults
from helpers.lasting import LastingDaemon
from helpers.processes import open_files
from helpers.submits import WORKER
from helpers.tenant_load import MIB, Load, Told
from helpers.waiting import wait_until

pytestmark = [pytest.mark.exhaustive, pytest.mark.first]

KILLS: Final = int(os.environ.get("GPULEASE_KILLS", "6"))
SEED: Final = int(os.environ.get("GPULEASE_KILLS_SEED", str(random.SystemRandom().randrange(10**6))))

TENANTS: Final = 4
CARD_MIB: Final = 64
FENCED_MIB: Final = 4

CONFIG: Final = """
warm_contexts = 1
on_stop = "keep"
[limits]
reclaim_timeout_s = 2
"""


@contextmanager
def fenced_lease(lasting: LastingDaemon) -> Iterator[int]:
    """Yield the id of a fenced lease on the second card: its bytes could not be proved free."""
    flag = lasting.folder / "withhold"
    lasting.restart(Faults(withhold_proof_while=flag))
    lease = GpuBuilder(lasting.address).device(1).min_vram(FENCED_MIB * MIB).lease_secs(600).acquire()
    flag.touch()
    with pytest.raises(Fenced):
        lease.free()
    flag.unlink()
    yield lease.lease_id


def leased_workers(lasting: LastingDaemon) -> list[str]:
    """Return the names of all workers with a lease, one for each process.

    Workers of submits are left out, because their names do not contain a lease.
    """
    return [name for name in workers(lasting) if name not in ("gpul-zygote", "gpul-warm", WORKER)]


def workers(lasting: LastingDaemon) -> list[str]:
    """Return the names of all zygotes and of the processes that they have forked."""
    return [info.name for info in lasting.processes() if info.name.startswith("gpul-") and not info.is_zombie]


def check_from_outside(lasting: LastingDaemon, load: Load) -> None:
    """Fail if a lease has two workers, or if all leases together hold more than the card has."""
    sizes = {f"gpul-{told.lease_id:032x}"[:15]: told.size_bytes for told in list(load.told.values())}
    names = Counter(leased_workers(lasting))
    assert max(names.values(), default=0) <= 1, names
    assert sum(sizes.get(name, 0) for name in names) <= CARD_MIB * MIB, names


def check_told(daemon: Daemon, told: Told) -> None:
    """Fail unless the daemon reports about a lease what its tenant was told."""
    before = time.monotonic()
    was_revoked, generation, surely_until = told.is_revoked, told.generation, told.surely_until
    try:
        report = daemon.query(told.lease_id)
    except NotFound:
        report = {"state": "unknown", "cause": "unknown", "generation": generation}
    if was_revoked:
        assert report["state"] in ("torndown", "fenced"), (told, report)
        assert report["cause"] in ("revoked", "freed", "expired"), (told, report)
        return
    if not told.given_back and not told.is_revoking and time.monotonic() < surely_until:
        assert report["state"] == "active", (told, report, before)
        assert report["size_bytes"] == told.size_bytes
    assert report["generation"] >= generation, (told, report)


def check_after_restart(lasting: LastingDaemon, load: Load, fenced_id: int) -> None:
    """Check everything that must hold once the next broker listens."""
    check_from_outside(lasting, load)
    daemon = lasting.now
    for told in list(load.told.values())[-60:]:
        check_told(daemon, told)
    for card in daemon.inventory().details:
        assert card["held_bytes"] <= card["capacity_bytes"], card
    assert daemon.inventory().details[1]["fenced_bytes"] == FENCED_MIB * MIB, (daemon.query(fenced_id), lasting.logs())
    assert daemon.query(fenced_id)["state"] == "fenced"
    known = {f"gpul-{lease['lease_id']}"[:15] for lease in daemon.leases()}

    def strangers() -> set[str]:
        # Ask again: a lease that is not in the first list may have been granted since.
        known.update(f"gpul-{lease['lease_id']}"[:15] for lease in daemon.leases())
        return set(leased_workers(lasting)) - known

    wait_until(lambda: not strangers(), "no worker runs that the broker does not know", seen=strangers)

    def has_known_submits() -> bool:
        # A check may fall between two submits, so it is repeated.
        found = workers(lasting).count(WORKER)
        return found <= sum("submit" in query(daemon, lease["lease_id"]) for lease in daemon.leases())

    wait_until(has_known_submits, "no submit runs that the broker does not know", seen=lambda: workers(lasting))
    assert len(lasting.zygotes()) == 1, lasting.processes()


def query(daemon: Daemon, lease_id: str) -> dict[str, Any]:
    """Return the report about a lease; nothing if the daemon has forgotten the lease."""
    try:
        return daemon.query(int(lease_id, 16))
    except NotFound:
        return {}


def check_nothing_was_wrong(load: Load) -> None:
    if load.wrong:
        raise AssertionError("\n".join([f"seed {SEED}, {load.counts}", *load.wrong]))


def kill_soon(lasting: LastingDaemon, dice: random.Random) -> None:
    """Kill the broker while it serves, stops or starts. Returns once the next one listens."""
    time.sleep(dice.choice([0.0, 0.05, 0.3, 1.0, 2.0]) * dice.random())
    if dice.random() < 0.2:
        lasting.now.process.terminate()
        time.sleep(dice.choice([0.02, 0.5]) * dice.random())
    lasting.kill()
    time.sleep(dice.choice([0.0, 0.0, 0.1, 0.5]) * dice.random())
    while dice.random() < 0.2:
        half_started = lasting.begin()
        time.sleep(0.4 * dice.random())
        half_started.kill()
    lasting.start()


def test_what_anybody_was_told_outlives_the_broker(start_lasting: Callable[..., LastingDaemon]) -> None:
    dice = random.Random(SEED)
    lasting = start_lasting(vram=(f"{CARD_MIB}MiB", "16MiB"), config=CONFIG)
    with fenced_lease(lasting) as fenced_id:
        lasting.restart()
        zygote = lasting.zygotes()[0]
        files = len(open_files(zygote))
        load = Load(lasting.address, SEED)
        load.start(TENANTS)
        try:
            for _ in range(KILLS):
                kill_soon(lasting, dice)
                check_after_restart(lasting, load, fenced_id)
                check_nothing_was_wrong(load)
        finally:
            load.stop()
        print(f"seed {SEED}: {KILLS} kills, {load.counts}")
        check_nothing_was_wrong(load)
        assert any(what.startswith("submit") for what in load.counts), load.counts
    check_nothing_leaks(lasting, zygote, files, load)


def check_nothing_leaks(lasting: LastingDaemon, zygote: int, files: int, load: Load) -> None:
    """Check that all is as before: no leases, all bytes free, no fence but the one made here, no further processes or
    files.
    """
    daemon = lasting.now

    def living() -> list[dict[str, Any]]:
        return [lease for lease in daemon.leases() if lease["state"] != "fenced"]

    # A lease whose grant did not reach its tenant lives until it expires.
    wait_until(lambda: not living(), "no lease is left", 60, seen=living)
    assert ask(Opcode.FENCE_CLEAR, FenceClear("1"), lasting.address).count == 1
    wait_until(lambda: len(lasting.processes()) <= 4, "broker, zygote and two warm contexts", seen=lasting.processes)
    for card in daemon.inventory().details:
        assert card["held_bytes"] == card["fenced_bytes"] == 0, card
    assert lasting.zygotes() == [zygote]
    wait_until(
        # Four descriptors for each warm context: its process, two pages and its channel.
        lambda: len(open_files(zygote)) <= files + 8,
        "the zygote's descriptors are closed",
        seen=lambda: open_files(zygote),
    )
    assert len(list((lasting.state / "zygotes").iterdir())) == 1
    for told in list(load.told.values())[-20:]:
        with pytest.raises(GpuLeaseError):
            ask(Opcode.LEASE_RENEW, LeaseRenew(told.lease_id, 1000), lasting.address)
