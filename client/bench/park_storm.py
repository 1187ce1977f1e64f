"""Sessions with checked work that are parked, moved, revoked, dropped and killed at random, on cards without much room.

    gpulease bench --park-storm --minutes 10

Each tenant has one lease after another. Its data consists of addresses within the data (woven_data.py), is in
allocations and in regions, and is used by launches, streams and graphs; a variable of its module counts the calls.
Meanwhile sessions are parked: by their tenants, by an operator, because they are idle, or because others need room. An
operator also makes them leave their processes, moves them between cards, drains cards, and hands them over to workers
of the next version. The broker is killed and started again, as another version each time. At the end every byte must be
back, and the audit log must have exactly one end of each lease and region that was granted.
"""

import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, Final, TypeVar

import click

from gpulease.client import GpuBuilder, GpuExclusivityClass, GpuLease, GpuLeaseError, GpuSession, KernelArgs
from gpulease.client.bench.figures import LogLine
from gpulease.client.bench.woven_data import BLOCK, EXTRA_BYTES, GRID, STEPS, WORD_BYTES, WovenData, end_of
from gpulease.client.console.private_daemon import PrivateDaemon, killable_daemon
from gpulease.client.console.reports import cards_of, first_card, leases_of
from gpulease.client.console.scene import Breach, worker_pid
from gpulease.client.console.tables import table
from gpulease.client.core.region_sets import RegionSet
from gpulease.client.errors import (
    Busy,
    CapacityExceeded,
    Disconnected,
    Drained,
    LeaseExpired,
    RegionFailed,
    Revoked,
    Unsupported,
)
from gpulease.client.sync.driver import ask
from gpulease.client.sync.graphs import Graph
from gpulease.client.sync.regions import Region
from gpulease.protocol import Opcode
from gpulease.protocol.messages import CardDrain, Empty, LeaseMove, LeaseRef, LeaseRevoke

T = TypeVar("T")

BLOCK_BYTES: Final = {"cpu": 2 << 20, "cuda": 256 << 20}
"""Number of bytes of woven data in each lease, and in each of its regions."""

REGIONS: Final = 2

TENANTS: Final = 6
HELD: Final = 4
"""Number of slices that fit all cards together, in addition to all contexts."""

CPU_CARDS: Final = 2
"""Number of cards with the embedded driver. With another driver, the host's cards are used."""

LEASE_S: Final = 120.0
SHORT_LEASE_S: Final = 4.0
"""Duration of a lease that must expire, in seconds."""

ENDINGS: Final = ("free", "free", "drop", "expire", "revoke", "kill")

ROUNDS: Final = (4, 16)
"""Minimum and maximum number of rounds of a lease's work."""

PATIENCE_S: Final = 120.0
"""Longest time, in seconds, that an operation waits for room or for a broker. If it takes longer, something hangs."""

KILL_EVERY_S: Final = (4.0, 12.0)
OPERATOR_EVERY_S: Final = 0.3

DRAIN_MS: Final = 600_000
DRAINED_S: Final = 1.0
"""Milliseconds until a drain's deadline, which is never reached, and seconds after which the drain is cancelled."""

ENDED_COLD: Final = "parked without a worker when the daemon ended"
"""Part of the reason for a lease's end if the only copy of its session was in a broker that was killed."""

AS_OTHER_VERSION: Final = 'recycle = "same-tenant"\n'
"""A setting for workers. Brokers run with and without it in turn, so each finds workers that another version
started."""

AT_MOST_SURPRISES: Final = 20

_SETTINGS: Final = """\
audit = "{audit}"
warm_contexts = 1
[limits]
park_memory = "{park_memory}B"
overcommit = 8.0
park_stay_ms = 50
parks_per_minute = 100000
"""

_ENDED: Final = (Revoked, LeaseExpired)


@dataclass(slots=True)
class StormCounts:
    """What happened in a storm.

    Attributes:
        did: Number of operations and ends, by name.
        wrong: Wrong words and results.
        surprises: Sentences about events that should not have happened.
        regions: Ids of the regions that tenants received, as in the audit log.
    """

    did: Counter[str] = field(default_factory=Counter)
    wrong: int = 0
    surprises: list[str] = field(default_factory=list)
    regions: set[str] = field(default_factory=set)

    def surprise(self, text: str) -> None:
        if len(self.surprises) < AT_MOST_SURPRISES:
            self.surprises.append(text)
        self.did["surprises"] += 1


class _Tenant:
    """A tenant that acquires one lease after another, each with checked work, until `until`."""

    def __init__(self, address: str, driver: str, seed: int, counts: StormCounts, until: float) -> None:
        self._address, self._driver = address, driver
        self._random, self._counts, self._until = random.Random(seed), counts, until
        self._renewed_s = 0.0

    def run(self) -> None:
        while time.monotonic() < self._until:
            ending = self._random.choice(ENDINGS)
            try:
                self._live(ending)
                self._counts.did[ending] += 1
            # Record any error and continue, because the storm needs all its threads.
            except Exception as error:
                # An expiry much sooner than LEASE_S after a renewal means that the renewal was lost.
                since_s = time.monotonic() - self._renewed_s
                self._counts.surprise(f"{ending}, {since_s:.1f} s after a renewal: {type(error).__name__}: {error}")
                time.sleep(1.0)

    def _live(self, ending: str) -> None:
        seconds = SHORT_LEASE_S if ending == "expire" else LEASE_S
        idle_s = self._random.choice((0.0, 0.2, 1.0))
        builder = GpuBuilder(self._address).min_vram(slice_bytes(self._driver)).lease_secs(seconds)
        builder = builder.timeout(PATIENCE_S).parkable(idle_s).exclusivity(GpuExclusivityClass.SHARED)
        lease = _retried(builder.acquire)
        self._renewed_s = time.monotonic()
        try:
            with contextlib.suppress(*(_ENDED if ending == "expire" else ())):
                work = _Work(lease, BLOCK_BYTES[self._driver], self._random, self._counts)
                for _ in range(self._random.randint(*ROUNDS) if ending != "expire" else 1 << 30):
                    if time.monotonic() > self._until:
                        break
                    # On a slow host, the rounds may take longer than the lease lasts.
                    if ending != "expire":
                        _retried(lambda: lease.renew(LEASE_S))
                        self._renewed_s = time.monotonic()
                    work.round()
                self._end(ending, lease, work)
        except GpuLeaseError:
            if not self._ended_cold(lease):
                raise
            self._counts.did["ended cold with a broker"] += 1

    def _ended_cold(self, lease: GpuLease) -> bool:
        """Return whether a lease ended with a killed broker that had the only copy of its session."""
        report = _retried(lambda: ask(Opcode.LEASE_QUERY, LeaseRef(lease.lease_id), self._address).report)
        return report["cause"] == "worker_died" and ENDED_COLD in report["reason"]

    def _end(self, ending: str, lease: GpuLease, work: "_Work") -> None:
        # End half of all leases while the session is parked.
        if self._random.random() < 0.5:
            work.park()
        match ending:
            case "free" | "expire":
                work.session.close()
                _retried(lease.free)
            case "drop":
                work.session.close()
            case "revoke":
                _retried(lambda: ask(Opcode.LEASE_REVOKE, LeaseRevoke(lease.lease_id, "storm"), self._address))
                work.until_refused(Revoked)
            case "kill":
                # A session that leaves its worker has two workers for a moment, and a cold session has none until it is
                # used.
                work.until_refused(GpuLeaseError, lambda: _kill_worker(lease.lease_id))


class _Work:
    """The work of one lease: kernels with known results, each of which is checked."""

    def __init__(self, lease: GpuLease, block_bytes: int, rng: random.Random, counts: StormCounts) -> None:
        self._lease, self._random, self._counts = lease, rng, counts
        self.session = _retried(lambda: GpuSession(lease))
        self._data = _retried(lambda: WovenData(self.session, block_bytes, 2 * rng.randrange(1 << 20) + 1))
        self._streams = [_retried(self.session.stream) for _ in range(2)]
        self._stored = _retried(lambda: self.session.mem_alloc(WORD_BYTES))
        self._graph_result = _retried(lambda: self.session.empty(1, "uint64"))
        self._graph = _retried(self._record)
        self._regions: list[tuple[Region, RegionSet]] = []

    def _record(self) -> Graph:
        with self.session.record() as graph:
            args = KernelArgs().push_buffer(self._data.block).push_u32(STEPS).push_buffer(self._stored)
            self.session.launch(self._data.module, "follow", (1,), (1,), args)
            self.session.mem_read(self._stored, 0, WORD_BYTES, into=self._graph_result)
        return graph

    def round(self) -> None:
        """Do one thing at random, and check all data."""
        for action in self._random.choices(
            (self.park, self._idle, self._use_graph, self._use_streams, self._use_regions), k=2
        ):
            action()
        self._begin()
        self._counts.wrong += _retried(self._data.check)
        self._counts.did["checks"] += 1

    def _begin(self) -> None:
        # A request that is refused for lack of room has done nothing, so it can be sent again.
        _retried(self._data.begin)

    def park(self) -> None:
        """Park the session, and count whether the daemon did that, could not, or did not answer."""
        try:
            self._lease.park()
            self._counts.did["parked"] += 1
        except (CapacityExceeded, Disconnected):
            self._counts.did["not parked"] += 1

    def _idle(self) -> None:
        time.sleep(self._random.uniform(0.0, 0.6))

    def _use_graph(self) -> None:
        self._graph_result[0] = 0
        _retried(self._launch_graph)
        data = self._data
        end = end_of(data.block.handle, data.size_bytes // WORD_BYTES, data.seed)
        self._count_wrong("graphs", int(self._graph_result[0]) != end)

    def _launch_graph(self) -> None:
        self._graph.launch()
        self.session.sync()

    def _use_streams(self) -> None:
        data, session = self._data, self.session
        for stream in self._streams:
            args = KernelArgs().push_buffer(data.block).push_u32(STEPS).push_buffer(self._stored)
            _retried(lambda: session.launch(data.module, "follow", (1,), (1,), args, stream=stream))  # noqa: B023
            _retried(stream.sync)
        at = int.from_bytes(_retried(lambda: session.mem_read(self._stored, 0, WORD_BYTES)), "little")
        self._count_wrong("streams", at != end_of(data.block.handle, data.size_bytes // WORD_BYTES, data.seed))

    def _use_regions(self) -> None:
        """Open, check and end regions; some end while the session is parked."""
        while len(self._regions) < REGIONS:
            # A broker that was killed may have opened a region before. That region ends at its own deadline.
            region = _retried(self._open_region)
            self._regions.append((region, self.session.region_set([region])))
            _retried(lambda: self._weave(*self._regions[-1]))
        for region, regions in self._regions:
            self._count_wrong("regions", self._check(region, regions))
        if self._random.random() < 0.5:
            region, regions = self._regions.pop(self._random.randrange(REGIONS))
            if self._random.random() < 0.5:
                self.park()
            with contextlib.suppress(RegionFailed):
                _retried(region.revoke)
            try:
                _retried(lambda: self._weave(region, regions))
                self._count_wrong("regions that ended", 1)
            except RegionFailed:
                self._counts.did["regions that ended"] += 1
            _retried(region.close)

    def _open_region(self) -> Region:
        region = self._lease.region(self._data.size_bytes, ttl_secs=PATIENCE_S)
        self._counts.regions.add(f"{region.lease_id:032x}")
        return region

    def _weave(self, region: Region, regions: RegionSet) -> None:
        data = self._data
        args = KernelArgs().push_buffer(region).push_u64(data.origin).push_u64(data.mask).push_u64(data.seed)
        self.session.launch(data.module, "weave", GRID, BLOCK, args, regions=regions)
        self.session.sync()

    def _check(self, region: Region, regions: RegionSet) -> int:
        data, session = self._data, self.session

        def check() -> int:
            session.mem_write(self._stored, 0, bytes(WORD_BYTES))
            args = KernelArgs().push_buffer(region).push_u64(data.origin).push_u64(data.mask).push_u64(data.seed)
            session.launch(data.module, "check", GRID, BLOCK, args.push_buffer(self._stored), regions=regions)
            return int.from_bytes(session.mem_read(self._stored, 0, WORD_BYTES), "little")

        return _retried(check)

    def _count_wrong(self, name: str, wrong_words: int) -> None:
        self._counts.did[name] += 1
        self._counts.wrong += wrong_words

    def until_refused(self, error: type[GpuLeaseError], end: Callable[[], None] = lambda: None) -> None:
        """Use the session until its end is reported, and call `end` before each use. Raises Breach if it is not."""
        until = time.monotonic() + PATIENCE_S
        while time.monotonic() < until:
            end()
            try:
                self.session.sync()
            except Busy:
                continue
            except error:
                return
            time.sleep(0.02)
        raise Breach("a lease that was ended continues")


def _retried(call: Callable[[], T]) -> T:
    """Repeat a call while there is no room or no broker, or the card is drained. After PATIENCE_S, raises the error."""
    until = time.monotonic() + PATIENCE_S
    while True:
        try:
            return call()
        except (Busy, Disconnected, Drained) as error:
            if time.monotonic() > until:
                raise
            del error
        time.sleep(0.05)


def slice_bytes(driver: str) -> int:
    """Return the size of a lease for one block, its regions and the memory that these keep, and code."""
    return (1 + 2 * REGIONS) * BLOCK_BYTES[driver] + EXTRA_BYTES[driver]


def _kill_worker(lease_id: int) -> None:
    """Kill a lease's worker, if it has one."""
    with contextlib.suppress(Breach, ProcessLookupError):
        os.kill(worker_pid(lease_id), signal.SIGKILL)


class _Operator:
    """Until `until`, parks and moves sessions at random (also to other processes), and may drain cards."""

    def __init__(self, address: str, cards: int, seed: int, counts: StormCounts, until: float, *, drains: bool) -> None:
        self._address, self._cards, self._counts, self._until = address, cards, counts, until
        self._random, self._drains = random.Random(seed), drains

    def run(self) -> None:
        while time.monotonic() < self._until:
            time.sleep(OPERATOR_EVERY_S)
            with contextlib.suppress(GpuLeaseError):
                self._act()

    def _act(self) -> None:
        reports = _lease_reports(self._address)
        if not reports:
            return
        lease = self._random.choice(reports)
        lease_id = int(lease["lease_id"], 16)
        # After each kill of the broker, some workers have an earlier version for a while.
        if earlier := [one for one in reports if one.get("earlier_version")]:
            old = self._random.choice(earlier)
            self._move(int(old["lease_id"], 16), old["card_uuid"], "handed over to the next version")
        match self._random.choice(("park", "leave", "move", "move", "drain")):
            case "park":
                ask(Opcode.LEASE_PARK, LeaseRef(lease_id), self._address)
                self._counts.did["parked by an operator"] += 1
            case "leave":
                self._move(lease_id, None, "parked cold")
            case "move" if self._cards > 1:
                others = [card for card in self._all_cards() if card["uuid"] != lease["card_uuid"]]
                self._move(lease_id, self._random.choice(others)["uuid"], "moved to another card")
            case "drain" if self._drains:
                self._drain(str(self._random.randrange(self._cards)))

    def _move(self, lease_id: int, card: str | None, label: str) -> None:
        """Move one session. Most refusals occur because its tenant uses it at that moment, or ends the lease."""
        try:
            ask(Opcode.LEASE_MOVE, LeaseMove(lease_id, card), self._address)
            self._counts.did[label] += 1
        except (Busy, CapacityExceeded, Drained, Unsupported):
            self._counts.did[f"not {label}"] += 1

    def _drain(self, card: str) -> None:
        """Drain a card for a moment, and move the sessions that can be moved to other cards or else to host memory."""
        # A broker that is killed may have drained the card without a reply.
        try:
            ask(Opcode.CARD_DRAIN, CardDrain(card, DRAIN_MS), self._address)
            uuids = {str(listed["index"]): listed["uuid"] for listed in self._all_cards()}
            uuid = uuids.pop(card)
            others = list(uuids.values())
            until = time.monotonic() + DRAINED_S
            for lease in _lease_reports(self._address):
                if lease["card_uuid"] == uuid and time.monotonic() < until:
                    other = self._random.choice(others) if others else None
                    label = "moved off a drained card" if others else "parked cold"
                    self._move(int(lease["lease_id"], 16), other, label)
            self._counts.did["drained cards"] += 1
        finally:
            _retried(lambda: ask(Opcode.CARD_DRAIN, CardDrain(card, None), self._address))

    def _all_cards(self) -> list[dict[str, Any]]:
        return cards_of(ask(Opcode.GET_INVENTORY, Empty(), self._address))


def _leases(address: str) -> list[int]:
    return [int(lease["lease_id"], 16) for lease in _lease_reports(address)]


def _lease_reports(address: str) -> list[dict[str, Any]]:
    report = leases_of(ask(Opcode.LEASE_LIST_ACTIVE, Empty(), address).report)
    return [lease for lease in report if not lease.get("parent")]


def _kill_brokers(daemon: PrivateDaemon, counts: StormCounts, until: float) -> None:
    rng = random.Random(9)
    settings = daemon.folder / "settings.toml"
    first = settings.read_text()
    while (left_s := until - time.monotonic()) > KILL_EVERY_S[0]:
        time.sleep(min(rng.uniform(*KILL_EVERY_S), left_s))
        daemon.kill()
        settings.write_text(first if settings.read_text() != first else AS_OTHER_VERSION + first)
        daemon.start()
        counts.did["killed brokers"] += 1


def measure_storm(driver: str, minutes: float, log: LogLine) -> dict[str, Any]:
    """Run a storm; returns the report. Raises MissingPrerequisite."""
    counts = StormCounts()
    with _small_daemon(driver, log) as (daemon, gpu, audit):
        address, until = daemon.address, time.monotonic() + minutes * 60
        tenants = [_Tenant(address, gpu, seed, counts, until) for seed in range(TENANTS)]
        work: list[Callable[[], None]] = [tenant.run for tenant in tenants]
        cards = cards_of(ask(Opcode.GET_INVENTORY, Empty(), address))
        # Let only one operator drain cards, because tenants would only wait if all cards were drained at once.
        work += [_Operator(address, len(cards), seed, counts, until, drains=seed == 7).run for seed in (7, 8)]
        work.append(lambda: _kill_brokers(daemon, counts, until))
        log(f"the storm, for {minutes:g} minutes")
        threads = [threading.Thread(target=target, daemon=True) for target in work]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        log("every byte must be back")
        leftovers = _end_everything(address, counts)
        cards = cards_of(ask(Opcode.GET_INVENTORY, Empty(), address))
        unaccounted = sum(int(card[name]) for card in cards for name in ("held_bytes", "fenced_bytes"))
        unaccounted += int(cards[0]["park_host_bytes"])
        daemon.stop()
        ends_by_reason = _ends(audit, counts.regions)
    return {
        "minutes": minutes,
        "did": dict(sorted(counts.did.items())),
        "wrong": counts.wrong,
        "surprises": counts.surprises,
        "leases_left": leftovers,
        "unaccounted_bytes": unaccounted,
        "granted": len(ends_by_reason),
        "ends_per_lease": sorted(set(ends_by_reason.values())),
    }


def is_calm(report: dict[str, Any]) -> bool:
    """Return whether nothing was wrong, no byte is missing, and each lease ended once."""
    has_happened = report["did"].get("parked", 0) > 0 and report["did"].get("checks", 0) > 0
    is_whole = not (report["wrong"] or report["surprises"] or report["leases_left"] or report["unaccounted_bytes"])
    return has_happened and is_whole and report["ends_per_lease"] == [1]


@contextlib.contextmanager
def _small_daemon(driver: str, log: LogLine) -> Iterator[tuple[PrivateDaemon, str, str]]:
    """Start a daemon with cards of HELD slices; yields it, its driver, and its audit log's folder."""
    log("what a lease is charged")
    with killable_daemon(driver) as daemon:
        driver = first_card(daemon.address)["driver"]
        size_bytes = slice_bytes(driver)
        with GpuBuilder(daemon.address).min_vram(size_bytes).parkable().acquire():
            card_list = cards_of(ask(Opcode.GET_INVENTORY, Empty(), daemon.address))
            over_bytes = sum(int(card["held_bytes"]) for card in card_list) - size_bytes
    cards = CPU_CARDS if driver == "cpu" else len(card_list)
    vram_bytes = TENANTS * over_bytes + max(1, HELD // cards) * size_bytes + size_bytes // 2
    with contextlib.ExitStack() as stack:
        # Host memory for most of the tenants, so that the host is full at times.
        parked = _SETTINGS.format(park_memory=(TENANTS - 2) * (size_bytes + (2 << 20)), audit="FOLDER/audit")
        # Real cards share one limit; the embedded driver makes a card for each size.
        vram = (str(vram_bytes),) * (cards if driver == "cpu" else 1)
        daemon = stack.enter_context(killable_daemon(driver, vram=vram, settings=parked))
        yield daemon, driver, str(daemon.folder / "audit")


def _end_everything(address: str, counts: StormCounts) -> int:
    """Revoke the leases that tenants left behind, and wait for their ends; return how many leases are left."""
    until = time.monotonic() + PATIENCE_S
    while (leases := _leases(address)) and time.monotonic() < until:
        for lease_id in leases:
            with contextlib.suppress(GpuLeaseError):
                ask(Opcode.LEASE_REVOKE, LeaseRevoke(lease_id, "the storm is over"), address)
                counts.did["left behind"] += 1
    return len(leases)


def _ends(folder: str, regions: set[str]) -> Counter[str]:
    """Return how often each granted lease of an audit log has ended, and each of these regions.

    A broker that was killed may have recorded the grant of a region in the audit log and not in its journal. No tenant
    has received such a region, and the next broker has no record of it.
    """
    command = [sys.executable, "-P", "-m", "gpulease.client.cli", "audit", "show", "--json", folder]
    shown = subprocess.run(command, capture_output=True, text=True, check=False)
    if shown.returncode:
        raise click.ClickException(f"the audit log can't be read: {shown.stderr.strip()}")
    granted: set[str] = set()
    ends_by_reason: Counter[str] = Counter()
    for line in shown.stdout.splitlines():
        record = json.loads(line)
        # If a killed daemon had recorded a grant, the next daemon adopts the lease.
        if record["kind"] in ("grant", "adopt"):
            if "parent" not in record["data"] or record["data"]["lease"] in regions:
                granted.add(record["data"]["lease"])
        elif record["kind"] == "end":
            ends_by_reason[record["data"]["lease"]] += 1
    return Counter({lease: ends_by_reason[lease] for lease in granted})


def storm_table(report: dict[str, Any]) -> str:
    """Lay out the report, with the verdict as the last line."""
    rows = [[name, str(count)] for name, count in report["did"].items()]
    names = ("wrong", "leases_left", "unaccounted_bytes", "granted", "ends_per_lease")
    rows += [[name.replace("_", " "), str(report[name])] for name in names]
    verdict = "sound" if is_calm(report) else "NOT SOUND"
    return "\n\n".join([table([f"a storm of {report['minutes']:g} minutes", ""], rows), *report["surprises"], verdict])
