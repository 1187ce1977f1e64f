"""SIGKILL of a gateway before each of its steps, then the same request again: one effect, or an unknown outcome.

Effects are counted from outside: they are the launches that the daemon reports for any lease.
"""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from helpers.daemon import Daemon, python_environment
from helpers.gateway_steps import OUTPUT
from helpers.waiting import wait_until

LATER_S = 1000.0
"""Seconds by which the second attempt's clock is ahead, so that the first attempt's claim has expired."""

STEPS = [
    *("store.reserve", "acquire", "issue", "check"),
    *("open", "owner.mem_alloc", "owner.mem_write"),
    *("use_grant", "guest.module_load", "store.start", "guest.launch"),
    *("use_own", "owner.mem_read"),
    *("store.complete", "lease.free", "end"),
]
STARTED = STEPS.index("guest.launch")
COMPLETED = STEPS.index("lease.free")


class Gateways:
    """Gateways that serve one request each, step by step, and the launches that the daemon has reported for them."""

    def __init__(self, daemon: Daemon, folder: Path) -> None:
        self._daemon, self._folder = daemon, folder
        self._launches: dict[str, int] = {}
        command = [sys.executable, "-P", "-m", "helpers.gateway_steps"]
        pipe = subprocess.PIPE
        self._process = subprocess.Popen(command, env=python_environment(), stdin=pipe, stdout=pipe)

    def serve(
        self, request_id: str, *, later_s: float = 0, kill_before: int | None = None, lease_s: float = 20
    ) -> tuple[list[str], Any]:
        """Return the steps that were reported, and the reply; None if it was killed before step `kill_before`."""
        job = {"store": str(self._folder / "store"), "address": self._daemon.address, "request_id": request_id}
        self._say(json.dumps(job | {"later_s": later_s, "lease_s": lease_s}))
        pid, steps, answer = int(self._hear().removeprefix("pid ")), [], None
        while (line := self._hear()) != "ended":
            if not line.startswith("step "):
                answer = json.loads(line)
                continue
            steps.append(line.removeprefix("step "))
            self._look()
            if kill_before == len(steps) - 1:
                os.kill(pid, signal.SIGKILL)
            else:
                self._say("")
        return steps, answer

    def end_leases(self) -> None:
        """Revoke the leases that a killed gateway has left, and wait until they have ended."""
        for lease in self._daemon.leases():
            self._daemon.revoke(int(lease["lease_id"], 16))
        self.await_no_lease()

    def await_no_lease(self) -> None:
        wait_until(lambda: not self._look(), "nothing is left of the gateway's lease")

    def effects(self) -> int:
        """Return the number of launches so far, in all leases, and reset it."""
        seen, self._launches = sum(self._launches.values()), {}
        return seen

    def stop(self) -> None:
        self._process.communicate()

    def _look(self) -> bool:
        leases = self._daemon.leases()
        for lease in leases:
            self._launches[lease["lease_id"]] = max(lease.get("launches", 0), self._launches.get(lease["lease_id"], 0))
        return bool(leases)

    def _say(self, line: str) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(f"{line}\n".encode())
        self._process.stdin.flush()

    def _hear(self) -> str:
        assert self._process.stdout is not None
        line = self._process.stdout.readline().decode()
        assert line, "the gateways' process ended"
        return line.strip()


@pytest.fixture
def gateways(daemon: Daemon, tmp_path: Path) -> Iterator[Gateways]:
    found = Gateways(daemon, tmp_path)
    yield found
    found.stop()


@pytest.mark.exhaustive
def test_a_gateway_that_is_killed_before_each_step(gateways: Gateways) -> None:
    steps, answer = gateways.serve("whole")
    assert steps == STEPS
    assert answer == {"output": OUTPUT.hex(), "is_replayed": False}
    assert gateways.effects() == 1
    for number, step in enumerate(STEPS):
        request_id = f"killed before {number} {step}"
        told, answer = gateways.serve(request_id, kill_before=number)
        assert (told, answer) == (STEPS[: number + 1], None)
        gateways.end_leases()
        before = gateways.effects()
        assert before == 0 if number <= STARTED else before <= 1
        _, answer = gateways.serve(request_id, later_s=LATER_S)
        again = gateways.effects()
        if number < STARTED:
            assert (answer, again) == ({"output": OUTPUT.hex(), "is_replayed": False}, 1), request_id
        elif number < COMPLETED:
            assert (answer["error"], again) == ("OutcomeUnknown", 0), request_id
            assert "the outcome is unknown, so it is not retried" in answer["message"]
        else:
            assert (answer, before, again) == ({"output": OUTPUT.hex(), "is_replayed": True}, 1, 0), request_id


@pytest.mark.exhaustive
def test_a_killed_gateways_lease_ends_by_itself_and_its_claim_later(gateways: Gateways) -> None:
    gateways.serve("early", kill_before=STARTED, lease_s=15)
    gateways.await_no_lease()
    _, answer = gateways.serve("early")
    assert answer["error"] == "OperationInProgress"
    assert gateways.effects() == 0
