"""The DRA driver as a process, on a real daemon, called over gRPC like a kubelet does."""

import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import uuid
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from gpulease.client import Busy
from gpulease.client.integrations.kubernetes.resource_pool import device_name
from gpulease.client.sync.driver import ask
from gpulease.protocol import Opcode
from gpulease.protocol.messages import Drain, Empty, FenceClear, LeaseRef
from helpers.daemon import Daemon, Faults, python_environment
from helpers.kubelet import NODE, POD_USER, CallFailed, Claim, Device, Node, encode
from helpers.waiting import wait_until

CARD_BYTES = 64 << 20
OPEN_SOCKET = 'socket_mode = "0666"\n'

TROUBLE = ["the test withholds the proof", "fenced", "fence"]

POD = """
import os, sys
from gpulease.client import GpuSession
user, path, address = int(sys.argv[1]), sys.argv[2], sys.argv[3]
token = open(path).read()
if user != os.geteuid():
    os.setgroups([])
    os.setresgid(user, user, user)
    os.setresuid(user, user, user)
session = GpuSession.attach(token, address)
buffer = session.mem_alloc(64)
session.mem_write(buffer, 0, b"from a pod")
print(bytes(session.mem_read(buffer, 0, 10)).decode())
session.close()
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


@pytest.fixture
def own_node(start_daemon: Callable[..., Daemon]) -> Iterator[Node]:
    """A node of this test alone, which may restart the node's driver."""
    with Node(start_daemon(vram=["64MiB"], config=OPEN_SOCKET)) as node:
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


def run_pod(node: Node, claim: Claim) -> str:
    token = node.state / "tokens" / claim.uid / "token-0"
    command = [sys.executable, "-P", "-c", POD, str(POD_USER), str(token), node.daemon.address]
    done = subprocess.run(command, capture_output=True, text=True, env=python_environment(), check=False)
    return done.stdout + done.stderr


def test_a_prepared_claim_is_a_lease_that_its_pod_uses_by_a_token(node: Node) -> None:
    claim = claim_of(node)
    prepared = node.kubelet.prepare(claim)
    assert isinstance(prepared, list)
    (device,) = prepared
    assert (device.requests, device.pool, device.name) == (["gpu"], NODE, device_of(node.daemon))
    assert device.share_id == claim_share(node, claim)
    (lease_id,) = node.lease_ids(claim)
    report = node.daemon.query(lease_id)
    assert (report["state"], report["size_bytes"]) == ("active", 16 << 20)
    assert 500_000 < report["remaining_ms"] <= 600_000
    assert run_pod(node, claim) == "from a pod\n"
    assert node.kubelet.unprepare(claim) == ""
    assert node.daemon.query(lease_id)["state"] == "torndown"
    assert node.daemon.available_bytes() == CARD_BYTES
    assert not list(node.cdi.iterdir())
    assert not list((node.state / "tokens").iterdir())


def claim_share(node: Node, claim: Claim) -> str:
    found = node.api.claim(claim.namespace, claim.name)
    return str(found["status"]["allocation"]["devices"]["results"][0]["shareID"])


def test_a_container_gets_the_socket_a_token_and_no_device_node(node: Node) -> None:
    claim = claim_of(node)
    (device,) = prepared_devices(node.kubelet.prepare(claim))
    spec = node.spec(claim)
    assert device.cdi_ids == [f"{spec['kind']}={spec['devices'][0]['name']}"]
    socket, tokens = spec["containerEdits"]["mounts"]
    assert spec["containerEdits"]["env"] == ["GPULEASE_ADDRESS=unix:/run/gpulease/d.sock"]
    assert (socket["hostPath"], socket["containerPath"]) == (str(node.daemon.socket_path), "/run/gpulease/d.sock")
    assert all("ro" in mount["options"] for mount in (socket, tokens))
    env = spec["devices"][0]["containerEdits"]["env"]
    inside = f"{tokens['containerPath']}/token-0"
    assert env == [f"GPULEASE_TOKEN_FILE={inside}", f"GPULEASE_TOKEN_FILE_GPU={inside}"]
    token = Path(tokens["hostPath"]) / "token-0"
    assert (token.stat().st_uid, token.stat().st_mode & 0o777) == (POD_USER, 0o400)
    assert "deviceNodes" not in json.dumps(spec)
    assert "/dev" not in json.dumps(spec)


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


@pytest.mark.parametrize("kill", [True, pytest.param(False, marks=pytest.mark.exhaustive)])
def test_a_driver_that_starts_again_knows_what_it_prepared(own_node: Node, kill: bool) -> None:
    claim = claim_of(own_node)
    first = own_node.kubelet.prepare(claim)
    lease_ids = own_node.lease_ids(claim)
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
def hanging_node(start_daemon: Callable[..., Daemon]) -> Iterator[Node]:
    """A node with a driver that hangs while it writes records, for as long as the test wants."""
    with Node(start_daemon(vram=["64MiB"], config=OPEN_SOCKET), may_hang=True) as node:
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
    assert not (node.state / "claims" / f"{claim.uid}.json").exists()
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
def test_a_claim_that_is_not_ready_is_prepared_anew(own_node: Node) -> None:
    """The record of a claim that is not ready names leases that were never reported to the kubelet."""
    claim = claim_of(own_node, None)
    assert isinstance(own_node.kubelet.prepare(claim), list)
    (early,) = own_node.lease_ids(claim)
    own_node.stop(kill=True)
    path = own_node.state / "claims" / f"{claim.uid}.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"is_ready": False}))
    own_node.start()
    assert isinstance(own_node.kubelet.prepare(claim), list)
    assert own_node.daemon.query(early)["state"] == "torndown"
    assert own_node.lease_ids(claim) != [early]


@pytest.mark.exhaustive
def test_a_record_that_can_t_be_read_keeps_no_other_pod_from_its_tokens(own_node: Node) -> None:
    claim = claim_of(own_node)
    assert isinstance(own_node.kubelet.prepare(claim), list)
    own_node.stop(kill=True)
    records = own_node.state / "claims"
    good = json.loads((records / f"{claim.uid}.json").read_text())
    nested = "[" * 100_000
    texts = ("", "{}", nested, json.dumps(good | {"user": "root"}), json.dumps(good | {"audience": "no digits"}))
    bad = [Claim({}, uid=str(uuid.UUID(int=number))) for number in range(len(texts))]
    for one, text in zip(bad, texts, strict=True):
        (records / f"{one.uid}.json").write_text(text.replace(claim.uid, one.uid))
    token = own_node.state / "tokens" / claim.uid / "token-0"
    token.unlink()
    own_node.start()
    assert token.exists()
    for one in bad:
        path = records / f"{one.uid}.json"
        assert str(path) in own_node.log()
        assert str(path) in str(own_node.kubelet.prepare(one))
        assert str(path) in own_node.kubelet.unprepare(one)
    assert own_node.kubelet.unprepare(claim) == ""


@pytest.mark.exhaustive
def test_a_token_that_can_t_be_written_keeps_no_other_pod_from_its_own(own_node: Node) -> None:
    claims = [claim_of(own_node, name=name) for name in ("one", "two")]
    for claim in claims:
        assert isinstance(own_node.kubelet.prepare(claim), list)
    first, second = sorted(claims, key=lambda claim: claim.uid)
    own_node.stop()
    tokens = own_node.state / "tokens"
    shutil.rmtree(tokens / first.uid)
    (tokens / first.uid).write_text("a file where a folder belongs")
    (tokens / second.uid / "token-0").unlink()
    own_node.start()
    assert (tokens / second.uid / "token-0").exists()
    assert f"claim {first.uid}: no new token" in own_node.log()
    # A token that stays is told, too, and the claim is not forgotten.
    assert "Not a directory" in own_node.kubelet.unprepare(first)
    assert (own_node.state / "claims" / f"{first.uid}.json").exists()
    (tokens / first.uid).unlink()
    for claim in claims:
        assert own_node.kubelet.unprepare(claim) == ""


@pytest.mark.exhaustive
def test_a_busy_daemon_costs_no_pod_its_token(start_daemon: Callable[..., Daemon]) -> None:
    most = 3
    few = Faults(constants={"gpulease.daemon.broker.connection_limiter:OPERATOR_CONNECTIONS": 0})
    config = f"max_connections = {most}\n{OPEN_SOCKET}"
    with Node(start_daemon(vram=["64MiB"], config=config, faults=few)) as node, ExitStack() as held:
        claim = claim_of(node)
        assert isinstance(node.kubelet.prepare(claim), list)
        node.stop()
        token = node.state / "tokens" / claim.uid / "token-0"
        before = token.read_text()
        for _ in range(most):
            wait_until(partial(has_room, node.daemon, held), "a connection is free")
        node.start()
        assert "no new token for lease" in node.log()
        assert token.read_text() == before
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
    assert "other leases hold the memory" in told
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
        ({"user": POD_USER, "leaseSeconds": 10**9}, "leaseSeconds"),
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
def test_a_claim_of_another_boot_is_prepared_anew(own_node: Node, start_daemon: Callable[..., Daemon]) -> None:
    claim = claim_of(own_node, None)
    assert isinstance(own_node.kubelet.prepare(claim), list)
    (early,) = own_node.lease_ids(claim)
    own_node.stop(kill=True)
    own_node.daemon.kill()
    own_node.daemon.check_nothing_is_left()
    # What a boot leaves: the disk. Specifications lie in memory on many hosts.
    shutil.rmtree(own_node.cdi)
    record = own_node.state / "claims" / f"{claim.uid}.json"
    of_boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    assert of_boot in record.read_text()
    record.write_text(record.read_text().replace(of_boot, str(uuid.uuid4())))
    own_node.daemon = start_daemon(vram=["64MiB"], config=OPEN_SOCKET, folder=own_node.daemon.folder)
    own_node.start()
    assert isinstance(own_node.kubelet.prepare(claim), list)
    assert own_node.lease_ids(claim) != [early]
    assert run_pod(own_node, claim) == "from a pod\n"
    assert own_node.kubelet.unprepare(claim) == ""


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


def test_a_drained_node_s_cards_are_tainted(node: Node) -> None:
    def taints() -> set[str]:
        return {
            taint["key"]
            for found in node.api.slices()
            for device in found["spec"]["devices"]
            for taint in device.get("taints", [])
        }

    ask(Opcode.DRAIN, Drain(600_000), node.daemon.address)
    wait_until(lambda: taints() == {"gpulease.internal/drained"}, "the taint is there", seen=node.log)
    ask(Opcode.DRAIN_CANCEL, Empty(), node.daemon.address)
    wait_until(lambda: not taints(), "it is gone", seen=node.log)
