"""The driver on a real control plane: a real API server admits what it writes, a real scheduler assigns its devices.

`GPULEASE_KUBERNETES=FOLDER pytest tests/client/integrations/kubernetes/test_real_cluster.py`, as root, with etcd and
kubectl; see helpers/control_plane.py.
"""

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import yaml

from gpulease.client.sync.driver import ask
from gpulease.protocol import Opcode
from gpulease.protocol.messages import Drain, Empty
from helpers.cluster_node import ClusterNode
from helpers.control_plane import ControlPlane
from helpers.daemon import Daemon, python_environment
from helpers.kubelet import DRIVER, NODE, POD_USER, Claim, Node
from helpers.kubernetes_api import MANIFESTS
from helpers.waiting import wait_until

pytestmark = pytest.mark.slow

OPEN_SOCKET = 'socket_mode = "0666"\n'

PROGRAM = """
from gpulease.client import GpuSession
with GpuSession.attach() as session:
    buffer = session.mem_alloc(64)
    session.mem_write(buffer, 0, b"from a pod")
    print(bytes(session.mem_read(buffer, 0, 10)).decode())
"""


@pytest.fixture(scope="module")
def control_plane(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ControlPlane]:
    with ControlPlane(tmp_path_factory.mktemp("control-plane")) as made:
        made.apply_manifests()
        account = ("get", "serviceaccount", "default")
        wait_until(lambda: made.try_kubectl(*account).returncode == 0, "pods can be made", seen=made.logs)
        yield made


@pytest.fixture
def node(control_plane: ControlPlane, start_daemon: Callable[..., Daemon]) -> Iterator[Node]:
    control_plane.add_node(NODE)
    daemon = start_daemon(vram=["64MiB", "64MiB"], config=OPEN_SOCKET)
    with Node(daemon, control_plane=control_plane) as made:
        yield made
    control_plane.kubectl("delete", "node", NODE)
    wait_until(lambda: not slices(control_plane), "the slices are deleted with the node", seen=control_plane.logs)


def slices(control_plane: ControlPlane) -> list[dict[str, Any]]:
    return [one for one in control_plane.get("resourceslices") if one["spec"]["driver"] == DRIVER]


def devices(control_plane: ControlPlane) -> list[dict[str, Any]]:
    return [device for one in slices(control_plane) for device in one["spec"]["devices"]]


def example(name: str, size: str) -> list[dict[str, Any]]:
    """An example's documents, with sizes and a user that the test's node has."""
    text = (MANIFESTS / "examples" / name).read_text()
    for before in ("4Gi", "8Gi"):
        text = text.replace(f"vram: {before}", f"vram: {size if before == '4Gi' else '48Mi'}")
    return list(yaml.safe_load_all(text.replace("1000", str(POD_USER))))


def claim_of_pod(control_plane: ControlPlane, pod: str) -> Claim:
    """The claim that Kubernetes made for a pod, once the scheduler has assigned its devices."""

    def allocated() -> dict[str, Any] | None:
        for found in control_plane.get("resourceclaims"):
            owners = [owner["name"] for owner in found["metadata"].get("ownerReferences", [])]
            if pod in owners and "allocation" in found.get("status", {}):
                return dict(found)
        return None

    found = wait_until(allocated, "the scheduler assigns a device", seen=control_plane.logs)
    assert found is not None
    metadata = found["metadata"]
    return Claim({}, name=metadata["name"], namespace=metadata["namespace"], uid=metadata["uid"])


def test_the_api_server_admits_the_slices_and_the_driver_restores_them(control_plane: ControlPlane, node: Node) -> None:
    wait_until(lambda: len(devices(control_plane)) == 2, "the cards are published", seen=node.log)
    (found,) = slices(control_plane)
    assert [owner["kind"] for owner in found["metadata"]["ownerReferences"]] == ["Node"]
    # Nothing was dropped: all that the driver sends is known to this server, with its gates as they are.
    assert "dropped" not in node.log()
    assert devices(control_plane)[0]["allowMultipleAllocations"] is True
    # As the kubelet does at its start.
    control_plane.kubectl("delete", "resourceslices", f"--field-selector=spec.driver={DRIVER}")
    wait_until(lambda: len(devices(control_plane)) == 2, "they are published again", seen=node.log)
    name = slices(control_plane)[0]["metadata"]["name"]
    control_plane.kubectl(
        "patch", "resourceslice", name, "--type=json", "-p", '[{"op": "remove", "path": "/spec/devices/0"}]'
    )
    wait_until(lambda: len(devices(control_plane)) == 2, "a change of somebody else is undone", seen=node.log)
    ask(Opcode.DRAIN, Drain(600_000), node.daemon.address)

    def taints() -> set[str]:
        return {taint["key"] for device in devices(control_plane) for taint in device.get("taints", [])}

    wait_until(lambda: taints() == {"gpulease.internal/drained"}, "the taint is there", seen=node.log)
    ask(Opcode.DRAIN_CANCEL, Empty(), node.daemon.address)
    wait_until(lambda: not taints(), "it is gone", seen=node.log)
    assert "ResourceSlices:" not in node.log()


def test_a_pod_of_the_guide_is_scheduled_and_computes(control_plane: ControlPlane, node: Node) -> None:
    wait_until(lambda: devices(control_plane), "the cards are published", seen=node.log)
    control_plane.apply(*example("pod.yaml", "40Mi"))
    claim = claim_of_pod(control_plane, "saxpy")
    prepared = node.kubelet.prepare(claim)
    assert isinstance(prepared, list), prepared
    assert [device.requests for device in prepared] == [["gpu"]]
    assert [lease["size_bytes"] for lease in node.daemon.leases()] == [40 << 20]
    assert node.run(PROGRAM, (claim, prepared)).stdout == "from a pod\n"

    # The claim's status has the lease: the server admits it from this service account, on this node.
    def entries() -> list[dict[str, Any]]:
        return list(control_plane.get("resourceclaim", claim.name)["status"].get("devices", []))

    wait_until(entries, "the status has the device", seen=node.log)
    (entry,) = entries()
    assert int(entry["data"]["leaseId"], 16) == node.lease_ids(claim)[0]
    # What claims hold is the scheduler's to count: the second card has room, the first one has not.
    (second,) = (found for found in example("pod.yaml", "40Mi") if found["kind"] == "Pod")
    control_plane.apply(second | {"metadata": {"name": "second"}})
    other = claim_of_pod(control_plane, "second")
    held = control_plane.get("resourceclaim", other.name)["status"]["allocation"]["devices"]["results"]
    assert held[0]["device"] != prepared[0].name
    assert held[0]["consumedCapacity"] == {"vram": "40Mi"}
    third = second | {"metadata": {"name": "third"}}
    control_plane.apply(third)

    def waits() -> bool:
        conditions = control_plane.get("pod", "third").get("status", {}).get("conditions", [])
        return any(one.get("reason") == "Unschedulable" for one in conditions)

    wait_until(waits, "no card has room for a third", seen=control_plane.logs)
    assert node.kubelet.unprepare(claim) == ""
    assert node.daemon.leases() == []
    control_plane.kubectl("delete", "pod", "--force", "saxpy", "second", "third")


def test_a_deployment_gets_the_alternative_that_has_room(control_plane: ControlPlane, node: Node) -> None:
    wait_until(lambda: devices(control_plane), "the cards are published", seen=node.log)
    documents = example("deployment.yaml", "16Mi")
    (deployment,) = (found for found in documents if found["kind"] == "Deployment")
    deployment["spec"]["replicas"] = 3
    control_plane.apply(*documents)

    def results() -> list[tuple[str, str]]:
        found = [one for one in control_plane.get("resourceclaims") if "allocation" in one.get("status", {})]
        parts = [one["status"]["allocation"]["devices"]["results"][0] for one in found]
        return sorted((part["request"], part["consumedCapacity"]["vram"]) for part in parts)

    wanted = [("gpu/large", "48Mi"), ("gpu/large", "48Mi"), ("gpu/small", "16Mi")]
    wait_until(lambda: results() == wanted, "all pods have a device", seen=results)
    for found in control_plane.get("resourceclaims"):
        metadata = found["metadata"]
        claim = Claim({}, name=metadata["name"], namespace=metadata["namespace"], uid=metadata["uid"])
        prepared = node.kubelet.prepare(claim)
        assert isinstance(prepared, list), prepared
        assert prepared[0].requests == ["gpu"]
        assert node.kubelet.unprepare(claim) == ""
    control_plane.kubectl("delete", "deployment", deployment["metadata"]["name"])
    control_plane.kubectl("delete", "pods", "--all", "--force")


def test_a_restricted_namespace_admits_every_example(control_plane: ControlPlane) -> None:
    labels = {"pod-security.kubernetes.io/enforce": "restricted", "pod-security.kubernetes.io/warn": "restricted"}
    control_plane.apply({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": "tenant", "labels": labels}})
    for path in (MANIFESTS / "examples").glob("*.yaml"):
        options = ("apply", "-n", "tenant", "--dry-run=server", "--validate=strict", "-f", str(path))
        done = control_plane.try_kubectl(*options)
        # A Deployment whose pods would violate the standard is admitted with a warning.
        assert (done.returncode, done.stderr) == (0, ""), path.name


def test_a_node_s_driver_writes_its_own_slices_only(control_plane: ControlPlane, node: Node) -> None:
    wait_until(lambda: slices(control_plane), "the cards are published", seen=node.log)
    (found,) = slices(control_plane)
    token = control_plane.driver_token(NODE).read_text()

    def write(change: dict[str, Any]) -> str:
        made = {"apiVersion": found["apiVersion"], "kind": "ResourceSlice", "metadata": {"name": "made-by-a-test"}}
        pool = found["spec"]["pool"] | {"name": "made-by-a-test"}
        made["spec"] = found["spec"] | {"pool": pool} | change
        options = ("create", "--dry-run=server", f"--token={token}", "-f", "-")
        return control_plane.try_kubectl(*options, given=json.dumps(made), user="nobody").stderr

    assert write({}) == ""
    assert "own node only" in write({"nodeName": "node-b"})
    assert "its own ResourceSlices only" in write({"driver": "nic.example"})
    # A token that belongs to no node, as one from a Secret.
    unbound = control_plane.kubectl("create", "token", "-n", "gpulease", "gpulease-dra")
    token = unbound
    assert "own node only" in write({})
    # Its role permits nothing else.
    for verb, kind in (("list", "secrets"), ("create", "pods"), ("update", "resourceclaims"), ("list", "nodes")):
        done = control_plane.try_kubectl("auth", "can-i", verb, kind, f"--token={token}", user="nobody")
        assert done.stdout.strip() == "no", (verb, kind)


# --- a real kubelet, and a real container runtime ---


@pytest.fixture
def cluster_node(control_plane: ControlPlane) -> Iterator[ClusterNode]:
    # A short path: those of sockets have at most 107 characters.
    with TemporaryDirectory(prefix="gpul-", dir="/var/lib") as folder:
        Path(folder).chmod(0o755)
        with ClusterNode(control_plane, NODE, Path(folder)) as made:
            yield made
    control_plane.kubectl("delete", "pods", "--all", "--force")
    control_plane.kubectl("delete", "node", NODE)


@contextmanager
def driver_of(control_plane: ControlPlane, node: ClusterNode, daemon: Daemon, log: Path) -> Iterator[None]:
    """The driver next to a real kubelet."""
    command = [sys.executable, "-P", "-m", "gpulease.client.integrations.kubernetes", "serve", "--node", node.name]
    command += ["--daemon", daemon.address, "--kubelet", str(node.folder), "--cdi", str(node.cdi)]
    command += ["--api-server", control_plane.url, "--api-ca", str(control_plane.ca)]
    command += ["--api-token", str(control_plane.driver_token(node.name))]
    with log.open("ab") as file:
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stderr=file, env=python_environment())
    try:
        yield
    finally:
        process.terminate()
        assert process.wait(60) == 0


def on_host_network(pod: dict[str, Any]) -> dict[str, Any]:
    """A pod of a node without a network for pods, whose images are there already."""
    spec = pod["spec"]
    containers = [container | {"imagePullPolicy": "Never"} for container in spec["containers"]]
    more = {"hostNetwork": True, "tolerations": [{"operator": "Exists"}], "containers": containers}
    return pod | {"spec": spec | more}


def test_a_real_kubelet_prepares_and_unprepares_the_guide_s_pod(
    control_plane: ControlPlane, cluster_node: ClusterNode, start_daemon: Callable[..., Daemon], tmp_path: Path
) -> None:
    daemon = start_daemon(vram=["64MiB"], config=OPEN_SOCKET)
    # Pods are other users.
    daemon.folder.chmod(0o711)
    log = tmp_path / "driver.log"

    def seen() -> str:
        pods = control_plane.kubectl("describe", "pods")
        return f"{log.read_text()}\n{pods[-3000:]}\n{control_plane.logs()}"

    with driver_of(control_plane, cluster_node, daemon, log):
        wait_until(lambda: "the kubelet has registered the driver" in log.read_text(), "it is registered", seen=seen)
        wait_until(lambda: devices(control_plane), "the card is published", seen=seen)
        template, pod = example("pod.yaml", "40Mi")
        control_plane.apply(template, on_host_network(pod))

        def phase() -> str:
            return str(control_plane.get("pod", "saxpy").get("status", {}).get("phase"))

        wait_until(lambda: phase() in ("Succeeded", "Failed"), "the pod ends", seen=seen)
        assert (phase(), cluster_node.log_of("saxpy")) == ("Succeeded", "b'from a pod'"), seen()
        # The kubelet unprepares the claim of a pod that has ended.
        wait_until(lambda: not daemon.leases(), "its lease is freed", seen=seen)
        wait_until(lambda: not list(cluster_node.cdi.iterdir()), "its devices are gone", seen=seen)
        # A pod that crashes starts again in the lease that it has.
        name = "crashes"
        crashing = on_host_network(pod | {"metadata": {"name": name}})
        crashing["spec"] |= {"restartPolicy": "Always"}
        (container,) = crashing["spec"]["containers"]
        program = "from gpulease.client import GpuSession; GpuSession.attach().mem_alloc(30 << 20); print('allocated')"
        container["args"] = [f"{program}; raise SystemExit(1)"]
        control_plane.apply(crashing)
        wait_until(lambda: cluster_node.log_of(name).count("allocated") >= 2, "it started again", seen=seen)
        (lease,) = daemon.leases()
        assert lease["size_bytes"] == 40 << 20
        # The kubelet deletes the driver's slices when it starts, and takes up the driver and the prepared claim again.
        before = slices(control_plane)[0]["metadata"]["uid"]
        cluster_node.restart_kubelet()
        wait_until(
            lambda: [one["metadata"]["uid"] for one in slices(control_plane)] not in ([], [before]),
            "they are new",
            seen=seen,
        )
        wait_until(lambda: log.read_text().count("has registered the driver") >= 2, "it is registered again", seen=seen)
        assert [one["lease_id"] for one in daemon.leases()] == [lease["lease_id"]]
        control_plane.kubectl("delete", "pod", name, "--grace-period=1")
        wait_until(lambda: not daemon.leases(), "its lease is freed", seen=seen)
