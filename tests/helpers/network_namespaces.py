"""Simulated hosts on one machine: network namespaces on a bridge, with connections that can be cut (ip-netns(8)).

A cut between two hosts loses packets without an error, as on a real network, because they go to a hardware address that
does not exist. So each direction can be cut separately.
"""

import os
import subprocess
from collections.abc import Sequence
from itertools import count
from typing import Final

import pytest

NETWORK: Final = "10.77.0"
NOBODY: Final = "02:00:00:00:00:ff"

_NUMBERS = count()


def need_namespaces() -> None:
    """Skip the test, with the reason, if this process may not create network namespaces."""
    if os.geteuid() != 0:
        pytest.skip("SKIPPED FOR WANT OF NETWORK NAMESPACES: run as root")
    probe = f"gpl-{os.getpid()}-probe"
    try:
        made = subprocess.run(["ip", "netns", "add", probe], capture_output=True, text=True, check=False)
        linked = subprocess.run(
            ["ip", "-n", probe, "link", "add", "name", "gplbr", "type", "bridge"],
            capture_output=True,
            text=True,
            check=False,
        )
        subprocess.run(["ip", "netns", "del", probe], capture_output=True, check=False)
    except FileNotFoundError:
        pytest.skip("SKIPPED FOR WANT OF ip: apt-get install iproute2")
    if made.returncode or linked.returncode:
        pytest.skip(f"SKIPPED FOR WANT OF NETWORK NAMESPACES: {made.stderr or linked.stderr}")


class Network:
    """Hosts on one bridge. Use it as a context manager: afterwards no namespace is left.

    Args:
        hosts: The hosts' names. The first host has the address 10.77.0.1, the next one 10.77.0.2, and so on.
    """

    def __init__(self, hosts: Sequence[str]) -> None:
        need_namespaces()
        self.hosts = tuple(hosts)
        self._mark = f"gpl-{os.getpid()}-{next(_NUMBERS)}"
        self._cuts: set[tuple[str, str]] = set()
        self._down: set[str] = set()

    def __enter__(self) -> "Network":
        try:
            self._build()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        for host in (*self.hosts, "bridge"):
            subprocess.run(["ip", "netns", "del", self._space(host)], capture_output=True, check=False)

    def address(self, host: str) -> str:
        return f"{NETWORK}.{self.hosts.index(host) + 1}"

    def within(self, host: str) -> tuple[str, ...]:
        """Return a command that runs another command on that host. Both have the same process id."""
        # `ip netns exec` is not used, because it mounts another /sys, without cgroups.
        return ("nsenter", f"--net=/run/netns/{self._space(host)}")

    def cut_off(self, host: str) -> None:
        """Cut a host off from all others, in both directions."""
        self._run("-n", self._space("bridge"), "link", "set", host, "down")
        self._down.add(host)

    def cut(self, ones: Sequence[str], others: Sequence[str]) -> None:
        """Cut hosts off from others, in both directions."""
        self.cut_one_way(ones, others)
        self.cut_one_way(others, ones)

    def cut_one_way(self, senders: Sequence[str], receivers: Sequence[str]) -> None:
        """Lose everything that the senders send to the receivers, but nothing in the other direction."""
        for sender, receiver in ((one, other) for one in senders for other in receivers if one != other):
            self._neighbour(sender, receiver, NOBODY)
            self._cuts.add((sender, receiver))

    def heal(self) -> None:
        for sender, receiver in self._cuts:
            self._neighbour(sender, receiver, self._hardware(receiver))
        for host in self._down:
            self._run("-n", self._space("bridge"), "link", "set", host, "up")
        self._cuts.clear()
        self._down.clear()

    def _build(self) -> None:
        bridge = self._space("bridge")
        self._run("netns", "add", bridge)
        self._run("-n", bridge, "link", "add", "name", "gplbr", "type", "bridge")
        self._run("-n", bridge, "link", "set", "gplbr", "up")
        for host in self.hosts:
            space = self._space(host)
            self._run("netns", "add", space)
            self._run("-n", space, "link", "set", "lo", "up")
            ends = (
                "name",
                "eth0",
                "address",
                self._hardware(host),
                "type",
                "veth",
                "peer",
                "name",
                host,
                "netns",
                bridge,
            )
            self._run("-n", space, "link", "add", *ends)
            self._run("-n", space, "address", "add", f"{self.address(host)}/24", "dev", "eth0")
            self._run("-n", space, "link", "set", "eth0", "up")
            self._run("-n", bridge, "link", "set", host, "master", "gplbr", "up")
        for sender in self.hosts:
            for receiver in self.hosts:
                if sender != receiver:
                    # Enter the address now, so that no host has to resolve it after a cut.
                    self._neighbour(sender, receiver, self._hardware(receiver))

    def _neighbour(self, sender: str, receiver: str, hardware: str) -> None:
        words = (self.address(receiver), "lladdr", hardware, "nud", "permanent", "dev", "eth0")
        self._run("-n", self._space(sender), "neighbour", "replace", *words)

    def _hardware(self, host: str) -> str:
        return f"02:00:00:00:00:{self.hosts.index(host) + 1:02x}"

    def _space(self, host: str) -> str:
        return f"{self._mark}-{host}"

    def _run(self, *words: str) -> None:
        done = subprocess.run(["ip", *words], capture_output=True, text=True, check=False)
        assert done.returncode == 0, f"ip {' '.join(words)}: {done.stderr}"
