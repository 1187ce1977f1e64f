"""`gpulease demo --fleet` as a newcomer runs it, with and without etcd on the host."""

import json
import subprocess
import sys

from helpers.daemon import python_environment
from helpers.etcd_cluster import need_etcd


def demo(*words: str, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-P", "-m", "gpulease.client.cli", "demo", "--fleet", *words]
    env = python_environment() | environment
    return subprocess.run(command, env=env, capture_output=True, text=True, check=False, timeout=300)


def test_a_killed_node_s_name_lives_on_and_nothing_overlaps() -> None:
    need_etcd()
    done = demo("--json")
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert (report["nodes"], report["overlaps"]) == (3, 0)
    first, second = report["epochs"]
    assert first < second
    assert all(report["kernels"])
    assert "has the name" in report["refused"]
    assert "revoked" in report["session_end"]


def test_who_has_no_etcd_is_told_what_to_install() -> None:
    done = demo(PATH="/nowhere")
    assert done.returncode == 1
    assert "apt install etcd-server" in done.stderr
    assert "Traceback" not in done.stderr
