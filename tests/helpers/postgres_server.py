"""A real PostgreSQL server in a temporary folder, on a Unix socket alone, from the system's packages; or two, of which
one follows the other."""

import os
import pwd
import shutil
import signal
import subprocess
import tempfile
from pathlib import Path
from typing import Final

import psycopg

from helpers.waiting import wait_until

USER: Final = "gateway"
START_LIMIT_S: Final = 120.0

_PLACES: Final = "/usr/lib/postgresql"
_SETTINGS: Final = {
    "listen_addresses": "",
    "shared_buffers": "16MB",
    "max_connections": "50",
    "autovacuum": "off",
    # A killed process loses nothing by that, only a killed host would; and the disk is shared with other tests.
    "fsync": "off",
}


def programs() -> Path | None:
    """The folder of the newest server that can be run here; None if there is none."""
    if os.geteuid() == 0 and shutil.which("setpriv") is None:
        return None
    found = [path.parent for path in Path(_PLACES).glob("*/bin/postgres")]
    usual = shutil.which("postgres")
    return max(found, default=None, key=lambda path: float(path.parent.name)) or (Path(usual).parent if usual else None)


def _account() -> tuple[int, int] | None:
    """As whom it runs, user and group: it refuses to be root. None for this process's own."""
    if os.geteuid() != 0:
        return None
    try:
        found = pwd.getpwnam("postgres")
    except KeyError:
        found = pwd.getpwnam("nobody")
    return found.pw_uid, found.pw_gid


class PostgresServer:
    """One server with new data, or with the data of a primary that it follows.

    Args:
        primary: Running server; this one becomes its standby, and confirms to it what it has on disk.
        settings: Settings of this server only.
    """

    def __init__(self, primary: "PostgresServer | None" = None, **settings: str) -> None:
        found = programs()
        assert found is not None
        self._programs = found
        # Not pytest's tmp_path: a Unix socket's path has at most 107 bytes, and another user must get there.
        self.folder = Path(tempfile.mkdtemp(prefix="gpul-pg-", dir="/tmp"))
        self.folder.chmod(0o755)
        self.data = self.folder / "data"
        self.data.mkdir(mode=0o700)
        self._as_whom: list[str] = []
        if (account := _account()) is not None:
            os.chown(self.folder, *account)
            os.chown(self.data, *account)
            # Not Popen's `user`: it forks, and before a fork OpenBLAS ends its threads here, to have others later.
            self._as_whom = ["setpriv", f"--reuid={account[0]}", f"--regid={account[1]}", "--clear-groups", "--"]
        self._settings = _SETTINGS | settings
        if primary is None:
            self._run("initdb", "-D", str(self.data), "-U", USER, "-A", "trust", "-E", "UTF8", "--no-sync")
        else:
            source = ("-h", str(primary.folder), "-U", USER, "-D", str(self.data))
            self._run("pg_basebackup", *source, "--write-recovery-conf", "--checkpoint=fast", "--no-sync")
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def conninfo(self) -> str:
        return f"postgresql:///postgres?host={self.folder}&user={USER}"

    def start(self) -> None:
        settings = [part for name, value in self._settings.items() for part in ("-c", f"{name}={value}")]
        words = ["-D", str(self.data), "-k", str(self.folder), *settings]
        with (self.folder / "log").open("ab") as log:
            self._process = subprocess.Popen(
                [*self._as_whom, str(self._programs / "postgres"), *words],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                cwd="/",
            )
        wait_until(self._answers, "the server answers", START_LIMIT_S, seen=self.log)

    def _answers(self) -> bool:
        assert self._process is not None
        assert self._process.poll() is None, self.log()
        try:
            psycopg.connect(self.conninfo).close()
        except psycopg.OperationalError:
            return False
        return True

    def log(self) -> str:
        return (self.folder / "log").read_text(errors="replace")

    def promote(self) -> None:
        """A standby is the primary from now on; returns once it is."""
        with psycopg.connect(self.conninfo, autocommit=True) as connection:
            assert connection.execute("SELECT pg_promote()").fetchone() == (True,)

    def stop(self) -> None:
        """At once, as a crash of it would: nothing is written that was not, and the next start recovers."""
        if self._process is not None:
            self._process.send_signal(signal.SIGQUIT)  # immediate shutdown, all its processes with it
            self._process.wait(60)
            self._process = None

    def discard(self) -> None:
        self.stop()
        shutil.rmtree(self.folder)

    def _run(self, program: str, *words: str) -> None:
        command = [*self._as_whom, str(self._programs / program), *words]
        done = subprocess.run(command, capture_output=True, cwd="/", timeout=120, check=False, text=True)
        assert done.returncode == 0, done.stdout + done.stderr
