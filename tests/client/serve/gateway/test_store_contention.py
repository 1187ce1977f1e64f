"""Several processes attempt the same operations, some are killed, the server goes away: at most one effect each."""

import random
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import pytest

from gpulease.client.serve.gateway.ledger import OperationCompleted, UnknownOutcome
from gpulease.client.serve.gateway.store import open_store
from helpers.daemon import python_environment
from helpers.postgres_server import PostgresServer
from helpers.store_contender import CLAIM_TTL_S, HASH, KEYS

LIMIT_S = 120.0


class Contenders:
    """Processes at one store, and what they did."""

    def __init__(self, url: str, folder: Path, count: int) -> None:
        self._url, self._folder = url, folder
        self.processes = [self._start() for _ in range(count)]

    def _start(self) -> "subprocess.Popen[bytes]":
        command = [sys.executable, "-P", "-m", "helpers.store_contender", self._url, str(self._folder)]
        return subprocess.Popen(command, env=python_environment(), stderr=subprocess.PIPE)

    def effects(self) -> "Counter[str]":
        path = self._folder / "effects"
        lines = path.read_text().splitlines() if path.exists() else []
        return Counter(line.split()[0] for line in lines)

    def wait_for_effects(self, count: int) -> None:
        until = time.monotonic() + LIMIT_S
        while len(self.effects()) < count and time.monotonic() < until:
            time.sleep(0.002)

    def kill_one(self) -> None:
        """SIGKILL one of them, wherever it is, and start another."""
        victim = self.processes.pop(random.randrange(len(self.processes)))
        victim.kill()
        victim.communicate()
        self.processes.append(self._start())

    def finish(self) -> None:
        for process in self.processes:
            _, said = process.communicate(timeout=LIMIT_S)
            assert process.returncode == 0, said.decode()

    def discard(self) -> None:
        for process in self.processes:
            if process.poll() is None:
                process.send_signal(signal.SIGKILL)
            process.communicate()

    def check(self) -> None:
        """Fails unless each operation had one effect, of which its outcome is; or is unknown, and had one at most."""
        effects = self.effects()
        assert set(effects.values()) <= {1}, effects
        store = open_store(self._url)
        try:
            for key in KEYS:
                answer = store.reserve(key, HASH, CLAIM_TTL_S)
                assert isinstance(answer, OperationCompleted | UnknownOutcome), answer
                if isinstance(answer, OperationCompleted):
                    assert answer.outcome == f"{key} {answer.epoch}\n".encode()
                    assert effects[key] == 1
        finally:
            store.close()


@pytest.mark.exhaustive
@pytest.mark.parametrize("kind", ["sqlite", "postgres"])
def test_processes_that_are_killed(request: pytest.FixtureRequest, kind: str, tmp_path: Path) -> None:
    url = f"sqlite:{tmp_path / 'store'}"
    if kind == "postgres":
        with_store: PostgresServer = request.getfixturevalue("postgres")
        url = with_store.conninfo
    contenders = Contenders(url, tmp_path, 3)
    try:
        for count in (2, 5):
            contenders.wait_for_effects(count)
            contenders.kill_one()
        contenders.finish()
        contenders.check()
    finally:
        contenders.discard()


@pytest.mark.exhaustive
def test_a_server_that_is_killed_and_comes_back(postgres: PostgresServer, tmp_path: Path) -> None:
    server = PostgresServer()
    try:
        server.start()
        contenders = Contenders(server.conninfo, tmp_path, 3)
        try:
            for count in (3, 6):
                contenders.wait_for_effects(count)
                server.stop()
                server.start()
            contenders.finish()
            # Nobody was killed; but the time without a server counts, and a claim may have run out in it.
            contenders.check()
            assert len(contenders.effects()) >= len(KEYS) - 6
        finally:
            contenders.discard()
    finally:
        server.discard()
