"""A fleet in network namespaces, tenants that claim its names, and faults that cut off, stop and kill nodes.

Other faults copy a node's host, or restore an earlier state of a node's journal or of etcd.
"""

import contextlib
import json
import os
import random
import re
import shutil
import signal
import stat
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack
from datetime import datetime
from functools import partial
from itertools import cycle
from pathlib import Path
from typing import Any, Final

from gpulease.daemon.fleet.records.fleet_records import GENERATION
from helpers.broken_fleet import FOREVER_NS, Design
from helpers.daemon import Faults, python_environment
from helpers.etcd_cluster import EtcdCluster, need_etcd
from helpers.fleet_checker import Act, Claim, History, HorizonSet, Served, capped
from helpers.fleet_manual import restore_commands
from helpers.fleet_rig import FLEET_PROCESS, FleetNode
from helpers.network_namespaces import Network
from helpers.processes import continue_process, stop_process
from helpers.scaled_clock import ScaledClock
from helpers.small_disk import SmallDisk
from helpers.waiting import wait_until

HORIZON_S: Final = 4
RHO: Final = 0.01
MEMBERS: Final = ("m0", "m1", "m2")
NODES: Final = tuple(f"d{number}" for number in range(int(os.environ.get("GPULEASE_NEMESIS_NODES", "3"))))
FASTER_PPM: Final = (0, -4_500, 4_500)
"""By how many millionths the nodes' clocks are faster than the host's, in turn: nearly as much as a fleet tolerates."""

ONLOOKER: Final = "o0"
"""A host that is never cut off, from which etcd is read."""

NAMES: Final = ("alpha", "beta", "gamma", "delta")
TENANTS: Final = 2
CLONES: Final = "c0"
"""The host on which a copy of a node runs."""

CLONE_UP_S: Final = 1_000_000
"""By how many seconds the clocks of that host are ahead. This distinguishes its beats from those of the node."""

HOLD_S: Final = 5.0
FAULT_S: Final = (0.5, 2.5 * HORIZON_S)
"""Shortest and longest fault in seconds: some end within a horizon, some last longer than fence and wait."""

CALM_S: Final = (0.0, 1.5 * HORIZON_S)
ALLOWED: Final = ("fleet", "zygote", "overdue", "hung", "died", "stopped", "killed", "journal", "No space left")
"""Words in errors that daemons may log because of the faults."""

WORKER: Final = re.compile(r"gpul-[0-9a-f]{10}")
"""The names of workers, which the kernel truncates to 15 bytes."""

_BEGUN: Final = "lease.granted"
_ENDED: Final = ("lease.reclaimed", "lease.fenced")

Fault = Callable[[], AbstractContextManager[None]]


class FleetScene:
    """Three members of etcd and some nodes, each on a separate host, and two tenants in separate processes.

    Args:
        horizon_s: The horizon of all nodes, in seconds.
        nodes: The nodes' ids.
        design: The rules that the nodes follow.
        faster_ppm: By how many millionths the nodes' clocks are faster than the host's, in turn.

    Attributes:
        clocks: The nodes' clocks.
        clones: Copies of the nodes' hosts, by node; most do not run.
        faults: Number of faults by kind.
    """

    def __init__(
        self,
        folder: Path,
        horizon_s: int = HORIZON_S,
        nodes: Sequence[str] = NODES,
        design: Design = Design.RULES,
        faster_ppm: Sequence[int] = FASTER_PPM,
    ) -> None:
        need_etcd()
        self._folder = folder
        self._horizon_s = horizon_s
        self._design = design
        self._stack = ExitStack()
        self._tenants: dict[int, subprocess.Popen[bytes]] = {}
        self._disks: dict[str, SmallDisk] = {}
        self.clocks = {node: ScaledClock(folder, ppm) for node, ppm in zip(nodes, cycle(faster_ppm), strict=False)}
        self.nodes: dict[str, FleetNode] = {}
        self.clones: dict[str, FleetNode] = {}
        self._began_ns = time.clock_gettime_ns(time.CLOCK_BOOTTIME)
        self._clones_died_ns: list[int] = []
        self._restored: list[dict[str, Any]] = []
        """Changes in stores that were replaced by a backup."""
        self.faults: Counter[str] = Counter()

    def __enter__(self) -> "FleetScene":
        with ExitStack() as stack:
            self.network = stack.enter_context(Network((*MEMBERS, *self.clocks, ONLOOKER, CLONES)))
            places = [(self.network.address(member), self.network.within(member)) for member in MEMBERS]
            self.cluster = stack.enter_context(EtcdCluster(self._folder, len(MEMBERS), places=places))
            # Without this key, the first node would wait for a horizon, because the store may have been lost.
            self.cluster.control("put", GENERATION.decode(), "made by the test")
            for name in self.clocks:
                self._add(name, stack)
            for node in self.nodes.values():
                node.wait_until_joined()
            stack.callback(self.stop_tenants)
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self.network.heal()
        self._stack.close()

    # --- tenants ---

    def start_tenants(self) -> None:
        """Start tenants that request all names from all nodes."""
        for number in range(TENANTS):
            self.start_tenant(number)

    def start_tenant(
        self, number: int, names: Sequence[str] = NAMES, nodes: Sequence[str] = (), hold_s: float = HOLD_S
    ) -> None:
        """Start a tenant that requests names from `nodes`, by default from all, and holds each for at most `hold_s`."""
        hosts = self.nodes | {clone_of(name): clone for name, clone in self.clones.items()}
        addresses = [f"{name}={hosts[name].address}" for name in nodes or hosts]
        command = [sys.executable, "-P", "-m", "helpers.fleet_tenant", str(self._folder / f"acts-{number}")]
        self._tenants[number] = subprocess.Popen(
            [*command, str(number), str(hold_s), ",".join(names), *addresses],
            stdin=subprocess.DEVNULL,
            env=python_environment(),
        )

    def stop_tenants(self) -> None:
        """Let all tenants free their leases and end. Tenants that do not end are killed."""
        for tenant in self._tenants.values():
            tenant.send_signal(signal.SIGCONT)
            tenant.terminate()
        for tenant in self._tenants.values():
            try:
                tenant.wait(60)
            except subprocess.TimeoutExpired:
                tenant.kill()
                tenant.wait(60)
        self._tenants.clear()

    # --- faults: each lasts as long as its block ---

    @contextlib.contextmanager
    def cut(self, ones: Sequence[str], others: Sequence[str], *, one_way: bool = False) -> Iterator[None]:
        (self.network.cut_one_way if one_way else self.network.cut)(ones, others)
        yield
        self.network.heal()

    @contextlib.contextmanager
    def unplugged(self, host: str) -> Iterator[None]:
        self.network.cut_off(host)
        yield
        self.network.heal()

    @contextlib.contextmanager
    def stopped(self, pid: int) -> Iterator[None]:
        """Stop a process with SIGSTOP, if it exists."""
        with contextlib.suppress(ProcessLookupError):
            stop_process(pid)
        yield
        continue_process(pid)

    @contextlib.contextmanager
    def member_killed(self, is_leader: bool) -> Iterator[None]:
        """Kill a member of etcd, and start it again."""
        member = self.cluster.leader() if is_leader else self.cluster.follower()
        self.cluster.kill(member)
        yield
        self.cluster.restart(member)

    @contextlib.contextmanager
    def member_stopped(self, is_leader: bool) -> Iterator[None]:
        """Stop a member of etcd with SIGSTOP. Its connections stay open."""
        member = self.cluster.leader() if is_leader else self.cluster.follower()
        self.cluster.pause(member)
        yield
        self.cluster.resume(member)

    @contextlib.contextmanager
    def daemon_killed(self, name: str) -> Iterator[None]:
        """Kill a node's daemon, and start another in its place."""
        self.nodes[name].kill()
        yield
        self._start(self.nodes[name])

    @contextlib.contextmanager
    def tenant_killed(self, number: int) -> Iterator[None]:
        """Kill a tenant; another one takes its place."""
        self._tenants[number].kill()
        self._tenants[number].wait(60)
        yield
        self.start_tenant(number)

    @contextlib.contextmanager
    def killed(self, pid: int) -> Iterator[None]:
        """Kill a process. Its daemon starts it again."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
        yield

    @contextlib.contextmanager
    def member_full(self) -> Iterator[None]:
        """Fill the space of a member of etcd, so that no member accepts writes."""
        member = self.cluster.follower()
        self.cluster.fill(member)
        yield
        self.cluster.make_room(member)

    @contextlib.contextmanager
    def disk_full(self, name: str) -> Iterator[None]:
        """Fill the disk with a node's journal."""
        self._disks[name].fill()
        yield
        self._disks[name].free()

    @contextlib.contextmanager
    def host_cloned(self, name: str) -> Iterator[None]:
        """Run a copy of a node's host, with another boot id. At the end, all of its processes are killed together."""
        clone = self.clones[name]
        shutil.rmtree(clone.state, ignore_errors=True)
        self._copy_state(name, clone.state)
        clone.start().allowed_trouble += ALLOWED
        yield
        self._lose_clone(clone)
        self._clones_died_ns.append(time.clock_gettime_ns(time.CLOCK_BOOTTIME))

    @contextlib.contextmanager
    def state_rolled_back(self, name: str) -> Iterator[None]:
        """Kill a node's daemon, and start another on an earlier copy of its journal."""
        node, older = self.nodes[name], self._folder / f"older-{name}"
        self._copy_state(name, older)
        yield
        node.kill()
        for path in node.state.rglob("*"):
            if path.is_file():
                path.unlink()
        shutil.copytree(older, node.state, dirs_exist_ok=True)
        shutil.rmtree(older)
        self._start(node)

    @contextlib.contextmanager
    def etcd_restored(self) -> Iterator[None]:
        """Restore etcd from a backup as in the manual: no node reaches etcd before its generation is renewed."""
        backup, (restore, _) = self._folder / "backup.db", restore_commands()
        self.cluster.save(backup)
        yield
        with self.cut([*self.clocks, CLONES], MEMBERS):
            # No node can send a beat now, so these are all beats before the restore.
            self._restored += self._changes("/gpulease/v1/nodes/")
            self.cluster.restore(backup, restore)
            self.cluster.control("put", GENERATION.decode(), f"restored at {time.time_ns()}")
        backup.unlink()

    def _copy_state(self, name: str, to: Path) -> None:
        """Copy a node's journal while its daemon is stopped. Sockets are left out."""
        node = self.nodes[name]
        with self.stopped(node.now.process.pid):
            shutil.copytree(node.state, to, ignore=_sockets)

    @staticmethod
    def _lose_clone(clone: FleetNode) -> None:
        """Kill all processes of a copy's host."""
        while left := clone.processes():
            for info in left:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(info.pid, signal.SIGKILL)
            time.sleep(0.01)
        clone.kill()

    def draw(self, dice: random.Random) -> list[tuple[str, Fault]]:
        """Draw one fault, or two that affect different parts. Returns them with their names, in order of beginning."""
        node = self.nodes[dice.choice(sorted(self.nodes))]
        # Cuts begin last and end first, because processes that are started again must find their peers.
        parts = [
            self._histories(node.node_id),
            self._faults_of_processes(node, dice),
            self._faults_of_etcd(),
            self._cuts(node.node_id),
        ]
        drawn = sorted(dice.sample(range(len(parts)), dice.choice((1, 2))))
        return [dice.choice(sorted(parts[number].items(), key=lambda each: each[0])) for number in drawn]

    def _histories(self, node: str) -> dict[str, Fault]:
        return {
            "host cloned": lambda: self.host_cloned(node),
            "state rolled back": lambda: self.state_rolled_back(node),
            "etcd restored": self.etcd_restored,
        }

    def _cuts(self, node: str) -> dict[str, Fault]:
        leader = self.cluster.leader().name
        followers = [member for member in MEMBERS if member != leader]
        return {
            "node cut from etcd": lambda: self.cut([node], MEMBERS),
            "node hears nothing": lambda: self.cut(MEMBERS, [node], one_way=True),
            "node is not heard": lambda: self.cut([node], MEMBERS, one_way=True),
            "node cut from leader": lambda: self.cut([node], [leader]),
            "node unplugged": lambda: self.unplugged(node),
            "leader cut": lambda: self.cut([leader], followers),
            "leader is not heard": lambda: self.cut([leader], followers, one_way=True),
            "member unplugged": lambda: self.unplugged(followers[0]),
            "all members cut": lambda: self.cut(MEMBERS, MEMBERS),
        }

    def _faults_of_etcd(self) -> dict[str, Fault]:
        return {
            "leader stopped": lambda: self.member_stopped(is_leader=True),
            "leader killed": lambda: self.member_killed(is_leader=True),
            "member stopped": lambda: self.member_stopped(is_leader=False),
            "member killed": lambda: self.member_killed(is_leader=False),
            "etcd has no space": self.member_full,
        }

    def _faults_of_processes(self, node: FleetNode, dice: random.Random) -> dict[str, Fault]:
        """Return the faults of a node's processes, of its disk, and of a tenant."""
        tenant, processes = dice.randrange(TENANTS), node.workers()
        faults: dict[str, Fault] = {
            "daemon stopped": lambda: self.stopped(node.now.process.pid),
            "daemon killed": lambda: self.daemon_killed(node.node_id),
            "daemon's disk full": lambda: self.disk_full(node.node_id),
            "tenant stopped": lambda: self.stopped(self._tenants[tenant].pid),
            "tenant killed": lambda: self.tenant_killed(tenant),
        }
        workers = sorted(pid for name, pid in processes.items() if WORKER.fullmatch(name))
        pids = {"fleet process": processes.get(FLEET_PROCESS), "zygote": next(iter(node.zygotes()), None)}
        for name, pid in (pids | {"worker": dice.choice(workers) if workers else None}).items():
            if pid is not None:
                faults[f"{name} stopped"] = partial(self.stopped, pid)
                faults[f"{name} killed"] = partial(self.killed, pid)
        return faults

    def torment(self, for_s: float, dice: random.Random) -> None:
        """Cause one round of random faults after another for `for_s` seconds."""
        until_s = time.monotonic() + for_s
        while time.monotonic() < until_s:
            with ExitStack() as faults:
                for kind, fault in self.draw(dice):
                    faults.enter_context(fault())
                    self.faults[kind] += 1
                time.sleep(dice.uniform(*FAULT_S))
            time.sleep(dice.uniform(*CALM_S))

    # --- observations ---

    def settle(self) -> None:
        """End all faults, stop the tenants, and wait until no claim is left. A timeout is ignored."""
        self.network.heal()
        for node in self.nodes.values():
            node.wait_until_joined()
        self.stop_tenants()
        with contextlib.suppress(AssertionError):
            wait_until(lambda: not self.claims() and not any(self.live().values()), "all names are free")

    def claims(self) -> list[Claim]:
        latest = {change["key"]: change for change in self._changes("/gpulease/v1/names/")}
        records = {key: json.loads(change["value"]) for key, change in latest.items() if change["value"] is not None}
        return [
            Claim(key.rpartition("/")[2], record["node_id"], latest[key]["revision"]) for key, record in records.items()
        ]

    def beats(self) -> Counter[str]:
        """Return how often each node has written its record."""
        return Counter(change["key"].rpartition("/")[2] for change in self._changes("/gpulease/v1/nodes/"))

    def live(self) -> dict[str, dict[str, int]]:
        return {
            name: {lease["name"]: lease["epoch"] for lease in node.now.leases() if lease.get("name")}
            for name, node in self.nodes.items()
        }

    def acts(self) -> list[Act]:
        return [Act(**json.loads(line)) for path in self._folder.glob("acts-*") for line in _lines(path.read_text())]

    def logs(self) -> str:
        return "\n".join(node.logs() for node in self.nodes.values())

    def history(self) -> History:
        """Return all observations, by the host's clock. A beat sets a horizon even if its acknowledgement was lost."""
        horizons = tuple(self._horizons())
        served = [lease for name, node in self.nodes.items() for lease in served_by(name, node.logs(1 << 20))]
        for name, clone in self.clones.items():
            for lease in served_by(clone_of(name), clone.logs(1 << 20)):
                died_ns = min((died for died in self._clones_died_ns if died > lease.from_ns), default=lease.to_ns)
                served.append(lease._replace(to_ns=min(lease.to_ns, died_ns)))
        return History(
            tuple(capped(lease, horizons) for lease in served),
            tuple(self.acts()),
            horizons,
            tuple(self.claims()),
            self.live(),
        )

    def _horizons(self) -> Iterator[HorizonSet]:
        if not self._design.is_capped:
            yield from (HorizonSet(node, 0, FOREVER_NS) for node in self.nodes)
            return
        for change in self._restored + self._changes("/gpulease/v1/nodes/"):
            if change["value"] is not None:
                node = change["key"].rpartition("/")[2]
                beat_ns = json.loads(change["value"])["boot_ms"] * 1_000_000
                horizon_ns = beat_ns + int(self._horizon_s * (1 - RHO) * 1e9) + 1_000_000
                if beat_ns - self._began_ns > CLONE_UP_S * 10**9 // 2:
                    yield HorizonSet(clone_of(node), *(at - CLONE_UP_S * 10**9 for at in (beat_ns, horizon_ns)))
                else:
                    yield HorizonSet(node, *map(self.clocks[node].host_ns, (beat_ns, horizon_ns)))

    def _changes(self, prefix: str) -> list[dict[str, Any]]:
        """Return all changes of etcd's keys with a prefix, read on a host that can reach etcd."""
        path = self._folder / "changes"
        command = [sys.executable, "-P", "-m", "helpers.etcd_history", ",".join(self.cluster.endpoints), str(path)]
        subprocess.run(
            [*self.network.within(ONLOOKER), *command, prefix], check=True, timeout=60, env=python_environment()
        )
        return [json.loads(line) for line in _lines(path.read_text())]

    def _add(self, name: str, stack: ExitStack) -> None:
        """Start a node on its host, with a separate clock and disk."""
        disk = self._disks[name] = stack.enter_context(SmallDisk())
        within = (*self.network.within(name), *self.clocks[name].within())
        node = self.nodes[name] = FleetNode(
            self.cluster,
            name,
            within=within,
            log_format="json",
            state=disk.folder / "state",
            horizon_s=self._horizon_s,
            # The checker reads the whole history.
            history_s=0,
        )
        stack.callback(self._end, node)
        self._start(node)
        self.clones[name] = self._clone(name)
        stack.callback(self.clones[name].discard)

    def _clone(self, name: str) -> FleetNode:
        """Prepare to run a copy of a node on a host that was booted at another time."""
        boot_id = self._folder / "boot-id-of-clones"
        boot_id.write_text("c10cc10c-0000-4000-8000-000000000000\n")
        up = ["--monotonic", str(CLONE_UP_S), "--boottime", str(CLONE_UP_S)]
        booted = ["unshare", "--mount", "--time", *up, "--kill-child=SIGKILL", "sh", "-c"]
        script = f'mount --bind {boot_id} /proc/sys/kernel/random/boot_id && exec "$@"'
        return FleetNode(
            self.cluster,
            name,
            within=(*self.network.within(CLONES), *booted, script, "--"),
            log_format="json",
            horizon_s=self._horizon_s,
            history_s=0,
        )

    def _start(self, node: FleetNode) -> None:
        faults = None if self._design is Design.RULES else Faults(fleet_design=self._design.value)
        node.start(faults).allowed_trouble += ALLOWED

    def _end(self, node: FleetNode) -> None:
        # If a test has failed during a fault, end the fault now.
        self._disks[node.node_id].free()
        if node.now.process.poll() is None:
            os.kill(node.now.process.pid, signal.SIGCONT)
        else:
            self._start(node)
        node.stop()


def clone_of(node: str) -> str:
    return f"clone of {node}"


def _sockets(folder: str, names: list[str]) -> list[str]:
    """Return the names of sockets, which `shutil.copytree` can't copy."""
    return [name for name in names if stat.S_ISSOCK(os.lstat(f"{folder}/{name}").st_mode)]


def served_by(node: str, log: str) -> Iterator[Served]:
    """Yield the named leases in a node's log, from their grant until their memory was free. Others never end."""
    offset_ns = time.time_ns() - time.clock_gettime_ns(time.CLOCK_BOOTTIME)
    records = [json.loads(line) for line in log.splitlines() if line.startswith("{")]
    # Use the first end of a lease: a daemon with an earlier state of its journal ends the lease once more.
    ends = {each["lease_id"]: _time_ns(each) - offset_ns for each in reversed(records) if each["event"] in _ENDED}
    for record in records:
        if record["event"] == _BEGUN and record.get("name"):
            begun_ns, end_ns = _time_ns(record) - offset_ns, ends.get(record["lease_id"], 1 << 63)
            yield Served(record["name"], node, record["epoch"], begun_ns, end_ns)


def _time_ns(record: dict[str, Any]) -> int:
    return int(datetime.fromisoformat(record["time"]).timestamp() * 1e9)


def _lines(text: str) -> list[str]:
    """Return the complete lines. A process may be writing another one."""
    return text.split("\n")[:-1]
