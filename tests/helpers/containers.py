"""Containers with CDI devices: their environment variables, and their mounts in a mount namespace.

`python -m helpers.containers`, run by `unshare --mount`, is the container's first process. It mounts, imports what the
program needs, switches to the container's user, and runs the program.
"""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest

from helpers.daemon import python_environment


def merged(specs: Iterable[Mapping[str, Any]], cdi_ids: Iterable[str]) -> tuple[dict[str, str], dict[str, str]]:
    """Return (environment, mounts as host paths by container paths) of these devices.

    If several devices set a variable or a path, the last one wins.
    """
    devices = {
        f"{spec['kind']}={device['name']}": (spec.get("containerEdits", {}), device["containerEdits"])
        for spec in specs
        for device in spec["devices"]
    }
    environment: dict[str, str] = {}
    mounts: dict[str, str] = {}
    for cdi_id in cdi_ids:
        for edits in devices[cdi_id]:
            environment |= dict(pair.split("=", 1) for pair in edits.get("env", []))
            mounts |= {mount["containerPath"]: mount["hostPath"] for mount in edits.get("mounts", [])}
    return environment, mounts


def run_container(
    specs: Iterable[Mapping[str, Any]], cdi_ids: Iterable[str], program: str, user: int, group: int
) -> subprocess.CompletedProcess[str]:
    """Run a program in a container with these devices. Skips the test if this host permits no mount namespaces."""
    if os.geteuid() != 0 or subprocess.run(["unshare", "--mount", "true"], check=False).returncode != 0:
        pytest.skip("a container needs root, and mount namespaces")
    environment, mounts = merged(specs, cdi_ids)
    command = ["unshare", "--mount", sys.executable, "-P", "-m", "helpers.containers"]
    what = {"environment": environment, "mounts": mounts, "program": program, "user": user, "group": group}
    return subprocess.run(
        command, input=json.dumps(what), capture_output=True, text=True, env=python_environment(), check=False
    )


def run_podman(folder: Path, cdi_ids: Iterable[str], program: str, user: int, group: int) -> str:
    """Run a program in a container that podman and runc make; podman itself reads the CDI specifications in `folder`.

    The container's root is a bind mount of the host's root, so no image is needed. Skips the test without podman or
    runc.
    """
    if os.geteuid() != 0 or not shutil.which("podman") or not shutil.which("runc"):
        pytest.skip("this needs root, podman and runc")
    what: dict[str, Any] = {"environment": None, "mounts": {}, "program": program, "user": user, "group": group}
    options = [*("--rm", "-i", "--network=none", "--runtime", "runc", "--ulimit", "nofile=1024:1024")]
    options += [
        "--ulimit",
        "nproc=1000:1000",
        "--mount",
        "type=tmpfs,dst=/sys/fs/cgroup",
        "--tmpfs",
        "/run:notmpcopyup",
    ]
    for cdi_id in cdi_ids:
        options += ["--device", cdi_id]
    options += ["--env", f"PYTHONPATH={python_environment()['PYTHONPATH']}"]
    with TemporaryDirectory() as root:
        # Podman reads CDI specifications from two fixed folders of the host.
        script = f"""
            set -e
            mount --make-rprivate /
            mkdir -p /var/run/cdi
            mount --bind {folder} /var/run/cdi
            mount --rbind / {root}
            exec podman --cgroup-manager=cgroupfs run "$@"
        """
        command = ["unshare", "--mount", "sh", "-c", script, "sh", *options, "--rootfs", root]
        done = subprocess.run(
            [*command, sys.executable, "-P", "-m", "helpers.containers"],
            input=json.dumps(what),
            capture_output=True,
            text=True,
            check=False,
        )
    return done.stdout + done.stderr


def _mount(*arguments: str) -> None:
    subprocess.run(["mount", *arguments], check=True)


def main() -> None:
    what = json.load(sys.stdin)
    # If there is no environment, the container was made by podman, with its devices.
    if what["environment"] is not None:
        # Mounts do not propagate to the host, and the container does not see the host's /run/gpulease.
        _mount("--make-rprivate", "/")
        _mount("-t", "tmpfs", "-o", "mode=755", "tmpfs", "/run")
    # Mount outer paths first, as runtimes do. All mounts are read-only, so the mount point of an inner path must exist
    # in the outer one.
    for place in sorted(what["mounts"], key=lambda place: place.count("/")):
        host = Path(what["mounts"][place])
        if not os.path.lexists(place):
            Path(place).parent.mkdir(parents=True, exist_ok=True)
            Path(place).mkdir() if host.is_dir() else Path(place).touch()
        _mount("--bind", str(host), place)
        _mount("-o", "remount,bind,ro,nosuid,nodev,noexec", place)
    import numpy  # noqa: F401

    import gpulease.client.core.attachment
    import gpulease.client.sync.session  # noqa: F401

    if what["environment"] is not None:
        for name in [name for name in os.environ if name.startswith("GPULEASE")]:
            del os.environ[name]
        os.environ |= what["environment"]
    os.setgroups([what["group"]])
    os.setresgid(what["user"], what["user"], what["user"])
    os.setresuid(what["user"], what["user"], what["user"])
    exec(what["program"], {"__name__": "__main__"})


if __name__ == "__main__":
    main()
