"""A real PostgreSQL server in a temporary folder, from the system's packages, which listens only on a Unix socket.

A second server may be its standby.
"""

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
    # Tests kill processes, not the host, so no data is lost without fsync, and other tests need the disk.
    "fsync": "off",
}


def programs() -> Path | None:
    """Return the folder of the newest server that can run here; None if there is none."""
    if os.geteuid() == 0 and shutil.which("setpriv") is None:
        return None
    found = [path.parent for path in Path(_PLACES).glob("*/bin/postgres")]
    usual = shutil.which("postgres")
    return max(found, default=None, key=lambda path: float(path.parent.name)) or (Path(usual).parent if usual else None)


def _account() -> tuple[int, int] | None:
    """Return the user and group for the server, which refuses to run as root; None for this process's own."""
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
        primary: A running server. The new server becomes its standby, and confirms to it the data that is stored on
            disk.
        settings: Settings of this server only.
    """

    def __init__(self, primary: "PostgresServer | None" = None, **settings: str) -> None:
        found = programs()
        assert found is not None
        self._programs = found
        # pytest's tmp_path is not used: a Unix socket's path has at most 107 bytes, and another user must reach it.
        self.folder = Path(tempfile.mkdtemp(prefix="gpul-pg-", dir="/tmp"))
        self.folder.chmod(0o755)
        self.data = self.folder / "data"
        self.data.mkdir(mode=0o700)
        self._as_whom: list[str] = []
        if (account := _account()) is not None:
            os.chown(self.folder, *account)
            os.chown(self.data, *account)
            # Popen's `user` is not used, because it makes Popen fork, after which OpenBLAS starts new threads in this
            # process.
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
        """Make a standby the primary. Returns when it is one."""
        with psycopg.connect(self.conninfo, autocommit=True) as connection:
            assert connection.execute("SELECT pg_promote()").fetchone() == (True,)

    def stop(self) -> None:
        """Stop the server at once, like a crash: it writes nothing more, and the next start recovers."""
        if self._process is not None:
            self._process.send_signal(signal.SIGQUIT)  # Immediate shutdown, with all its processes.
            self._process.wait(60)
            self._process = None

    def discard(self) -> None:
        self.stop()
        shutil.rmtree(self.folder)

    def _run(self, program: str, *words: str) -> None:
        command = [*self._as_whom, str(self._programs / program), *words]
        done = subprocess.run(command, capture_output=True, cwd="/", timeout=120, check=False, text=True)
        assert done.returncode == 0, done.stdout + done.stderr
