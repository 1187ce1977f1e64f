"""The daemon that a command talks to: the one that runs, or a private one that ends with the command."""

import contextlib
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from gpulease.client.cli.exit_status import CannotStart
from gpulease.protocol.address import ADDRESS_VARIABLE, DEFAULT_ADDRESS, MAX_UNIX_PATH_BYTES, UnixAddress, parse_address

START_TIMEOUT_S: Final = 90.0
"""Seconds for a daemon to listen: on a GPU host it first makes a context on every card."""

STOP_TIMEOUT_S: Final = 15.0
"""Seconds for the daemon to release everything, before it is killed."""

SOCKET_NAME_BYTES: Final = 40
"""Room kept for `/gpulease-xxxxxxxx/daemon.sock` behind the folder of temporary files."""

_LOOK_S: Final = 0.01


def running_address() -> str | None:
    """Return GPULEASE_ADDRESS, else the default socket if a daemon listens there, else None."""
    named = os.environ.get(ADDRESS_VARIABLE)
    if named:
        return named
    address = parse_address(DEFAULT_ADDRESS)
    return DEFAULT_ADDRESS if isinstance(address, UnixAddress) and _answers(address.path) else None


@contextlib.contextmanager
def private_daemon(
    driver: str,
    vram: tuple[str, ...] = (),
    *,
    also_at: tuple[str, ...] = (),
    warm_contexts: int = 0,
    settings: str = "",
) -> Iterator[str]:
    """Start a daemon that ends with the block; yields its address. Raises CannotStart.

    Args:
        driver: The daemon's driver.
        vram: Device memory for leases, for each card.
        also_at: Further addresses to listen at.
        warm_contexts: Contexts that the daemon keeps ready.
        settings: Further settings, as TOML.
    """
    with tempfile.TemporaryDirectory(prefix="gpulease-", dir=_short_folder()) as folder:
        path = str(Path(folder) / "daemon.sock")
        log_path = Path(folder) / "log"
        command = [sys.executable, "-P", "-m", "gpulease.daemon", "--listen", f"unix:{path}", "--driver", driver]
        for address in also_at:
            command += ["--listen", address]
        if settings:
            file = Path(folder) / "settings.toml"
            file.write_text(settings)
            command += ["--config", str(file)]
        if warm_contexts:
            command += ["--warm-contexts", str(warm_contexts)]
        for size in vram:
            command += ["--vram", size]
        with log_path.open("wb") as log:
            process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
        try:
            _wait_until_it_answers(process, path, log_path)
            yield f"unix:{path}"
        finally:
            _stop(process)


def _short_folder() -> str | None:
    """Return a folder in which a socket's path stays short enough: the usual one (None), else /tmp."""
    usual = tempfile.gettempdir()
    return "/tmp" if len(os.fsencode(usual)) > MAX_UNIX_PATH_BYTES - SOCKET_NAME_BYTES else usual


def _wait_until_it_answers(process: "subprocess.Popen[bytes]", path: str, log: Path) -> None:
    until = time.monotonic() + START_TIMEOUT_S
    while not _answers(path):
        if process.poll() is not None or time.monotonic() > until:
            said = log.read_text(errors="replace").strip().splitlines()
            if any("No module named" in line for line in said):
                raise CannotStart(
                    "no daemon is installed beside this client: pip install '.[daemon]' in gpulease's repository"
                )
            raise CannotStart(said[-1] if said else "the daemon said nothing and did not start")
        time.sleep(_LOOK_S)


def _answers(path: str) -> bool:
    with socket.socket(socket.AF_UNIX) as sock:
        return sock.connect_ex(path) == 0


def _stop(process: "subprocess.Popen[bytes]") -> None:
    with contextlib.suppress(ProcessLookupError):
        process.send_signal(signal.SIGTERM)
    try:
        process.wait(STOP_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
