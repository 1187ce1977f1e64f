"""The overhead of remote access: the same work over TLS, through a relay, and over plain TCP, all on loopback."""

import contextlib
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Final

from gpulease.client.bench.figures import percentile
from gpulease.client.bench.session_speed import bulk_copies, hot_path
from gpulease.client.sync.driver import ask
from gpulease.client.transport.credentials import TlsFiles
from gpulease.protocol import Opcode
from gpulease.protocol.messages import Ping

CONNECTS: Final = 100
PKI_TIMEOUT_S: Final = 30.0
HOST: Final = "127.0.0.1"

STREAM_BYTES: Final = 512 << 20
"""Number of bytes in the plain TLS stream. openssl's two programs take about a second for them."""

_STREAM_TIMEOUT_S: Final = 60.0
_LISTEN_TIMEOUT_S: Final = 5.0
_LISTEN_PAUSE_S: Final = 0.02

_HOT: Final = (
    "launch_pipelined_us",
    "launch_own_us",
    "launch_sync_p50_us",
    "launch_sync_p99_us",
    "sync_p50_us",
    "alloc_free_p50_us",
    "write_4k_p50_us",
    "read_4k_p50_us",
)


class NoCertificates(Exception):
    """The test certificates could not be made; the message contains the reason."""


def remote_figures(address: str, ptx: bytes, launches: int, sizes: tuple[int, ...]) -> dict[str, float]:
    """Measure one address: connecting, a session's hot path, large copies."""
    # Measure connections first; each has its own handshake.
    connects = sorted(_connect_ms(address) for _ in range(CONNECTS))
    hot = hot_path(address, ptx, launches, 500)
    return {
        "connect_p50_ms": percentile(connects, 50),
        "connect_p99_ms": percentile(connects, 99),
        **{name: hot[name] for name in _HOT},
        **{name: value for name, value in bulk_copies(address, sizes).items() if not name.startswith("arena_")},
    }


def openssl_stream_rate(size: int = STREAM_BYTES) -> float | None:
    """GB/s of a raw TLS stream from `openssl s_client` to `openssl s_server`.

    None if openssl is not installed or fails. GPULEASE_TLS_CERTIFICATE and _KEY name the server's files.
    """
    program = shutil.which("openssl")
    if program is None:
        return None
    files = TlsFiles().completed()
    # Let the kernel choose a free port for openssl.
    with socket.create_server((HOST, 0)) as free:
        at = f"{HOST}:{free.getsockname()[1]}"
    serve = ("s_server", "-accept", at, "-cert", str(files.certificate), "-key", str(files.key), "-tls1_3", "-quiet")
    send = ("s_client", "-connect", at, "-tls1_3", "-quiet", "-no_ign_eof")
    nowhere = subprocess.DEVNULL
    with tempfile.TemporaryFile() as zeros, contextlib.ExitStack() as stack:
        # The file has only zeros, and takes no space on the disk.
        zeros.truncate(size)
        # Give the server a pipe as its input, because it would exit at the end of its input.
        server = stack.enter_context(
            subprocess.Popen([program, *serve], stdin=subprocess.PIPE, stdout=nowhere, stderr=nowhere)
        )
        stack.callback(server.kill)
        # Wait, so that the rate does not include the server's start.
        if not _listens(at):
            return None
        started = time.perf_counter()
        result = subprocess.run(
            [program, *send], stdin=zeros, stdout=nowhere, stderr=nowhere, timeout=_STREAM_TIMEOUT_S, check=False
        )
        seconds = time.perf_counter() - started
        # Check that every byte was sent, because a server that stopped would look fast.
        return None if result.returncode or os.lseek(zeros.fileno(), 0, os.SEEK_CUR) < size else size / seconds / 1e9


def _listens(at: str) -> bool:
    """Wait until a program listens at `at`. Return False if none does in time."""
    host, _, port = at.rpartition(":")
    deadline_s = time.monotonic() + _LISTEN_TIMEOUT_S
    while time.monotonic() < deadline_s:
        with contextlib.suppress(ConnectionRefusedError), socket.create_connection((host, int(port))):
            return True
        time.sleep(_LISTEN_PAUSE_S)
    return False


def _connect_ms(address: str) -> float:
    """Milliseconds to open a connection and complete HELLO and PING."""
    started = time.perf_counter()
    ask(Opcode.PING, Ping(1), address)
    return (time.perf_counter() - started) * 1e3


def make_certificates(folder: Path) -> tuple[str, dict[str, str]]:
    """Make test certificates; returns a daemon's settings and a tenant's environment for them.

    Raises NoCertificates.
    """
    # Use the daemon's tool for test certificates to make a CA, a certificate for the host, and one for the tenant.
    for words in (("init",), ("issue", "--server", HOST), ("issue", "--tenant", "bench")):
        command = [sys.executable, "-P", "-m", "gpulease.daemon.remote.pki", words[0], str(folder), *words[1:]]
        result = subprocess.run(command, capture_output=True, text=True, timeout=PKI_TIMEOUT_S, check=False)
        if result.returncode:
            raise NoCertificates((result.stderr.strip().splitlines() or ["no output"])[-1])
    paths = {"certificate": f"server-{HOST}.pem", "key": f"server-{HOST}.key", "client_ca": "ca.pem"}
    settings = "".join(f'{name} = "{folder / path}"\n' for name, path in paths.items())
    environment = {
        "GPULEASE_TLS_CERTIFICATE": str(folder / "tenant-bench.pem"),
        "GPULEASE_TLS_KEY": str(folder / "tenant-bench.key"),
        "GPULEASE_TLS_CA": str(folder / "ca.pem"),
    }
    return f"[tls]\n{settings}", environment
