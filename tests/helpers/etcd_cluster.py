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
"""A quota that some hundred writes of 16 KiB use up."""

FULL_BYTES: Final = 1
"""A quota that every member's data exceed."""


def need_etcd() -> None:
    """Skip the test, with a hint what to install, if etcd is not installed."""
    for program in ("etcd", "etcdctl"):
        if shutil.which(program) is None:
            pytest.skip(f"SKIPPED FOR WANT OF {program}: apt-get install etcd-server etcd-client")


@dataclass
class Member:
    """One member: where it listens, and its process."""

    name: str
    host: str
    client_port: int
    peer_port: int
    folder: Path
    within: tuple[str, ...] = ()
    """The command by which it is started elsewhere, such as in a network namespace."""
    quota_bytes: int | None = None
    """The size of its data that raises the alarm NOSPACE; None for etcd's own."""
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
    """A cluster of real members. Use it as a context: all its processes are gone afterwards.

    Attributes:
        folder: Data and logs; its processes have it in their environment, as `Daemon`'s have theirs.

    Args:
        folder: For data and logs.
        members: Number of members.
        authority: Issues the certificates that it presents to clients and requires of them; None for plain text.
        quota_bytes: Each member's quota.
        places: For each member the host it listens on and the command that starts it there; None for this one.
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
        # Members are started again, at the addresses that their clients know.
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
        """Start a member, on the data that it had; return without waiting for its answer."""
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
        """Kill a member as a lost host would, and reap it; nothing if it does not run."""
        if member.process is not None:
            member.process.kill()
            member.process.wait(60)
            member.process, member.is_paused = None, False

    def restart(self, member: Member) -> None:
        """Kill a member and start it on its data; return once it answers."""
        self.kill(member)
        self.start(member)
        self.wait_for(member)

    def fill(self, member: Member) -> None:
        """Leave one member no space for any write: it raises the alarm with the next, and no member writes any more."""
        member.quota_bytes = FULL_BYTES
        self.restart(member)

    def save(self, backup: Path) -> None:
        done = self._etcdctl(self.members[:1], "snapshot", "save", str(backup))
        assert done.returncode == 0, done.stdout + done.stderr

    def restore(self, backup: Path, command: str) -> None:
        """Put all members back to a backup, each by a shell command in its folder; return once they answer.

        The command finds the backup in backup.db and makes the data folder restored, for the member NAME at PEER of the
        cluster CLUSTER.
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
        """Give a member space again, and disarm the alarm."""
        member.quota_bytes = None
        self.restart(member)
        self.control("alarm", "disarm")

    def wait_for(self, member: Member) -> None:
        """Wait until a member answers, and knows a leader."""
        wait_until(lambda: self._ask(member, "get", "x"), f"{member.name} answers", START_LIMIT_S, seen=self._logs)

    def pause(self, member: Member) -> None:
        """Stop a member by SIGSTOP; its connections stay."""
        assert member.process is not None
        stop_process(member.process.pid)
        member.is_paused = True

    def resume(self, member: Member) -> None:
        assert member.process is not None
        os.kill(member.process.pid, signal.SIGCONT)
        member.is_paused = False

    def leader(self) -> Member:
        """The member that leads, by what the others say; waits until one does."""
        leader = wait_until(self._leader, "a leader is elected", START_LIMIT_S, seen=self._logs)
        assert leader is not None
        return leader

    def follower(self) -> Member:
        leader = self.leader()
        return next(member for member in self.members if member is not leader)

    def compact(self, revision: int) -> None:
        self.control("compaction", "--physical=true", str(revision))

    def control(self, *words: str) -> str:
        """What etcdctl says; asserts that it has done it."""
        done = self.try_control(*words)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    def try_control(self, *words: str) -> subprocess.CompletedProcess[str]:
        """Run etcdctl; returns its status and output."""
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
        """What one member says: "" for a failure, and a blank more than etcdctl says."""
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
    """Run a shell command in a folder; asserts that it succeeds."""
    words = ["bash", "-euo", "pipefail", "-c", command]
    environment = os.environ | {"ETCDCTL_API": "3"} | variables
    done = subprocess.run(words, cwd=folder, env=environment, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, f"{command}\n{done.stdout}{done.stderr}"


def issued_tenant(authority: PkiAuthority, name: str) -> Issued:
    """A client's certificate of that name: made by the first call, and found again by others."""
    issued = Issued(authority.folder / f"tenant-{name}.pem", authority.folder / f"tenant-{name}.key")
    return issued if issued.certificate.exists() else authority.issue_tenant(name)
