"""The driver's CDI devices in containers that a real runtime makes: podman resolves them, runc mounts them.

`pytest tests/client/integrations/kubernetes/test_podman.py`, as root, with podman and runc.
"""

from collections.abc import Callable

import pytest

from gpulease.client.integrations.kubernetes.resource_pool import device_name
from helpers.containers import run_podman
from helpers.daemon import Daemon
from helpers.kubelet import POD_USER, Claim, Device, Node

pytestmark = pytest.mark.slow

PROGRAM = """
import os
from gpulease.client import GpuSession
for name in NAMES:
    with GpuSession.attach(name=name) as session:
        buffer = session.mem_alloc(64)
        session.mem_write(buffer, 0, b"from a pod")
        print(name, bytes(session.mem_read(buffer, 0, 10)).decode())
try:
    open("/run/gpulease/leases/mine", "w")
except OSError as error:
    print(error.strerror)
"""


def prepared(node: Node, claim: Claim) -> list[Device]:
    node.api.add_claim(claim.as_object())
    found = node.kubelet.prepare(claim)
    assert isinstance(found, list), found
    return found


def test_containers_of_a_real_runtime_use_their_leases(start_daemon: Callable[..., Daemon]) -> None:
    with Node(start_daemon(vram=["64MiB"], config='socket_mode = "0666"\n')) as node:
        device = device_name(node.daemon.inventory().details[0]["uuid"])
        claims = [
            Claim({"gpu": (device, "4Mi"), "more": [(device, "2Mi"), (device, "2Mi")]}, name="a", pod_claim="one"),
            Claim({"gpu": (device, "8Mi")}, name="b", pod_claim="two"),
        ]
        ids = [cdi_id for claim in claims for device in prepared(node, claim) for cdi_id in device.cdi_ids]
        group = node.daemon.socket_path.stat().st_gid

        def said(names: list[str], cdi_ids: list[str], user: int = POD_USER) -> str:
            return run_podman(node.cdi, cdi_ids, f"NAMES = {names!r}{PROGRAM}", user, group)

        # A container with all devices, and one that has one request of one claim.
        names = ["one/gpu", "one/more/0", "one/more/1", "two/gpu"]
        lines = [f"{name} from a pod" for name in names]
        assert said(names, ids).splitlines()[:4] == lines
        assert "denied" in said(names, ids) or "Read-only" in said(names, ids)
        assert said(["gpu"], ids[-1:]).splitlines()[0] == "gpu from a pod"
        # Another user does not reach the daemon's socket.
        assert "Permission denied" in said(["gpu"], ids[-1:], POD_USER + 1)
