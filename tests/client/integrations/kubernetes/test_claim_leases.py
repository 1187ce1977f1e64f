"""Concurrent requests about claims, on a real daemon: those about the same claim take turns."""

import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from gpulease.client.integrations.kubernetes.claim_leases import ClaimLeases
from gpulease.client.integrations.kubernetes.cluster import KubernetesCluster
from gpulease.client.integrations.kubernetes.kubelet_plugin import ClaimRef
from gpulease.client.integrations.kubernetes.node_files import NodeFiles
from gpulease.client.integrations.kubernetes.resource_pool import device_name
from helpers.daemon import Daemon, Faults
from helpers.kubelet import NODE, Claim
from helpers.kubernetes_api import ACCOUNT_TOKEN, KubernetesApi
from helpers.waiting import wait_until


@pytest.fixture
def api() -> Iterator[KubernetesApi]:
    server = KubernetesApi(NODE)
    yield server
    server.close()


@pytest.mark.exhaustive
def test_a_claim_that_waits_for_its_proof_holds_up_no_other_s_lease(
    start_daemon: Callable[..., Daemon], tmp_path: Path, api: KubernetesApi
) -> None:
    withheld = tmp_path / "withheld"
    config = 'socket_mode = "0666"\n[limits]\nreclaim_timeout_s = 60\n'
    daemon = start_daemon(vram=["64MiB"], config=config, faults=Faults(withhold_proof_while=withheld))
    daemon.folder.chmod(0o711)
    account = tmp_path / "account"
    account.write_text(ACCOUNT_TOKEN)
    reader = KubernetesCluster(api.url, account, None)
    files = NodeFiles(tmp_path / "state", tmp_path / "cdi")
    leases = ClaimLeases(daemon.address, NODE, files, reader, print, lease_s=600)
    device = device_name(daemon.inventory().details[0]["uuid"])
    slow, other = (Claim({"gpu": (device, "8Mi")}, name=name) for name in ("slow", "other"))
    refs = [ClaimRef(claim.namespace, claim.uid, claim.name) for claim in (slow, other)]
    for claim, ref in zip((slow, other), refs, strict=True):
        api.add_claim(claim.as_object())
        leases.prepare(ref)
    withheld.touch()
    waits = threading.Thread(target=leases.unprepare, args=(refs[0],))
    waits.start()
    try:
        wait_until(lambda: "draining" in [lease["state"] for lease in daemon.leases()], "one lease ends")
        leases.keep()
        assert api.claim(other.namespace, other.name)["status"]["devices"]
        assert waits.is_alive()
    finally:
        withheld.unlink()
        waits.join()
    leases.unprepare(refs[1])
    reader.close()
    assert daemon.available_bytes() == 64 << 20
    daemon.allowed_trouble.append("the test withholds the proof")
