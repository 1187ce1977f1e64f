"""The DRA driver as a process, on a real daemon, called over gRPC like a kubelet does."""

import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import yaml

from gpulease.client import Busy
from gpulease.client.integrations.kubernetes.kubelet_plugin import message
from gpulease.client.integrations.kubernetes.resource_pool import device_name
from gpulease.client.sync.driver import ask
from gpulease.protocol import Opcode
from gpulease.protocol.messages import CardDrain, Drain, Empty, FenceClear, LeaseRef
from helpers.containers import merged
from helpers.daemon import Daemon, Faults, python_environment, running
from helpers.kubelet import DRIVER, NODE, POD_USER, CallFailed, Claim, Device, Node, encode
from helpers.kubernetes_api import MANIFESTS, cluster_rules
from helpers.processes import stop_process
from helpers.waiting import wait_until

CARD_BYTES = 64 << 20
OPEN_SOCKET = 'socket_mode = "0666"\n'

TROUBLE = ["the test withholds the proof", "fenced", "fence"]

POD = """
from gpulease.client import GpuSession
with GpuSession.attach(name=NAME) as session:
    buffer = session.mem_alloc(64)
    session.mem_write(buffer, 0, b"from a pod")
    print(bytes(session.mem_read(buffer, 0, 10)).decode())
"""


@pytest.fixture(scope="module")
def shared_node() -> Iterator[Node]:
    daemon = Daemon(vram=["64MiB"], config=OPEN_SOCKET)
    try:
        daemon.wait_until_it_answers()
        with Node(daemon) as node:
            yield node
    finally:
        daemon.stop()


@pytest.fixture(scope="module")
def lent_daemon() -> Iterator[Daemon]:
    """A daemon for the nodes of single tests, one after the other."""
    with running(Daemon(vram=["64MiB"], config=OPEN_SOCKET)) as daemon:
        yield daemon


@contextmanager
def node_of_a_test(daemon: Daemon, *options: str, **more: Any) -> Iterator[Node]:
    """A node with a driver of its own on a lent daemon, which is free again afterwards."""
    try:
        with Node(daemon, *options, **more) as node:
            yield node
    finally:
        for lease in daemon.leases():
            daemon.revoke(int(lease["lease_id"], 16))
        wait_until(lambda: not daemon.leases() and daemon.available_bytes() == CARD_BYTES, "the card is free")
        shutil.rmtree(daemon.folder / "k")


@pytest.fixture
def own_node(lent_daemon: Daemon) -> Iterator[Node]:
    """A node of this test alone, which may restart the node's driver, but not its daemon."""
    with node_of_a_test(lent_daemon) as node:
        yield node


@pytest.fixture
def node(shared_node: Node) -> Iterator[Node]:
    """The file's node; afterwards it holds nothing."""
    yield shared_node
    shared_node.api.forget_claims()
    for path in (shared_node.state / "claims").glob("*.json"):
        assert shared_node.kubelet.unprepare(Claim({}, uid=path.stem)) == ""
    assert shared_node.daemon.leases() == []
    assert shared_node.daemon.available_bytes() == CARD_BYTES


def device_of(daemon: Daemon) -> str:
    return device_name(daemon.inventory().details[0]["uuid"])


def claim_of(node: Node, size: str | None = "16Mi", **more: Any) -> Claim:
    claim = Claim({"gpu": (device_of(node.daemon), size)}, **more)
    node.api.add_claim(claim.as_object())
    return claim


def run_pod(node: Node, claim: Claim, name: str | None = None) -> str:
    prepared = node.kubelet.prepare(claim)
    done = node.run(f"NAME = {name!r}{POD}", (claim, prepared_devices(prepared)))
    return done.stdout + done.stderr


def test_a_prepared_claim_is_a_lease_of_its_pod_s_user(node: Node) -> None:
    claim = claim_of(node)
    prepared = node.kubelet.prepare(claim)
    assert isinstance(prepared, list)
    (device,) = prepared
    assert (device.requests, device.pool, device.name) == (["gpu"], NODE, device_of(node.daemon))
    assert device.share_id == claim_share(node, claim)
    (lease_id,) = node.lease_ids(claim)
    report = node.daemon.query(lease_id)
    assert (report["state"], report["size_bytes"]) == ("active", 16 << 20)
    assert report["tenant"] == f"uid:{POD_USER}"
    assert 500_000 < report["remaining_ms"] <= 600_000
    assert run_pod(node, claim) == "from a pod\n"
    assert node.kubelet.unprepare(claim) == ""
    assert node.daemon.query(lease_id)["state"] == "torndown"
    assert node.daemon.available_bytes() == CARD_BYTES
    assert not list(node.cdi.iterdir())
    assert not list((node.state / "leases").iterdir())
    assert not list((node.state / "locks").iterdir())


def claim_share(node: Node, claim: Claim) -> str:
    found = node.api.claim(claim.namespace, claim.name)
    return str(found["status"]["allocation"]["devices"]["results"][0]["shareID"])


def test_a_container_gets_the_socket_its_leases_and_no_device_node(node: Node) -> None:
    claim = claim_of(node, pod_claim="slice")
    (device,) = prepared_devices(node.kubelet.prepare(claim))
    spec = node.spec(claim)
    assert device.cdi_ids == [f"{spec['kind']}={spec['devices'][0]['name']}"]
    environment, mounts = merged([spec], device.cdi_ids)
    assert environment == {
        "GPULEASE_ADDRESS": f"unix:/run/gpulease/users/{POD_USER}/daemon/d.sock",
        "GPULEASE_LEASES": "/run/gpulease/leases",
    }
    of_user = f"/run/gpulease/users/{POD_USER}"
    assert mounts[f"{of_user}/daemon"] == str(node.daemon.socket_path.parent)
    folder = Path(mounts[of_user])
    assert (folder.stat().st_uid, folder.stat().st_mode & 0o777) == (POD_USER, 0o500)
    lease = json.loads(Path(mounts[f"/run/gpulease/leases/{claim.uid}-0.json"]).read_text())
    assert (lease["claim"], lease["request"], lease["size_bytes"]) == ("slice", "gpu", 16 << 20)
    assert int(lease["lease_id"], 16) == node.lease_ids(claim)[0]
    assert all("ro" in mount["options"] for mount in spec["devices"][0]["containerEdits"]["mounts"])
    assert "deviceNodes" not in json.dumps(spec)
    assert "/dev" not in json.dumps(spec)


def test_a_container_of_another_user_does_not_reach_the_daemon(node: Node) -> None:
    """Otherwise a pod could name its own namespace's user in its claim, and run as that of another namespace."""
    claim = claim_of(node)
    devices = prepared_devices(node.kubelet.prepare(claim))
    done = node.run("NAME = None" + POD, (claim, devices), user=POD_USER + 1)
    assert "Permission denied" in done.stderr, done.stdout + done.stderr
    assert "from a pod" not in done.stdout


SEVERAL = """
from gpulease.client import GpuSession, InvalidRequest
from gpulease.client.core.assigned_leases import assigned_lease_id
from gpulease.client.sync.driver import ask
from gpulease.protocol import Opcode
from gpulease.protocol.messages import LeaseRef
try:
    GpuSession.attach()
except InvalidRequest as error:
    print(str(error).split("There are: ")[1])
for name in NAMES:
    with GpuSession.attach(name=name) as session:
        session.mem_alloc(64)
    print(name, ask(Opcode.LEASE_QUERY, LeaseRef(assigned_lease_id(name))).report["size_bytes"] >> 20)
"""


def sizes(node: Node, names: list[str], *claims: Claim) -> str:
    parts = [(claim, prepared_devices(node.kubelet.prepare(claim))) for claim in claims]
    done = node.run(f"NAMES = {names!r}{SEVERAL}", *parts)
    return done.stdout + done.stderr


def test_each_device_of_a_container_is_found_by_its_name(node: Node) -> None:
    device = device_of(node.daemon)
    # Names that differ only in a mark, two devices of one request, and two claims of one container.
    claim = Claim({"a-b": (device, "1Mi"), "a.b": [(device, "2Mi"), (device, "3Mi")]}, pod_claim="one")
    other = Claim({"a-b": (device, "4Mi")}, name="other", pod_claim="two")
    for added in (claim, other):
        node.api.add_claim(added.as_object())
    names = ["one/a-b", "one/a.b/0", "one/a.b/1", "two/a-b"]
    said = sizes(node, names, claim, other)
    assert said == "one/a-b/0, one/a.b/0, one/a.b/1, two/a-b/0\none/a-b 1\none/a.b/0 2\none/a.b/1 3\ntwo/a-b 4\n"
    (_, second, third) = prepared_devices(node.kubelet.prepare(claim))
    assert (second.requests, third.requests) == (["a.b"], ["a.b"])
    assert second.cdi_ids != third.cdi_ids


def test_an_alternative_that_the_scheduler_chose_goes_by_the_request_s_name(node: Node) -> None:
    claim = Claim({"gpu/large": (device_of(node.daemon), "8Mi")}, pod_claim="c")
    node.api.add_claim(claim.as_object())
    (device,) = prepared_devices(node.kubelet.prepare(claim))
    # The kubelet looks for the name that the pod's container gives.
    assert device.requests == ["gpu"]
    assert run_pod(node, claim, "c/gpu") == run_pod(node, claim, "gpu") == "from a pod\n"


def test_each_request_has_the_parameters_that_are_for_it(node: Node) -> None:
    device = device_of(node.daemon)
    configs = ((["b"], {"user": POD_USER + 1}), (["c"], {"leaseSeconds": 60}), (["c/x"], {"leaseSeconds": 100}))
    if os.geteuid() != 0:
        pytest.skip("two users need root")
    claim = Claim({"a": (device, "1Mi"), "b": (device, "1Mi"), "c/x": (device, "1Mi")}, configs=configs)
    node.api.add_claim(claim.as_object())
    prepared_devices(node.kubelet.prepare(claim))
    reports = [node.daemon.query(lease_id) for lease_id in node.lease_ids(claim)]
    users = [f"uid:{POD_USER}", f"uid:{POD_USER + 1}", f"uid:{POD_USER}"]
    assert [report["tenant"] for report in reports] == users
    assert [report["remaining_ms"] > 101_000 for report in reports] == [True, True, False]


def test_an_administrator_s_access_has_the_socket_and_no_memory(node: Node) -> None:
    claim = Claim({"gpu": (device_of(node.daemon), None)}, admin=("gpu",), parameters={"user": 0})
    node.api.add_claim(claim.as_object())
    (device,) = prepared_devices(node.kubelet.prepare(claim))
    assert node.daemon.leases() == []
    environment, _ = merged([node.spec(claim)], device.cdi_ids)
    assert environment == {"GPULEASE_ADDRESS": "unix:/run/gpulease/users/0/daemon/d.sock"}
    program = """
from gpulease.client.sync.driver import ask
from gpulease.protocol import Opcode
from gpulease.protocol.messages import Empty
print(ask(Opcode.LEASE_LIST_ACTIVE, Empty()).report)
"""
    assert node.run(program, (claim, [device]), user=0).stdout == "[]\n"
    assert node.kubelet.unprepare(claim) == ""


def test_a_user_of_one_namespace_is_refused_to_another(node: Node) -> None:
    first, second = claim_of(node, namespace="ann"), claim_of(node, namespace="bob")
    assert isinstance(node.kubelet.prepare(first), list)
    assert "is used by claims of another namespace" in str(node.kubelet.prepare(second))
    assert isinstance(node.kubelet.prepare(claim_of(node, namespace="ann", name="next")), list)
    for claim in (first, replace(first, uid=next(uid for uid in uids(node) if uid != first.uid))):
        assert node.kubelet.unprepare(claim) == ""
    assert isinstance(node.kubelet.prepare(second), list)


def uids(node: Node) -> list[str]:
    return [path.stem for path in (node.state / "claims").glob("*.json")]


def prepared_devices(prepared: list[Device] | str) -> list[Device]:
    assert isinstance(prepared, list), prepared
    return prepared


def test_a_claim_prepared_again_has_the_lease_that_it_had(node: Node) -> None:
    claim = claim_of(node)
    first = prepared_devices(node.kubelet.prepare(claim))
    lease_ids = node.lease_ids(claim)
    node.api.delete_claim(claim.namespace, claim.name)
    (node.cdi / f"gpulease-{claim.uid}.json").unlink()
    assert node.kubelet.prepare(claim) == first
    assert node.lease_ids(claim) == lease_ids
    assert node.spec(claim)
    assert len(node.daemon.leases()) == 1


def test_a_driver_that_starts_again_knows_what_it_prepared(own_node: Node) -> None:
    claim = claim_of(own_node)
    first = own_node.kubelet.prepare(claim)
    lease_ids = own_node.lease_ids(claim)
    for kill in (False, True):
        own_node.stop(kill=kill)
        assert own_node.daemon.query(lease_ids[0])["state"] == "active"
        own_node.start()
        assert own_node.kubelet.prepare(claim) == first
        assert own_node.lease_ids(claim) == lease_ids
    assert run_pod(own_node, claim) == "from a pod\n"
    assert own_node.kubelet.unprepare(claim) == ""
    assert own_node.daemon.available_bytes() == CARD_BYTES


@pytest.mark.exhaustive
def test_sockets_that_were_removed_are_made_anew(own_node: Node) -> None:
    claim = claim_of(own_node)
    first = own_node.kubelet.prepare(claim)
    own_node.kubelet.close()
    for path in own_node.sockets:
        path.unlink()
    wait_until(lambda: all(path.exists() for path in own_node.sockets), "they are made anew", seen=own_node.log)
    own_node.connect()
    assert own_node.kubelet.prepare(claim) == first


@pytest.mark.exhaustive
def test_a_second_driver_takes_no_socket_of_the_first(own_node: Node) -> None:
    second = subprocess.run(own_node.command, capture_output=True, text=True, env=python_environment())
    assert second.returncode == 1
    assert "can't listen for the kubelet: [Errno 98] Address already in use" in second.stderr
    assert "Traceback" not in second.stderr
    assert own_node.kubelet.prepare(claim_of(own_node))


@pytest.fixture
def hanging_node(lent_daemon: Daemon) -> Iterator[Node]:
    """A node with a driver that hangs while it writes records, for as long as the test wants."""
    with node_of_a_test(lent_daemon, may_hang=True) as node:
        yield node


def begin_to_prepare(node: Node, claim: Claim) -> threading.Thread:
    """Begin a call that gets no reply: the driver has acquired a lease, but its record is not on the disk."""
    node.stuck.touch()

    def prepare() -> None:
        with pytest.raises(CallFailed):
            node.kubelet.prepare(claim)

    call = threading.Thread(target=prepare)
    call.start()
    wait_until(node.stuck.read_text, "the record waits for the disk", seen=node.log)
    assert node.lease_ids(claim) == []
    return call


@pytest.mark.exhaustive
def test_a_driver_killed_between_a_grant_and_its_record_finds_the_lease_again(hanging_node: Node) -> None:
    """The lease takes the whole card, so a second one would find no room."""
    claim = claim_of(hanging_node, None)
    call = begin_to_prepare(hanging_node, claim)
    hanging_node.process.kill()
    call.join()
    (granted,) = hanging_node.daemon.leases()
    hanging_node.stop(kill=True)
    hanging_node.stuck.unlink()
    hanging_node.start()
    prepared_devices(hanging_node.kubelet.prepare(claim))
    # A host that takes longer than the first lease's 30 s has seen it end by itself.
    early = int(granted["lease_id"], 16)
    assert hanging_node.lease_ids(claim) == [early] or hanging_node.daemon.query(early)["cause"] == "expired"
    assert len(hanging_node.daemon.leases()) == 1
    assert run_pod(hanging_node, claim) == "from a pod\n"
    assert hanging_node.kubelet.unprepare(claim) == ""
    assert hanging_node.daemon.available_bytes() == CARD_BYTES


@pytest.mark.exhaustive
def test_a_kubelet_that_lost_the_answer_gets_the_same_lease(hanging_node: Node) -> None:
    claim = claim_of(hanging_node)
    call = begin_to_prepare(hanging_node, claim)
    (granted,) = hanging_node.daemon.leases()
    hanging_node.kubelet.drop()
    call.join()
    hanging_node.stuck.unlink()
    hanging_node.kubelet.close()
    hanging_node.connect()
    prepared_devices(hanging_node.kubelet.prepare(claim))
    assert hanging_node.lease_ids(claim) == [int(granted["lease_id"], 16)]
    assert len(hanging_node.daemon.leases()) == 1
    assert hanging_node.kubelet.unprepare(claim) == ""
    assert hanging_node.daemon.available_bytes() == CARD_BYTES


@pytest.mark.exhaustive
def test_a_record_that_can_t_be_read_keeps_no_other_pod_from_its_lease(own_node: Node) -> None:
    claim = claim_of(own_node)
    assert isinstance(own_node.kubelet.prepare(claim), list)
    own_node.stop(kill=True)
    records = own_node.state / "claims"
    good = json.loads((records / f"{claim.uid}.json").read_text())
    nested = "[" * 100_000
    texts = ("", "{}", nested, json.dumps(good | {"users": ["root"]}), json.dumps(good | {"name": 3}))
    bad = [Claim({}, uid=str(uuid.UUID(int=number))) for number in range(len(texts))]
    for one, text in zip(bad, texts, strict=True):
        (records / f"{one.uid}.json").write_text(text.replace(claim.uid, one.uid))
    own_node.cdi_spec_of(claim).unlink()
    own_node.start()
    assert own_node.spec(claim)
    for one in bad:
        path = records / f"{one.uid}.json"
        assert str(path) in own_node.log()
        assert str(path) in str(own_node.kubelet.prepare(one))
        assert str(path) in own_node.kubelet.unprepare(one)
    assert own_node.kubelet.unprepare(claim) == ""


def unready(found: dict[str, Any]) -> dict[str, Any]:
    """Return the record of a claim whose leases were never reported to the kubelet."""
    return found | {"is_ready": False}


def with_tokens(found: dict[str, Any]) -> dict[str, Any]:
    """Return a record as the version with tokens wrote it."""
    members = ("request", "pool", "device", "share_id", "lease_id")
    leases = [{name: device[name] for name in members} for device in found["devices"]]
    old = {"version": 1, "uid": found["uid"], "boot_id": found["boot_id"], "user": POD_USER, "audience": "00" * 32}
    return old | {"leases": leases, "is_ready": True}


@pytest.mark.exhaustive
def test_a_claim_that_is_not_ready_or_of_an_older_version_is_prepared_anew(own_node: Node) -> None:
    """Both have the whole card, so each early lease must end first."""
    changes = {unready: claim_of(own_node, "32Mi", name="one"), with_tokens: claim_of(own_node, "32Mi", name="two")}
    early = {}
    for claim in changes.values():
        assert isinstance(own_node.kubelet.prepare(claim), list)
        (early[claim.uid],) = own_node.lease_ids(claim)
    own_node.stop(kill=True)
    for change, claim in changes.items():
        path = own_node.state / "claims" / f"{claim.uid}.json"
        path.write_text(json.dumps(change(json.loads(path.read_text()))))
    own_node.start()
    for claim in changes.values():
        assert isinstance(own_node.kubelet.prepare(claim), list)
        assert own_node.daemon.query(early[claim.uid])["state"] == "torndown"
        assert own_node.lease_ids(claim) != [early[claim.uid]]
        assert run_pod(own_node, claim) == "from a pod\n"


@pytest.mark.exhaustive
def test_files_that_can_t_be_written_keep_no_other_pod_from_its_own(own_node: Node) -> None:
    claims = [claim_of(own_node, name=name) for name in ("one", "two")]
    for claim in claims:
        assert isinstance(own_node.kubelet.prepare(claim), list)
    first, second = sorted(claims, key=lambda claim: claim.uid)
    own_node.stop()
    leases = own_node.state / "leases"
    shutil.rmtree(leases / first.uid)
    (leases / first.uid).write_text("a file where a folder belongs")
    own_node.cdi_spec_of(second).unlink()
    own_node.start()
    assert own_node.spec(second)
    assert f"claim {first.uid}: can't be restored" in own_node.log()
    # What stays is reported, too, and the claim is not forgotten.
    assert "Not a directory" in own_node.kubelet.unprepare(first)
    assert (own_node.state / "claims" / f"{first.uid}.json").exists()
    (leases / first.uid).unlink()
    for claim in claims:
        assert own_node.kubelet.unprepare(claim) == ""


@pytest.mark.exhaustive
def test_a_busy_daemon_costs_no_pod_its_lease(start_daemon: Callable[..., Daemon]) -> None:
    most = 3
    few = Faults(constants={"gpulease.daemon.broker.connection_limiter:OPERATOR_CONNECTIONS": 0})
    config = f"max_connections = {most}\n{OPEN_SOCKET}"
    with Node(start_daemon(vram=["64MiB"], config=config, faults=few)) as node, ExitStack() as held:
        claim = claim_of(node)
        assert isinstance(node.kubelet.prepare(claim), list)
        node.stop()
        for _ in range(most):
            wait_until(partial(has_room, node.daemon, held), "a connection is free")
        node.start()
        assert "is not renewed" in node.log() or f"claim {claim.uid}: " in node.log()
        held.close()
        assert run_pod(node, claim) == "from a pod\n"
        wait_until(lambda: node.kubelet.unprepare(claim) == "", "a connection is free")


def has_room(daemon: Daemon, held: ExitStack) -> bool:
    """Whether there was room for a lease, which holds a connection."""
    try:
        held.callback(daemon.builder().acquire().free)
    except Busy:
        return False
    return True


def test_unprepare_twice_and_of_what_was_never_prepared_is_done(node: Node) -> None:
    claim = claim_of(node)
    node.kubelet.prepare(claim)
    assert node.kubelet.unprepare(claim) == ""
    assert node.kubelet.unprepare(claim) == ""
    assert node.kubelet.unprepare(Claim({})) == ""


def test_a_full_node_prepares_nothing_and_keeps_nothing(node: Node) -> None:
    first = claim_of(node, None, name="first")
    assert isinstance(node.kubelet.prepare(first), list)
    second = claim_of(node, "16Mi", name="second")
    told = node.kubelet.prepare(second)
    assert isinstance(told, str)
    assert "other leases use the memory" in told
    assert len(node.daemon.leases()) == 1
    assert not (node.state / "claims" / f"{second.uid}.json").exists()
    assert node.kubelet.unprepare(first) == ""
    assert isinstance(node.kubelet.prepare(second), list)


def test_a_claim_of_two_parts_of_which_one_has_no_room_gets_neither(node: Node) -> None:
    device = device_of(node.daemon)
    claim = Claim({"small": (device, "16Mi"), "large": (device, "60Mi")})
    node.api.add_claim(claim.as_object())
    assert isinstance(node.kubelet.prepare(claim), str)
    assert node.daemon.leases() == []
    assert node.daemon.available_bytes() == CARD_BYTES


@pytest.mark.exhaustive
def test_a_force_deleted_pod_s_bytes_are_nobody_s_until_they_are_proved_free(
    start_daemon: Callable[..., Daemon], tmp_path: Path
) -> None:
    withheld = tmp_path / "withheld"
    with Node(start_daemon(vram=["64MiB"], config=OPEN_SOCKET, faults=Faults(withhold_proof_while=withheld))) as node:
        withheld.touch()
        old = claim_of(node, None, name="old")
        assert isinstance(node.kubelet.prepare(old), list)
        # Pod and claim are gone from the API before the kubelet has heard of it.
        node.api.delete_claim(old.namespace, old.name)
        new = claim_of(node, None, name="new")
        assert isinstance(node.kubelet.prepare(new), str)
        (lease_id,) = node.lease_ids(old)
        os.kill(node.daemon.worker_pid(lease_id), signal.SIGKILL)
        wait_until(lambda: node.daemon.query(lease_id)["state"] == "draining", "the lease ends")
        assert isinstance(node.kubelet.prepare(new), str)
        assert not (node.state / "claims" / f"{new.uid}.json").exists()
        withheld.unlink()
        assert node.kubelet.unprepare(old) == ""
        assert isinstance(node.kubelet.prepare(new), list)
        node.daemon.allowed_trouble += TROUBLE


def test_a_fenced_claim_stays_until_an_operator_clears_it(start_daemon: Callable[..., Daemon], tmp_path: Path) -> None:
    withheld = tmp_path / "withheld"
    config = OPEN_SOCKET + "[limits]\nreclaim_timeout_s = 1\n"
    with Node(start_daemon(vram=["64MiB"], config=config, faults=Faults(withhold_proof_while=withheld))) as node:
        withheld.touch()
        claim = claim_of(node, None)
        assert isinstance(node.kubelet.prepare(claim), list)
        assert "fenced" in node.kubelet.unprepare(claim)
        assert "fenced" in str(node.kubelet.prepare(claim))
        # The scheduler and the kubelet get to know it, too.
        wait_until(lambda: taints(node) == {"gpulease.internal/fenced"}, "the taint is there", seen=node.log)
        assert health(node, "v1") == [(device_of(node.daemon), 2, "fenced")]
        withheld.unlink()
        ask(Opcode.FENCE_CLEAR, FenceClear(None), node.daemon.address)
        assert node.kubelet.unprepare(claim) == ""
        assert node.daemon.available_bytes() == CARD_BYTES
        node.daemon.allowed_trouble += TROUBLE


def test_a_uid_that_kubernetes_would_not_make_reaches_no_file(node: Node) -> None:
    before = sorted(node.folder.rglob("*"))
    good = str(uuid.uuid4())
    for uid in ("", "../../../etc/passwd", "a/b", "A" * 36, "0" * 36, good.upper() + "A", f"{good}\n", f"{good}/.."):
        claim = Claim({"gpu": (device_of(node.daemon), "1Mi")}, uid=uid)
        node.api.add_claim(claim.as_object())
        assert "is not a claim's uid" in str(node.kubelet.prepare(claim)), uid
        assert "is not a claim's uid" in node.kubelet.unprepare(claim), uid
    assert sorted(node.folder.rglob("*")) == before
    assert node.api.asked == []


def test_a_hostile_name_reaches_no_api(node: Node) -> None:
    for claim in (Claim({}, name="../secrets/x"), Claim({}, namespace="a?b=c"), Claim({}, name="x" * 300)):
        assert "is not a claim's name" in str(node.kubelet.prepare(claim))
    assert node.api.asked == []


def test_a_claim_made_again_by_the_same_name_is_another_one(node: Node) -> None:
    claim = claim_of(node)
    told = node.kubelet.prepare(replace(claim, uid=str(uuid.uuid4())))
    assert isinstance(told, str)
    assert claim.uid in told
    assert node.daemon.leases() == []


def test_parameters_that_make_no_sense_are_refused_by_name(node: Node) -> None:
    for parameters, said in (
        ({}, "user"),
        ({"user": 0}, "user"),
        ({"user": True}, "user"),
        ({"user": 2**32 - 1}, "user"),
        ({"user": POD_USER, "leaseSeconds": 0}, "leaseSeconds"),
        ({"user": POD_USER, "root": True}, "root"),
    ):
        told = node.kubelet.prepare(claim_of(node, parameters=parameters))
        assert isinstance(told, str), parameters
        assert said in told
    assert node.daemon.leases() == []


def test_a_claim_whose_lease_was_revoked_is_not_prepared_again(node: Node) -> None:
    claim = claim_of(node)
    node.kubelet.prepare(claim)
    (lease_id,) = node.lease_ids(claim)
    node.daemon.revoke(lease_id)
    assert "an operator revoked the lease" in str(node.kubelet.prepare(claim))
    assert node.kubelet.unprepare(claim) == ""


def test_a_claim_whose_lease_is_over_gets_another_one(node: Node) -> None:
    claim = claim_of(node, None)
    node.kubelet.prepare(claim)
    (early,) = node.lease_ids(claim)
    ask(Opcode.LEASE_FREE, LeaseRef(early), node.daemon.address)
    assert isinstance(node.kubelet.prepare(claim), list)
    assert node.lease_ids(claim) != [early]
    assert run_pod(node, claim) == "from a pod\n"
    assert len(node.daemon.leases()) == 1


@pytest.mark.exhaustive
def test_a_claim_of_another_boot_is_prepared_anew(start_daemon: Callable[..., Daemon]) -> None:
    with Node(start_daemon(vram=["64MiB"], config=OPEN_SOCKET)) as node:
        claim = claim_of(node, None)
        assert isinstance(node.kubelet.prepare(claim), list)
        (early,) = node.lease_ids(claim)
        node.stop(kill=True)
        node.daemon.kill()
        node.daemon.check_nothing_is_left()
        # What a boot leaves: the disk. Specifications lie in memory on many hosts.
        shutil.rmtree(node.cdi)
        record = node.state / "claims" / f"{claim.uid}.json"
        of_boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        assert of_boot in record.read_text()
        record.write_text(record.read_text().replace(of_boot, str(uuid.uuid4())))
        node.daemon = start_daemon(vram=["64MiB"], config=OPEN_SOCKET, folder=node.daemon.folder)
        node.start()
        assert isinstance(node.kubelet.prepare(claim), list)
        assert node.lease_ids(claim) != [early]
        assert run_pod(node, claim) == "from a pod\n"
        assert node.kubelet.unprepare(claim) == ""


def test_a_lease_of_another_boot_that_lives_is_ended_first(node: Node) -> None:
    """Then there is room for the claim's next one, though it takes the whole card."""
    claim = claim_of(node, None)
    assert isinstance(node.kubelet.prepare(claim), list)
    (early,) = node.lease_ids(claim)
    record = node.state / "claims" / f"{claim.uid}.json"
    record.write_text(json.dumps(json.loads(record.read_text()) | {"boot_id": str(uuid.uuid4())}))
    assert isinstance(node.kubelet.prepare(claim), list)
    assert node.daemon.query(early)["state"] == "torndown"
    assert node.lease_ids(claim) != [early]


def test_an_older_kubelet_is_served_by_v1beta1(node: Node) -> None:
    claim = claim_of(node)
    (device,) = prepared_devices(node.kubelet.prepare(claim, "v1beta1"))
    assert device.share_id == ""
    assert node.kubelet.unprepare(claim, "v1beta1") == ""


def test_a_request_of_too_many_claims_is_refused_whole(node: Node) -> None:
    request = encode(*((1, encode((2, str(uuid.uuid4())))) for _ in range(257)))
    with pytest.raises(CallFailed, match="INVALID_ARGUMENT"):
        node.kubelet.call("/k8s.io.kubelet.pkg.apis.dra.v1.DRAPlugin/NodePrepareResources", request)


def test_the_node_s_card_is_published_and_follows_what_others_hold(node: Node) -> None:
    def vram() -> list[str]:
        return [
            device["capacity"]["vram"]["value"] for found in node.api.slices() for device in found["spec"]["devices"]
        ]

    wait_until(lambda: vram() == ["64Mi"], "the card is published", seen=node.log)
    claim = claim_of(node)
    node.kubelet.prepare(claim)
    with node.daemon.builder(16 << 20).acquire():
        # The lease of somebody outside Kubernetes counts, the claim's own does not: the scheduler counts claims.
        wait_until(lambda: vram() == ["48Mi"], "what others hold is published", seen=node.log)
        assert node.api.wipe() == 1
        wait_until(lambda: vram() == ["48Mi"], "it is published again", seen=node.log)
    wait_until(lambda: vram() == ["64Mi"], "it is free again", seen=node.log)


def taints(node: Node) -> set[str]:
    return {
        taint["key"]
        for found in node.api.slices()
        for device in found["spec"]["devices"]
        for taint in device.get("taints", [])
    }


def test_the_cards_of_a_daemon_that_is_gone_take_no_claims(start_daemon: Callable[..., Daemon]) -> None:
    with Node(start_daemon(vram=["64MiB"], config=OPEN_SOCKET)) as node:
        device = device_of(node.daemon)
        wait_until(node.api.slices, "the card is published", seen=node.log)
        node.daemon.kill()
        wait_until(lambda: taints(node) == {"gpulease.internal/unreachable"}, "the taint is there", seen=node.log)
        assert health(node, "v1") == [(device, 0, "unreachable")]


def test_a_drained_node_s_cards_are_tainted(node: Node) -> None:
    ask(Opcode.DRAIN, Drain(600_000), node.daemon.address)
    wait_until(lambda: taints(node) == {"gpulease.internal/drained"}, "the taint is there", seen=node.log)
    ask(Opcode.DRAIN_CANCEL, Empty(), node.daemon.address)
    wait_until(lambda: not taints(node), "it is gone", seen=node.log)
    ask(Opcode.CARD_DRAIN, CardDrain("0", 600_000), node.daemon.address)
    wait_until(lambda: taints(node) == {"gpulease.internal/drained"}, "the taint is there", seen=node.log)
    ask(Opcode.CARD_DRAIN, CardDrain("0", None), node.daemon.address)


# --- the life of a claim's lease ---

CRASHING = """
import os, signal
from gpulease.client import GpuSession
session = GpuSession.attach()
buffer = session.mem_alloc(40 << 20)
session.mem_write(buffer, 0, b"x" * 64)
print("allocated", flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_container_in_a_crash_loop_finds_its_memory_free_at_each_start(node: Node) -> None:
    claim = claim_of(node, "48Mi")
    devices = prepared_devices(node.kubelet.prepare(claim))
    for _ in range(3):
        # The kubelet starts the container again without preparing the claim again.
        done = node.run(CRASHING, (claim, devices))
        assert done.stdout == "allocated\n", done.stderr


def test_a_claim_s_lease_is_renewed_until_the_claim_or_its_driver_is_gone(lent_daemon: Daemon) -> None:
    """The pod of a claim that is gone runs elsewhere; the kubelet of this node is cut off, and ends nothing."""
    with node_of_a_test(lent_daemon, "--lease-secs", "10") as node:
        gone, remains = claim_of(node, name="gone"), claim_of(node, name="remains")
        for claim in (gone, remains):
            assert isinstance(node.kubelet.prepare(claim), list)
        (first,), (second,) = node.lease_ids(gone), node.lease_ids(remains)
        node.api.delete_claim(gone.namespace, gone.name)
        wait_until(lambda: node.daemon.query(first)["cause"] == "expired", "it ends", seen=node.log)
        assert node.daemon.query(second)["state"] == "active"
        # An API server that does not answer ends no lease.
        node.api.is_down = True
        until = time.monotonic() + 15
        wait_until(lambda: time.monotonic() > until, "longer than a lease")
        assert node.daemon.query(second)["state"] == "active", node.log()
        # Without its driver a lease ends, as after the loss of the node.
        node.stop(kill=True)
        wait_until(lambda: node.daemon.query(second)["cause"] == "expired", "it ends by itself")


@pytest.mark.exhaustive
def test_a_pod_of_a_lost_node_gets_another_lease_elsewhere(
    lent_daemon: Daemon, start_daemon: Callable[..., Daemon]
) -> None:
    with (
        node_of_a_test(lent_daemon, "--lease-secs", "10") as lost,
        Node(start_daemon(vram=["64MiB"], config=OPEN_SOCKET), name="node-b") as other,
    ):
        before = claim_of(lost, None)
        assert isinstance(lost.kubelet.prepare(before), list)
        (lease_id,) = lost.lease_ids(before)
        lost.stop(kill=True)
        # The claim of the next pod has the template's name, and another uid.
        after = replace(before, uid=str(uuid.uuid4()), pool="node-b", parts={"gpu": (device_of(other.daemon), None)})
        other.api.add_claim(after.as_object())
        assert isinstance(other.kubelet.prepare(after), list)
        assert run_pod(other, after) == "from a pod\n"
        # The node comes back with its daemon: nothing of the old pod holds the card.
        wait_until(lambda: lost.daemon.query(lease_id)["cause"] == "expired", "the old lease ends")
        wait_until(lambda: lost.daemon.available_bytes() == CARD_BYTES, "its memory is proved free")


@pytest.mark.exhaustive
def test_the_driver_is_updated_without_a_gap(own_node: Node) -> None:
    claims = [claim_of(own_node, name=name) for name in ("one", "two")]
    first = own_node.kubelet.prepare(claims[0])
    own_node.stop()
    with Node.instance(own_node, "uid-a") as old, Node.instance(own_node, "uid-b") as new:
        # Two drivers serve at a time; the kubelet asks the newer one.
        assert old.kubelet.prepare(claims[0]) == new.kubelet.prepare(claims[0]) == first
        assert isinstance(new.kubelet.prepare(claims[1]), list)
        old.stop()
        assert new.kubelet.prepare(claims[0]) == first
        assert all(path.exists() for path in new.sockets)
        for claim in claims:
            assert new.kubelet.unprepare(claim) == ""
    own_node.start()


def test_a_container_reaches_a_daemon_that_was_started_again(
    start_daemon: Callable[..., Daemon], tmp_path: Path
) -> None:
    config = f'{OPEN_SOCKET}state = "{tmp_path}/state"\n'
    (tmp_path / "state").mkdir(mode=0o700)
    with Node(start_daemon(vram=["64MiB"], config=config)) as node:
        claim = claim_of(node)
        devices = prepared_devices(node.kubelet.prepare(claim))
        before = node.daemon.socket_path.stat().st_mtime_ns
        program = f"""
import os, sys, time
address = os.environ["GPULEASE_ADDRESS"].removeprefix("unix:")
before = os.stat(address).st_mtime_ns
print("before", flush=True)
until = time.monotonic() + 60
while time.monotonic() < until:
    try:
        if os.stat(address).st_mtime_ns != before: break
    except FileNotFoundError: pass
    time.sleep(0.05)
NAME = None
for _ in range(100):
    try:
        exec('''{POD}''')
        break
    except Exception as error:
        time.sleep(0.1)
else:
    raise error
"""
        with ThreadPoolExecutor(1) as pool:
            running = pool.submit(node.run, program, (claim, devices))
            time.sleep(1.5)
            node.daemon.process.kill()
            node.daemon.process.wait()
            node.daemon._was_killed = True
            node.daemon = start_daemon(vram=["64MiB"], config=config, folder=node.daemon.folder)
            assert node.daemon.socket_path.stat().st_mtime_ns != before
            done = running.result()
        assert done.stdout == "before\nfrom a pod\n", done.stderr


# --- what the cluster is told ---


def test_a_claim_s_status_has_the_lease_of_each_device(node: Node) -> None:
    claim = claim_of(node, pod_claim="slice")
    node.kubelet.prepare(claim)
    (lease_id,) = node.lease_ids(claim)

    def entries() -> list[dict[str, Any]]:
        return list(node.api.claim(claim.namespace, claim.name)["status"].get("devices", []))

    wait_until(entries, "the status has the device", seen=node.log)
    (entry,) = entries()
    assert (entry["driver"], entry["pool"], entry["shareID"]) == (DRIVER, NODE, claim_share(node, claim))
    assert int(entry["data"]["leaseId"], 16) == lease_id
    (condition,) = entry["conditions"]
    assert (condition["type"], condition["status"], condition["reason"]) == ("Ready", "True", "LeaseActive")


def test_a_status_says_that_a_lease_was_revoked(lent_daemon: Daemon) -> None:
    with node_of_a_test(lent_daemon, "--lease-secs", "10") as node:
        claim = claim_of(node)
        node.kubelet.prepare(claim)
        (lease_id,) = node.lease_ids(claim)

        def said() -> list[tuple[str, str]]:
            devices = node.api.claim(claim.namespace, claim.name)["status"].get("devices", [])
            return [(entry["conditions"][0]["status"], entry["conditions"][0]["message"]) for entry in devices]

        wait_until(lambda: said() == [("True", f"lease {lease_id:032x}: active")], "it is active", seen=node.log)
        node.daemon.revoke(lease_id)
        wait_until(lambda: said() == [("False", f"lease {lease_id:032x}: revoked")], "it is over", seen=said)


def test_a_site_may_let_pods_lease_nothing_besides_their_claims(start_daemon: Callable[..., Daemon]) -> None:
    config = f'{OPEN_SOCKET}require_token = ["alloc"]\n'
    with Node(start_daemon(vram=["64MiB"], config=config)) as node:
        claim = claim_of(node)
        devices = prepared_devices(node.kubelet.prepare(claim))
        program = f"""
from gpulease.client import Denied, GpuBuilder
try:
    GpuBuilder().min_vram(1 << 20).lease_secs(60).acquire()
except Denied as error:
    print("denied")
NAME = None
{POD}
"""
        assert node.run(program, (claim, devices)).stdout == "denied\nfrom a pod\n"


def health(node: Node, version: str) -> list[tuple[str, int, str]]:
    """The first report of devices' health: (device, 1 healthy or 2 not or 0 unknown, message)."""
    stream = node.kubelet.call(f"stream:/{version}.DRAResourceHealth/NodeWatchResources")
    found = message(f"{version}.NodeWatchResourcesResponse").FromString(stream)
    assert all(device.device.pool_name == node.name for device in found.devices)
    return [(device.device.device_name, device.health, device.message) for device in found.devices]


def test_the_kubelet_is_told_each_device_s_health(node: Node) -> None:
    for version in ("v1", "v1alpha1"):
        assert health(node, version) == [(device_of(node.daemon), 1, "")]
    ask(Opcode.DRAIN, Drain(600_000), node.daemon.address)
    assert health(node, "v1") == [(device_of(node.daemon), 1, "drained")]
    ask(Opcode.DRAIN_CANCEL, Empty(), node.daemon.address)


def test_a_probe_says_whether_the_driver_answers(own_node: Node) -> None:
    command = [sys.executable, "-P", "-m", "gpulease.client.integrations.kubernetes", "probe"]
    command += ["--kubelet", str(own_node.folder)]

    def probe() -> subprocess.CompletedProcess[str]:
        return subprocess.run(command, capture_output=True, text=True, env=python_environment(), check=False)

    assert probe().returncode == 0
    stop_process(own_node.process.pid)
    assert "does not answer" in probe().stderr
    own_node.process.send_signal(signal.SIGCONT)


def test_the_driver_needs_its_role_and_no_more(own_node: Node) -> None:
    """Every rule of the role is used by a driver that publishes, prepares and reports."""
    claim = claim_of(own_node)
    assert isinstance(own_node.kubelet.prepare(claim), list)
    wait_until(own_node.api.slices, "it publishes")
    own_node.api.add_slice(own_node.api.slices()[0] | {"metadata": {"name": "obsolete"}})
    granted = {(verb, kind) for rule in cluster_rules() for kind in rule["resources"] for verb in rule["verbs"]}
    wait_until(lambda: own_node.api.used == granted, "all of it is used", seen=lambda: granted - own_node.api.used)


def confined(folder: Path) -> list[str]:
    """The beginning of a command that confines the driver as its DaemonSet does: in capabilities, and in its root."""
    (daemon_set,) = [
        found for found in yaml.safe_load_all((MANIFESTS / "driver.yaml").read_text()) if found["kind"] == "DaemonSet"
    ]
    (container,) = daemon_set["spec"]["template"]["spec"]["containers"]
    context = container["securityContext"]
    assert context["readOnlyRootFilesystem"] is True
    assert context["allowPrivilegeEscalation"] is False
    capabilities = ",".join(f"+{name.lower()}" for name in context["capabilities"]["add"])
    mounts = f"mount --bind {folder} {folder} && mount -o remount,bind,ro /"
    # A container's /tmp is part of its root, too.
    confine = f'{mounts} && exec setpriv --no-new-privs --bounding-set=-all,{capabilities} -- "$@"'
    return ["unshare", "--mount", "sh", "-c", confine, "sh"]


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can be confined like a container")
def test_the_driver_needs_no_more_than_its_container_has(lent_daemon: Daemon) -> None:
    if subprocess.run(["unshare", "--mount", "true"], check=False).returncode != 0:
        pytest.skip("this host permits no mount namespaces")
    with node_of_a_test(lent_daemon, confined=confined) as node:
        claim = claim_of(node)
        assert run_pod(node, claim) == "from a pod\n"
        capabilities = Path(f"/proc/{node.process.pid}/status").read_text()
        assert "CapBnd:\t00000000000000eb" in capabilities
        assert node.kubelet.unprepare(claim) == ""
