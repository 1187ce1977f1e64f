"""What is found out where something is missing, and what is made of it."""

import json
import os
import signal
import subprocess
import sys
from typing import Any

import pytest

from helpers.daemon import python_environment

SETGROUPS = 116
LANDLOCK_RESTRICT_SELF = 446

PREPARE = """
import json, sys
from gpulease.daemon.sandbox.measures import SandboxUnavailable
from gpulease.daemon.sandbox.measures import SandboxNeeds
from gpulease.daemon.sandbox.measures import SandboxSettings
from gpulease.daemon.sandbox.trial import prepare
try:
    plan, findings = prepare(SandboxSettings.from_text(sys.argv[1]), SandboxNeeds(), lambda owner: ())
    on = sorted(measure.value for measure in plan.measures)
    print(json.dumps({"on": on, "found": {found.measure.value: found.detail for found in findings}}))
except SandboxUnavailable as error:
    print(json.dumps({"broken": str(error), "hint": error.hint}))
"""

KILLED = """
import os, signal
from gpulease.daemon.sandbox.measures import SandboxNeeds, SandboxSettings
from gpulease.daemon.sandbox.trial import prepare
fork = os.fork
def killed():
    if not fork():
        return 0
    os.kill(os.getpid(), signal.SIGKILL)
os.fork = killed
prepare(SandboxSettings(), SandboxNeeds(), lambda owner: ())
"""


def prepared(lacking: int, *, required: bool = False, user: str | None = None) -> dict[str, Any]:
    """What `prepare` says on a kernel that seems to lack a system call."""
    settings = json.dumps({"required": required, "user": user, "without": []})
    program = [sys.executable, "-P", "-c", PREPARE, settings]
    command = [sys.executable, "-P", "-m", "helpers.lacking", str(lacking), *program]
    ended = subprocess.run(command, capture_output=True, text=True, env=python_environment(), timeout=60, check=False)
    assert ended.returncode == 0, ended.stderr
    told: dict[str, Any] = json.loads(ended.stdout)
    return told


ONLY_ROOT = pytest.mark.skipif(os.geteuid() != 0, reason="only root can be somebody else")


@ONLY_ROOT
def test_a_user_that_workers_can_not_be() -> None:
    told = prepared(SETGROUPS)
    assert "user" not in told["on"]
    assert told["found"]["user"] == "the kernel refuses it: [Errno 38] Function not implemented"
    assert {"capabilities", "undumpable", "limits"} <= set(told["on"])


@ONLY_ROOT
def test_a_user_that_the_operator_named_is_had_or_refused() -> None:
    told = prepared(SETGROUPS, user="nobody")
    assert told["broken"].startswith("workers can't run as nobody: the kernel refuses it")
    assert told["hint"] == "Start the daemon as root."


@pytest.mark.exhaustive
def test_a_measure_that_the_kernel_refuses_is_off() -> None:
    told = prepared(LANDLOCK_RESTRICT_SELF)
    assert not {"files", "device_calls", "network", "scope"} & set(told["on"])
    assert "syscalls" in told["on"]
    told = prepared(LANDLOCK_RESTRICT_SELF, required=True)
    assert "this host lacks" in told["broken"]
    assert "scope (the kernel refuses it" in told["broken"]
    assert "sandbox_without" in told["hint"]


def test_a_trial_whose_process_was_killed_ends_in_silence() -> None:
    """As when a daemon is killed just after its start: there is no bug to be told of."""
    program = [sys.executable, "-P", "-c", KILLED]
    ended = subprocess.run(program, capture_output=True, text=True, env=python_environment(), timeout=60, check=False)
    # Its output ends with the trial.
    assert (ended.returncode, ended.stderr) == (-signal.SIGKILL, "")
