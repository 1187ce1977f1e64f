"""A fleet in network namespaces, tenants who want its names, and a nemesis that cuts, stops and kills any of them."""

import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack
from datetime import datetime
from pathlib import Path
from typing import Any, Final

from helpers.daemon import python_environment
from helpers.etcd_cluster import EtcdCluster, need_etcd
from helpers.fleet_checker import Act, Claim, History, HorizonSet, Served, capped
from helpers.fleet_rig import FleetNode
from helpers.network_namespaces import Network
from helpers.waiting import wait_until

HORIZON_S: Final = 4
RHO: Final = 0.01
MEMBERS: Final = ("m0", "m1", "m2")
NODES: Final = ("d0", "d1", "d2")
ONLOOKER: Final = "o0"
"""A host that is never cut off, from which etcd is read."""

NAMES: Final = ("alpha", "beta", "gamma", "delta")
TENANTS: Final = 2
HOLD_S: Final = 5.0
FAULT_S: Final = (0.5, 2.5 * HORIZON_S)
"""Length of a fault: some pass within a horizon, some outlast fence and wait."""

CALM_S: Final = (0.0, 1.5 * HORIZON_S)
ALLOWED: Final = ("fleet", "zygote", "overdue", "hung", "died", "stopped", "killed")
"""Words of the errors that the nemesis makes the daemons log."""

_BEGUN: Final = "lease.granted"
_ENDED: Final = ("lease.reclaimed", "lease.fenced")


class FleetScene:
    """Three members of etcd, three nodes and two tenants, each on a host or in a process of its own.

    Args:
        horizon_s: All nodes' horizon.
    """

    def __init__(self, folder: Path, horizon_s: int = HORIZON_S) -> None:
        need_etcd()
        self._folder = folder
        self._horizon_s = horizon_s
        self._stack = ExitStack()
        self._tenants: dict[int, subprocess.Popen[bytes]] = {}
        self.nodes: dict[str, FleetNode] = {}
        self.faults: Counter[str] = Counter()

    def __enter__(self) -> "FleetScene":
        with ExitStack() as stack:
            self.network = stack.enter_context(Network((*MEMBERS, *NODES, ONLOOKER)))
            places = [(self.network.address(member), self.network.within(member)) for member in MEMBERS]
            self.cluster = stack.enter_context(EtcdCluster(self._folder, len(MEMBERS), places=places))
            for name in NODES:
                within = self.network.within(name)
                node = FleetNode(self.cluster, name, within=within, log_format="json", horizon_s=self._horizon_s)
                self.nodes[name] = node
                stack.callback(self._end, node)
                self._start(node)
            for node in self.nodes.values():
                node.wait_until_joined()
            stack.callback(self.stop_tenants)
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self.network.heal()
        self._stack.close()

    # --- tenants ---

    def start_tenants(self, names: Sequence[str] = NAMES, nodes: Sequence[str] = NODES) -> None:
        """Have tenants want all these names from these nodes."""
        for number in range(TENANTS):
            self.start_tenant(number, names, nodes)

    def start_tenant(
        self, number: int, names: Sequence[str] = NAMES, nodes: Sequence[str] = NODES, hold_s: float = HOLD_S
    ) -> None:
        """Start one tenant, who holds a name for at most so long at a time."""
        addresses = [f"{name}={self.nodes[name].address}" for name in nodes]
        command = [sys.executable, "-P", "-m", "helpers.fleet_tenant", str(self._folder / f"acts-{number}")]
        self._tenants[number] = subprocess.Popen(
            [*command, str(number), str(hold_s), ",".join(names), *addresses],
            stdin=subprocess.DEVNULL,
            env=python_environment(),
        )

    def stop_tenants(self) -> None:
        """Have all tenants give their leases back; whoever does not end is killed."""
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
        """Cut hosts off from others."""
        (self.network.cut_one_way if one_way else self.network.cut)(ones, others)
        yield
        self.network.heal()

    @contextlib.contextmanager
    def unplugged(self, host: str) -> Iterator[None]:
        """Pull a host's plug."""
        self.network.cut_off(host)
        yield
        self.network.heal()

    @contextlib.contextmanager
    def stopped(self, pid: int) -> Iterator[None]:
        """Stop a process by SIGSTOP, if it is there."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGSTOP)
        yield
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)

    @contextlib.contextmanager
    def member_killed(self, is_leader: bool) -> Iterator[None]:
        """Kill a member of etcd, and start it again."""
        member = self.cluster.leader() if is_leader else self.cluster.follower()
        self.cluster.kill(member)
        yield
        self.cluster.restart(member)

    @contextlib.contextmanager
    def member_stopped(self, is_leader: bool) -> Iterator[None]:
        """Stop a member of etcd; its connections stay."""
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
        """Kill a tenant; another comes."""
        self._tenants[number].kill()
        self._tenants[number].wait(60)
        yield
        self.start_tenant(number)

    @contextlib.contextmanager
    def killed(self, pid: int) -> Iterator[None]:
        """Kill a process that its daemon starts again."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
        yield

    def fault(self, dice: random.Random) -> tuple[str, AbstractContextManager[None]]:
        """One fault by chance, with its name."""
        name = dice.choice(NODES)
        node = self.nodes[name]
        leader = self.cluster.leader().name
        followers = [member for member in MEMBERS if member != leader]
        fleet_pid, zygote_pid = node.workers().get("gpul-fleet", 0), next(iter(node.zygotes()), 0)
        makers: dict[str, Callable[[], AbstractContextManager[None]]] = {
            "node cut from etcd": lambda: self.cut([name], MEMBERS),
            "node hears nothing": lambda: self.cut(MEMBERS, [name], one_way=True),
            "node is not heard": lambda: self.cut([name], MEMBERS, one_way=True),
            "node cut from leader": lambda: self.cut([name], [leader]),
            "node unplugged": lambda: self.unplugged(name),
            "leader cut": lambda: self.cut([leader], followers),
            "leader is not heard": lambda: self.cut([leader], followers, one_way=True),
            "member unplugged": lambda: self.unplugged(followers[0]),
            "all members cut": lambda: self.cut(MEMBERS, MEMBERS),
            "leader stopped": lambda: self.member_stopped(is_leader=True),
            "leader killed": lambda: self.member_killed(is_leader=True),
            "member stopped": lambda: self.member_stopped(is_leader=False),
            "member killed": lambda: self.member_killed(is_leader=False),
            "daemon stopped": lambda: self.stopped(node.now.process.pid),
            "daemon killed": lambda: self.daemon_killed(name),
            "tenant stopped": lambda: self.stopped(self._tenants[dice.randrange(TENANTS)].pid),
            "tenant killed": lambda: self.tenant_killed(dice.randrange(TENANTS)),
        }
        if fleet_pid:
            makers["fleet process stopped"] = lambda: self.stopped(fleet_pid)
            makers["fleet process killed"] = lambda: self.killed(fleet_pid)
        if zygote_pid:
            makers["zygote stopped"] = lambda: self.stopped(zygote_pid)
            makers["zygote killed"] = lambda: self.killed(zygote_pid)
        kind = dice.choice(sorted(makers))
        return kind, makers[kind]()

    def torment(self, for_s: float, dice: random.Random) -> None:
        """Let faults come and go, one at a time, for so many seconds."""
        until_s = time.monotonic() + for_s
        while time.monotonic() < until_s:
            kind, fault = self.fault(dice)
            with fault:
                time.sleep(dice.uniform(*FAULT_S))
            self.faults[kind] += 1
            time.sleep(dice.uniform(*CALM_S))

    # --- what was seen ---

    def settle(self) -> None:
        """Heal everything, have the tenants leave, and wait until no claim is left, if that ever is."""
        self.network.heal()
        for node in self.nodes.values():
            node.wait_until_joined()
        self.stop_tenants()
        with contextlib.suppress(AssertionError):
            wait_until(lambda: not self.claims() and not any(self.live().values()), "all names are free")

    def claims(self) -> list[Claim]:
        """The claims that etcd has."""
        latest = {change["key"]: change for change in self._changes("/gpulease/v1/names/")}
        records = {key: json.loads(change["value"]) for key, change in latest.items() if change["value"] is not None}
        return [
            Claim(key.rpartition("/")[2], record["node_id"], latest[key]["revision"]) for key, record in records.items()
        ]

    def live(self) -> dict[str, dict[str, int]]:
        """The named leases that the nodes have."""
        return {
            name: {lease["name"]: lease["epoch"] for lease in node.now.leases() if lease.get("name")}
            for name, node in self.nodes.items()
        }

    def history(self) -> History:
        """All that was seen, in one clock. A beat counts as a horizon even if its answer was lost."""
        horizons = tuple(
            HorizonSet(node, boot_ns, boot_ns + int(self._horizon_s * (1 - RHO) * 1e9) + 1_000_000)
            for change in self._changes("/gpulease/v1/nodes/")
            if change["value"] is not None
            for node, boot_ns in [
                (change["key"].rpartition("/")[2], json.loads(change["value"])["boot_ms"] * 1_000_000)
            ]
        )
        acts = [Act(**json.loads(line)) for path in self._folder.glob("acts-*") for line in _lines(path.read_text())]
        served = tuple(
            capped(lease, horizons)
            for name, node in self.nodes.items()
            for lease in served_by(name, node.logs(1 << 20))
        )
        return History(served, tuple(acts), horizons, tuple(self.claims()), self.live())

    def _changes(self, prefix: str) -> list[dict[str, Any]]:
        """All changes of etcd's keys with a prefix, read where etcd is reached."""
        path = self._folder / "changes"
        command = [sys.executable, "-P", "-m", "helpers.etcd_history", ",".join(self.cluster.endpoints), str(path)]
        subprocess.run(
            [*self.network.within(ONLOOKER), *command, prefix], check=True, timeout=60, env=python_environment()
        )
        return [json.loads(line) for line in _lines(path.read_text())]

    def _start(self, node: FleetNode) -> None:
        node.start().allowed_trouble += ALLOWED

    def _end(self, node: FleetNode) -> None:
        if node.now.process.poll() is None:
            os.kill(node.now.process.pid, signal.SIGCONT)
        else:
            self._start(node)
        node.stop()


def served_by(node: str, log: str) -> Iterator[Served]:
    """The named leases of a node's log, of all its daemons, until their memory was free, or for ever."""
    offset_ns = time.time_ns() - time.clock_gettime_ns(time.CLOCK_BOOTTIME)
    records = [json.loads(line) for line in log.splitlines() if line.startswith("{")]
    ends = {each["lease_id"]: _time_ns(each) - offset_ns for each in records if each["event"] in _ENDED}
    for record in records:
        if record["event"] == _BEGUN and record.get("name"):
            begun_ns, end_ns = _time_ns(record) - offset_ns, ends.get(record["lease_id"], 1 << 63)
            yield Served(record["name"], node, record["epoch"], begun_ns, end_ns)


def _time_ns(record: dict[str, Any]) -> int:
    return int(datetime.fromisoformat(record["time"]).timestamp() * 1e9)


def _lines(text: str) -> list[str]:
    """Whole lines: a process may be writing one more."""
    return text.split("\n")[:-1]
