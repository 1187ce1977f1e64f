"""Real etcd servers: one member or several, on free loopback ports, with their data in a temporary folder."""

import os
import shutil
import signal
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import pytest

from gpulease.daemon.remote.pki.certificates import Issued, PkiAuthority
from helpers.daemon import FOLDER
from helpers.free_ports import HeldPorts
from helpers.processes import stop_process
from helpers.waiting import wait_until

START_LIMIT_S: Final = 60.0

SMALLEST_QUOTA_BYTES: Final = 1 << 20
"""The smallest quota that tests set; some hundred writes of 16 KiB use it up."""

FULL_BYTES: Final = 1
"""A quota that the data of every member exceeds."""


def need_etcd() -> None:
    """Skip the test, with a hint on what to install, if etcd is not installed."""
    for program in ("etcd", "etcdctl"):
        if shutil.which(program) is None:
            pytest.skip(f"SKIPPED FOR WANT OF {program}: apt-get install etcd-server etcd-client")


@dataclass
class Member:
    """One member: its addresses, and its process."""

    name: str
    host: str
    client_port: int
    peer_port: int
    folder: Path
    within: tuple[str, ...] = ()
    """A command that starts it elsewhere, for example in a network namespace."""
    quota_bytes: int | None = None
    """The size of its data at which it raises the alarm NOSPACE; None for etcd's default."""
    process: subprocess.Popen[bytes] | None = None
    is_paused: bool = field(default=False, init=False)

    @property
    def endpoint(self) -> str:
        return f"{self.host}:{self.client_port}"

    @property
    def log(self) -> str:
        path = self.folder / "log"
        return path.read_text(errors="replace")[-4_000:] if path.exists() else ""


class EtcdCluster:
    """A cluster of real members. Use it as a context manager: afterwards all its processes have ended.

    Attributes:
        folder: Data and logs. The processes have this path in their environment, like those of `Daemon`.

    Args:
        folder: For data and logs.
        members: Number of members.
        authority: Issues the members' certificates, and clients must have a certificate from it; None for plain text.
        quota_bytes: Each member's quota.
        places: For each member, the host that it listens on and the command that starts it there; None for this host.
    """

    def __init__(
        self,
        folder: Path,
        members: int = 1,
        *,
        authority: PkiAuthority | None = None,
        quota_bytes: int | None = None,
        places: Sequence[tuple[str, tuple[str, ...]]] | None = None,
    ) -> None:
        need_etcd()
        self.folder = folder
        self._authority = authority
        self._server = authority.issue_server(["127.0.0.1", "localhost"]) if authority is not None else None
        # Members that are restarted must get the same ports, because clients know the addresses.
        self._held = HeldPorts(2 * members)
        ports = self._held.ports
        self.members = []
        for number in range(members):
            host, within = places[number] if places is not None else ("127.0.0.1", ())
            name = f"m{number}"
            (folder / name).mkdir(parents=True)
            where = host, ports[2 * number], ports[2 * number + 1], folder / name, within
            self.members.append(Member(name, *where, quota_bytes))

    @property
    def endpoints(self) -> tuple[str, ...]:
        return tuple(member.endpoint for member in self.members)

    def __enter__(self) -> "EtcdCluster":
        try:
            for member in self.members:
                self.start(member)
            wait_until(self._answers, "a majority of etcd answers", START_LIMIT_S, seen=self._logs)
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        for member in self.members:
            self.kill(member)
        self._held.close()

    def start(self, member: Member) -> None:
        """Start a member on its existing data. Returns before the member answers."""
        scheme = "http" if self._authority is None else "https"
        peers = ",".join(f"{other.name}=http://{other.host}:{other.peer_port}" for other in self.members)
        words = ["etcd", "--name", member.name, "--data-dir", str(member.folder / "data"), "--logger", "zap"]
        words += ["--listen-client-urls", f"{scheme}://{member.endpoint}"]
        words += ["--advertise-client-urls", f"{scheme}://{member.endpoint}"]
        words += ["--listen-peer-urls", f"http://{member.host}:{member.peer_port}"]
        words += ["--initial-advertise-peer-urls", f"http://{member.host}:{member.peer_port}"]
        words += ["--initial-cluster", peers]
        if member.quota_bytes is not None:
            words += ["--quota-backend-bytes", str(member.quota_bytes)]
        if self._authority is not None and self._server is not None:
            words += ["--client-cert-auth", "--trusted-ca-file", str(self._authority.certificate_path)]
            words += ["--cert-file", str(self._server.certificate), "--key-file", str(self._server.key)]
        with (member.folder / "log").open("ab") as log:
            member.process = subprocess.Popen(
                [*member.within, *words],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=os.environ | {FOLDER: str(self.folder)},
            )

    def kill(self, member: Member) -> None:
        """Kill a member as if its host were lost, and reap it. Has no effect if it is not running."""
        if member.process is not None:
            member.process.kill()
            member.process.wait(60)
            member.process, member.is_paused = None, False

    def restart(self, member: Member) -> None:
        """Kill a member and start it on its data. Returns when it answers."""
        self.kill(member)
        self.start(member)
        self.wait_for(member)

    def fill(self, member: Member) -> None:
        """Leave one member no space. At the next write it raises an alarm, after which no member accepts writes."""
        member.quota_bytes = FULL_BYTES
        self.restart(member)

    def save(self, backup: Path) -> None:
        done = self._etcdctl(self.members[:1], "snapshot", "save", str(backup))
        assert done.returncode == 0, done.stdout + done.stderr

    def restore(self, backup: Path, command: str) -> None:
        """Restore all members from a backup, each with a shell command in its folder. Returns when they answer.

        The command reads the backup in backup.db, and writes the data folder `restored` for the member NAME, with the
        peer address PEER, of the cluster CLUSTER.
        """
        for member in self.members:
            self.kill(member)
        urls = {member.name: f"http://{member.host}:{member.peer_port}" for member in self.members}
        every_url = ",".join(f"{name}={url}" for name, url in urls.items())
        for member in self.members:
            shutil.copy(backup, member.folder / "backup.db")
            shutil.rmtree(member.folder / "data")
            run_shell(command, member.folder, NAME=member.name, PEER=urls[member.name], CLUSTER=every_url)
            (member.folder / "restored").rename(member.folder / "data")
            self.start(member)
        for member in self.members:
            self.wait_for(member)

    def make_room(self, member: Member) -> None:
        """Give a member space again, and clear the alarm."""
        member.quota_bytes = None
        self.restart(member)
        self.control("alarm", "disarm")

    def wait_for(self, member: Member) -> None:
        """Wait until a member answers and knows the leader."""
        wait_until(lambda: self._ask(member, "get", "x"), f"{member.name} answers", START_LIMIT_S, seen=self._logs)

    def pause(self, member: Member) -> None:
        """Stop a member with SIGSTOP. Its connections stay open."""
        assert member.process is not None
        stop_process(member.process.pid)
        member.is_paused = True

    def resume(self, member: Member) -> None:
        assert member.process is not None
        os.kill(member.process.pid, signal.SIGCONT)
        member.is_paused = False

    def leader(self) -> Member:
        """Wait until the members name a leader, and return it."""
        leader = wait_until(self._leader, "a leader is elected", START_LIMIT_S, seen=self._logs)
        assert leader is not None
        return leader

    def follower(self) -> Member:
        leader = self.leader()
        return next(member for member in self.members if member is not leader)

    def compact(self, revision: int) -> None:
        self.control("compaction", "--physical=true", str(revision))

    def control(self, *words: str) -> str:
        """Run etcdctl, and return its output. Fails if etcdctl fails."""
        done = self.try_control(*words)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    def try_control(self, *words: str) -> subprocess.CompletedProcess[str]:
        """Run etcdctl, and return its exit status and output."""
        return self._etcdctl([member for member in self.members if self._runs(member)], *words)

    def _leader(self) -> Member | None:
        for member in self.members:
            told = self._ask(member, "endpoint", "status") if self._runs(member) else ""
            if told and told.split(", ")[4] == "true":
                return member
        return None

    def _runs(self, member: Member) -> bool:
        return member.process is not None and member.process.poll() is None and not member.is_paused

    def _answers(self) -> bool:
        for member in self.members:
            assert member.process is not None
            assert member.process.poll() is None, member.log
        return all(self._ask(member, "get", "x") for member in self.members)

    def _ask(self, member: Member, *words: str) -> str:
        """Return etcdctl's output for one member, followed by a blank; "" if etcdctl fails."""
        done = self._etcdctl([member], "--command-timeout=1s", *words)
        return done.stdout + " " if done.returncode == 0 else ""

    def _etcdctl(self, members: Sequence[Member], *words: str) -> subprocess.CompletedProcess[str]:
        endpoints = ",".join(member.endpoint for member in members)
        command = [*members[0].within, "etcdctl", f"--endpoints={endpoints}", *self._tls_words(), *words]
        environment = os.environ | {"ETCDCTL_API": "3"}
        return subprocess.run(command, capture_output=True, text=True, check=False, env=environment, timeout=60)

    def _tls_words(self) -> list[str]:
        if self._authority is None:
            return []
        issued = issued_tenant(self._authority, "etcdctl")
        names = (f"--cert={issued.certificate}", f"--key={issued.key}", f"--cacert={self._authority.certificate_path}")
        return list(names)

    def _logs(self) -> str:
        return "\n".join(f"{member.name}: {member.log}" for member in self.members)


def run_shell(command: str, folder: Path, **variables: str) -> None:
    """Run a shell command in a folder. Fails if the command fails."""
    words = ["bash", "-euo", "pipefail", "-c", command]
    environment = os.environ | {"ETCDCTL_API": "3"} | variables
    done = subprocess.run(words, cwd=folder, env=environment, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, f"{command}\n{done.stdout}{done.stderr}"


def issued_tenant(authority: PkiAuthority, name: str) -> Issued:
    """Return a client certificate of that name. The first call issues it; later calls return the same one."""
    issued = Issued(authority.folder / f"tenant-{name}.pem", authority.folder / f"tenant-{name}.key")
    return issued if issued.certificate.exists() else authority.issue_tenant(name)
