"""A host that systemd runs: this machine's files in namespaces of their own (systemd-nspawn(1)).

What it changes lies in an overlay that goes with it. Its init may filter no system calls (SYSTEMD_SECCOMP=0), because
the units' own filters are what is tried.
"""

import fcntl
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

import gpulease
from helpers.daemon import TESTS
from helpers.waiting import wait_until

BOOT_LIMIT_S: Final = 120.0
COMMAND_LIMIT_S: Final = 120
RESTART_LIMIT_S: Final = 120.0
PYTHON: Final = "/opt/gpulease-tests"
"""Where this Python and what it imports lie there: a unit sees nothing of /tmp."""

DROP_IN: Final = """
[Service]
Environment={environment}
ExecStart=
ExecStart={python} -P -m gpulease.daemon --config /etc/gpulease/gpuleased.toml
# The interpreter may lie in a home.
ProtectHome=read-only
WatchdogSec=5
"""


class BootedHost:
    def __init__(self, root: Path, process: "subprocess.Popen[bytes]", path: str) -> None:
        self._root, self._process = root, process
        # The second is where some hosts say that the driver's libraries lie.
        libraries = os.environ.get("LD_LIBRARY_PATH")
        self._environment = [f"PYTHONPATH={path}", *([f"LD_LIBRARY_PATH={libraries}"] if libraries else [])]
        self.python = f"{PYTHON}/venv/bin/python"

    def wait_until_it_runs(self) -> bool:
        def has_come_up() -> bool:
            if self._process.poll() is not None:
                return True
            return bool(self._init()) and self.said("systemctl", "is-system-running") in ("running", "degraded")

        wait_until(has_come_up, "systemd is up", BOOT_LIMIT_S)
        return self._process.poll() is None

    def install(self, **settings: str) -> None:
        """Do what `gpulease install-service --install` does and says, and set these."""
        self.do(self.python, "-P", "-m", "gpulease.client.cli.__main__", "install-service", "--install")
        folder = self._root / "etc/systemd/system/gpuleased.service.d"
        folder.mkdir()
        (folder / "test.conf").write_text(DROP_IN.format(environment=" ".join(self._environment), python=self.python))
        file = self._root / "etc/gpulease/gpuleased.toml"
        lines = file.read_text().splitlines()
        known = [line for line in lines if line.lstrip("#").partition(" = ")[0] not in settings]
        file.write_text("\n".join([*(f"{name} = {value}" for name, value in settings.items()), *known, ""]))
        self.do("systemd-sysusers")
        self.do("systemd-tmpfiles", "--create")
        self.do("systemctl", "daemon-reload")

    def do(self, *command: str) -> str:
        """What it prints; fails unless it ends well."""
        done = self._run(command)
        assert done.returncode == 0, f"{' '.join(command)}: {done.stdout}{done.stderr}{self.log()}"
        return done.stdout

    def said(self, *command: str) -> str:
        return self._run(command).stdout.strip()

    def shown(self, name: str) -> str:
        """A property of the daemon's unit (systemctl(1), "show")."""
        return self.said("systemctl", "show", "gpuleased.service", f"--property={name}", "--value")

    def leasing(self, other_than: str = "0") -> str:
        """The process id of the daemon, once one leases that is not `other_than`."""

        def is_there() -> bool:
            return self.shown("MainPID") not in (other_than, "0") and self.shown("StatusText").startswith("Leasing")

        wait_until(is_there, "the daemon leases", RESTART_LIMIT_S, seen=self.log)
        return self.shown("MainPID")

    def log(self) -> str:
        return self.said("journalctl", "--unit=gpuleased", "--no-pager", "--output=cat", "--lines=10")

    def start(self, *command: str) -> "subprocess.Popen[str]":
        """Start a program there and read its output."""
        return subprocess.Popen(
            self._inside(command), stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )

    def _run(self, command: tuple[str, ...]) -> "subprocess.CompletedProcess[str]":
        inside = self._inside(command)
        return subprocess.run(inside, capture_output=True, text=True, timeout=COMMAND_LIMIT_S, check=False)

    def _inside(self, command: tuple[str, ...]) -> list[str]:
        namespaces = ("--mount", "--uts", "--ipc", "--net", "--pid", "--cgroup")
        variables = (f"PATH={os.defpath}:/usr/sbin:/sbin", *self._environment, "LANG=C.UTF-8")
        return ["nsenter", f"--target={self._init()}", *namespaces, "--", "env", "-i", *variables, *command]

    def _init(self) -> int:
        """Its process 1, as it is numbered here; 0 if there is none yet."""
        children = Path(f"/proc/{self._process.pid}/task/{self._process.pid}/children").read_text().split()
        return int(children[-1]) if children else 0


def _home() -> Path:
    """Where this gpulease lies, with what its links lead to: a checkout's packages are links (`.dev`)."""
    package = Path(next(iter(gpulease.__path__)))
    linked = (package / "daemon").resolve()
    return Path(os.path.commonpath([package.parent.resolve(), linked.parent]))


def missing() -> str:
    """Why no host can be booted here, "" if one can, as far as is seen before."""
    if os.geteuid() != 0:
        return "only root can boot a host"
    needed = ("systemd-nspawn", "nsenter", "mount", "umount")
    return next((f"{name} is not installed" for name in needed if shutil.which(name) is None), "")


@contextmanager
def _alone() -> Iterator[None]:
    """One host at a time: they share a control group, because no systemd gives them one each."""
    with (Path(tempfile.gettempdir()) / "gpulease-tests-booted.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _interpreter() -> tuple[list[str], str]:
    """Options that show the host this Python and all that it imports from, and its PYTHONPATH there."""
    given = [Path(name) for name in os.environ.get("PYTHONPATH", "").split(os.pathsep) if name]
    places = [(Path(sys.prefix), "venv"), (TESTS.parent, "tree"), (_home(), "package")]
    path = []
    for wanted in dict.fromkeys([Path(next(iter(gpulease.__path__))).parent, TESTS, *given]):
        if not any(wanted.is_relative_to(here) for here, _ in places):
            places.append((wanted, f"path{len(places)}"))
        here, there = next(place for place in places if wanted.is_relative_to(place[0]))
        path.append(str(Path(PYTHON, there) / wanted.relative_to(here)))
    return [f"--bind-ro={here}:{PYTHON}/{there}" for here, there in places], os.pathsep.join(path)


def _cards() -> list[str]:
    """Options that give the host this machine's cards, and the files of their driver that its file system lacks."""
    mounted = [line.split()[1] for line in Path("/proc/self/mounts").read_text().splitlines()]
    driver = [place for place in mounted if "nvidia" in place and not place.startswith(("/dev/", "/proc/"))]
    devices = [str(device) for device in sorted(Path("/dev").glob("nvidia*"))]
    return [*(f"--bind={device}" for device in devices), *(f"--bind-ro={place}" for place in driver)]


@contextmanager
def booted_host(folder: Path, has_cards: bool = False) -> Iterator[BootedHost | None]:
    """A host that is up until the block is left; None if this machine's kernel does not let one boot."""
    with _alone(), _booted(folder, _cards() if has_cards else []) as host:
        yield host


@contextmanager
def _booted(folder: Path, shown: list[str]) -> Iterator[BootedHost | None]:
    root, upper, work = folder / "root", folder / "upper", folder / "work"
    for place in (root, upper, work):
        place.mkdir()
    overlay = ["mount", "-t", "overlay", "overlay", "-o", f"lowerdir=/,upperdir={upper},workdir={work}", str(root)]
    if subprocess.run(overlay, capture_output=True, check=False).returncode:
        yield None
        return
    try:
        interpreter, path = _interpreter()
        process = subprocess.Popen(
            [
                *("systemd-nspawn", "--quiet", f"--directory={root}", "--machine=gpulease-tests", "--register=no"),
                *("--keep-unit", "--console=pipe", "--capability=all", "--boot"),
                # Its journal is its own, and some machines have no id to link it by.
                "--link-journal=no",
                *(*interpreter, *shown),
                # To its init: none of the services that this machine may have.
                *("--", "--unit=basic.target"),
            ],
            env=os.environ | {"SYSTEMD_SECCOMP": "0"},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        try:
            host = BootedHost(root, process, path)
            yield host if host.wait_until_it_runs() else None
        finally:
            process.terminate()
            try:
                process.wait(60)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
    finally:
        subprocess.run(["umount", "--lazy", str(root)], check=True)
