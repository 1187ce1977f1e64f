"""A host booted by systemd: this machine's files in separate namespaces (systemd-nspawn(1)).

Its changes go to an overlay that is removed with it. systemd in the host filters no system calls of its own
(SYSTEMD_SECCOMP=0), because the tests are about the filters of the units.
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
"""The folder in the host with this Python and its modules, because units can't see /tmp."""

DROP_IN: Final = """
[Service]
Environment={environment}
ExecStart=
ExecStart={python} -P -m gpulease.daemon --config /etc/gpulease/gpuleased.toml
# The interpreter may be in a home directory.
ProtectHome=read-only
WatchdogSec=5
"""


class BootedHost:
    def __init__(self, root: Path, process: "subprocess.Popen[bytes]", path: str) -> None:
        self._root, self._process = root, process
        # On some machines LD_LIBRARY_PATH contains the folder of the driver's libraries.
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
        """Run `gpulease install-service --install` and the commands that it prints, and change these settings."""
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
        """Run a command, and return its output. Fails if the command fails."""
        done = self._run(command)
        assert done.returncode == 0, f"{' '.join(command)}: {done.stdout}{done.stderr}{self.log()}"
        return done.stdout

    def said(self, *command: str) -> str:
        return self._run(command).stdout.strip()

    def shown(self, name: str) -> str:
        """Return a property of the daemon's unit (systemctl(1), "show")."""
        return self.said("systemctl", "show", "gpuleased.service", f"--property={name}", "--value")

    def leasing(self, other_than: str = "0") -> str:
        """Wait until a daemon with a process id other than `other_than` grants leases. Returns its process id."""

        def is_leasing() -> bool:
            return self.shown("MainPID") not in (other_than, "0") and self.shown("StatusText").startswith("Leasing")

        wait_until(is_leasing, "the daemon leases", RESTART_LIMIT_S, seen=self.log)
        return self.shown("MainPID")

    def log(self) -> str:
        return self.said("journalctl", "--unit=gpuleased", "--no-pager", "--output=cat", "--lines=10")

    def start(self, *command: str) -> "subprocess.Popen[str]":
        """Start a program in the host, with pipes for its input and its output."""
        return subprocess.Popen(
            self._inside(command), stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )

    def _run(self, command: tuple[str, ...]) -> "subprocess.CompletedProcess[str]":
        inside = self._inside(command)
        return subprocess.run(inside, capture_output=True, text=True, timeout=COMMAND_LIMIT_S, check=False)

    def _inside(self, command: tuple[str, ...]) -> list[str]:
        namespaces = ("--mount", "--uts", "--ipc", "--net", "--pid", "--cgroup")
        variables = (f"PATH={os.defpath}:/usr/sbin:/sbin", *self._environment, "LANG=C.UTF-8")
        return ["nsenter", f"--target={self._init()}", *namespaces, "--", "env", "-i", *variables, *command]

    def _init(self) -> int:
        """Return this machine's pid of the host's init; 0 if it does not run yet."""
        children = Path(f"/proc/{self._process.pid}/task/{self._process.pid}/children").read_text().split()
        return int(children[-1]) if children else 0


def _home() -> Path:
    """Return the folder of the installed gpulease, or of the checkout that its links point to."""
    package = Path(next(iter(gpulease.__path__)))
    linked = (package / "daemon").resolve()
    return Path(os.path.commonpath([package.parent.resolve(), linked.parent]))


def missing() -> str:
    """Return why no host can be booted here; "" if no reason is known."""
    if os.geteuid() != 0:
        return "only root can boot a host"
    needed = ("systemd-nspawn", "nsenter", "mount", "umount")
    return next((f"{name} is not installed" for name in needed if shutil.which(name) is None), "")


@contextmanager
def _alone() -> Iterator[None]:
    """Exclude other hosts during the block, because all would be in the same control group."""
    with (Path(tempfile.gettempdir()) / "gpulease-tests-booted.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _interpreter() -> tuple[list[str], str]:
    """Return the options that mount this Python and its modules into the host, and the PYTHONPATH in the host."""
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
    """Return the options that mount this machine's cards into the host, and the files of their driver."""
    mounted = [line.split()[1] for line in Path("/proc/self/mounts").read_text().splitlines()]
    driver = [place for place in mounted if "nvidia" in place and not place.startswith(("/dev/", "/proc/"))]
    devices = [str(device) for device in sorted(Path("/dev").glob("nvidia*"))]
    return [*(f"--bind={device}" for device in devices), *(f"--bind-ro={place}" for place in driver)]


@contextmanager
def booted_host(folder: Path, has_cards: bool = False) -> Iterator[BootedHost | None]:
    """Boot a host that runs during the block. Yields None if this machine's kernel does not permit it."""
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
    # This machine's packages may have timers that begin with a boot, such as metrics of apt, for seconds.
    (root / "etc/systemd/system/timers.target").symlink_to("/dev/null")
    try:
        interpreter, path = _interpreter()
        process = subprocess.Popen(
            [
                *("systemd-nspawn", "--quiet", f"--directory={root}", "--machine=gpulease-tests", "--register=no"),
                *("--keep-unit", "--console=pipe", "--capability=all", "--boot"),
                # Do not link its journal, for which some machines have no machine id.
                "--link-journal=no",
                *(*interpreter, *shown),
                # An argument of its init: start none of the services that this machine may have.
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
