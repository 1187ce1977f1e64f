"""The driver's slices in the cluster: they are there, and as the cards are, whatever others do to them."""

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from gpulease.client.errors import Disconnected
from gpulease.client.integrations.kubernetes import slice_publisher
from gpulease.client.integrations.kubernetes.cluster import KubernetesCluster
from gpulease.client.integrations.kubernetes.cluster_refusals import ClusterRefused
from gpulease.client.integrations.kubernetes.resource_pool import PublishedCard, Trouble, device_of
from gpulease.client.integrations.kubernetes.slice_publisher import SlicePublisher, Slices
from helpers.kubernetes_api import ACCOUNT_TOKEN, KubernetesApi
from helpers.waiting import wait_until

NODE = "node-a"
GIB = 1 << 30


class Published:
    """A publisher with its server.

    Attributes:
        cards: What the node has; a test changes it.
    """

    def __init__(self, stack: ExitStack, folder: Path) -> None:
        self._stack = stack
        self.api = KubernetesApi(NODE, "node-b")
        stack.callback(self.api.close)
        (folder / "account").write_text(ACCOUNT_TOKEN)
        self._account = folder / "account"
        self.cards: list[PublishedCard] | None = [PublishedCard("GPU-0", "H200", "cuda", 80 * GIB)]
        self.messages: list[str] = []

    def cluster(self) -> KubernetesCluster:
        cluster = KubernetesCluster(self.api.url, self._account, None)
        self._stack.callback(cluster.close)
        return cluster

    def start(self, cluster: Slices | None = None) -> SlicePublisher:
        publisher = SlicePublisher(cluster or self.cluster(), NODE, self._devices, self.messages.append)
        self._stack.callback(publisher.stop)
        return publisher

    def _devices(self) -> list[dict[str, Any]]:
        if self.cards is None:
            raise Disconnected("no daemon answers")
        return list(map(device_of, self.cards))

    def is_current(self) -> bool:
        """Whether the scheduler sees these cards, as a complete pool of the node's."""
        found = [one for one in self.api.slices() if one["spec"]["nodeName"] == NODE]
        devices = [_without_times(device) for one in found for device in one["spec"]["devices"]]
        pools = [one["spec"]["pool"] for one in found]
        return (
            bool(found)
            and devices == self._devices()
            and all(pool == pools[0] and pool["resourceSliceCount"] == len(found) for pool in pools)
        )

    def wait(self, what: str) -> None:
        wait_until(self.is_current, what, seen=lambda: (self.messages, self.api.slices()))


def _without_times(device: dict[str, Any]) -> dict[str, Any]:
    if "taints" not in device:
        return device
    return device | {"taints": [{k: v for k, v in taint.items() if k != "timeAdded"} for taint in device["taints"]]}


class LateList:
    """A cluster of which one list, once `is_armed`, arrives after the watch has reported a later change."""

    def __init__(self, cluster: KubernetesCluster, api: KubernetesApi, monkeypatch: pytest.MonkeyPatch) -> None:
        self._cluster, self._api, self._monkeypatch = cluster, api, monkeypatch
        self.publisher: SlicePublisher | None = None
        self.is_armed = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._cluster, name)

    def slices(self, node: str) -> tuple[list[dict[str, Any]], str]:
        found, version = self._cluster.slices(node)
        publisher = self.publisher
        if self.is_armed and publisher is not None:
            self.is_armed = False
            self._monkeypatch.setattr(slice_publisher, "RELIST_S", 300.0)
            self._api.change(found[0]["metadata"]["name"], devices=[])
            wait_until(lambda: publisher._version > int(version), "the watch has reported the change")
        return found, version


@pytest.fixture
def published(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Published]:
    # Polls and pauses of a test's length.
    for name, seconds in (("COMPARE_S", 0.05), ("WRITE_GAP_S", 0.0), ("FIRST_PAUSE_S", 0.01)):
        monkeypatch.setattr(slice_publisher, name, seconds)
    with ExitStack() as stack:
        yield Published(stack, tmp_path)


def test_a_list_that_arrives_after_a_later_event_does_not_hide_it(
    published: Published, monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster = published.cluster()
    late = LateList(cluster, published.api, monkeypatch)
    late.publisher = published.start(late)
    published.wait("the slice is there")
    late.is_armed = True
    monkeypatch.setattr(slice_publisher, "RELIST_S", 0.0)
    wait_until(lambda: not late.is_armed, "it has listed")
    published.wait("it is restored")


def test_the_node_s_cards_are_published_with_the_node_as_their_owner(published: Published) -> None:
    published.start()
    published.wait("the slice is there")
    (found,) = published.api.slices()
    (owner,) = found["metadata"]["ownerReferences"]
    uid = published.api.add_node("node-c")
    assert (owner["kind"], owner["name"], owner["controller"]) == ("Node", NODE, True)
    assert uid != owner["uid"]
    assert published.messages == []


def test_slices_that_the_kubelet_deletes_are_published_again(published: Published) -> None:
    published.start()
    for _ in range(3):
        published.wait("the slice is there")
        assert published.api.wipe() == 1
    published.wait("the slice is there again")


@pytest.mark.parametrize(
    "change",
    [
        {"devices": []},
        {"pool": {"name": NODE, "generation": 9, "resourceSliceCount": 2}},
        {"devices": [device_of(PublishedCard("GPU-9", "made up", "cuda", GIB))]},
    ],
)
def test_a_slice_that_somebody_changes_is_restored(published: Published, change: dict[str, Any]) -> None:
    published.start()
    published.wait("the slice is there")
    (found,) = published.api.slices()
    published.api.change(found["metadata"]["name"], **change)
    published.wait("it is restored")
    assert published.messages == []


def test_writers_that_come_in_between_end_in_the_cards_as_they_are(published: Published) -> None:
    publisher = published.start()
    published.wait("the slice is there")
    (found,) = published.api.slices()
    name = found["metadata"]["name"]
    for number in range(40):
        # Each change of the node meets a change of somebody else, and some meet a deletion: writes are refused with 409
        # and 404, and decided again.
        published.cards = [PublishedCard("GPU-0", "H200", "cuda", (40 + number) * GIB)]
        if any(one["metadata"]["name"] == name for one in published.api.slices()):
            published.api.change(name, devices=[])
        if number % 10 == 9:
            published.api.wipe()
    published.wait("the cards are there")
    assert publisher.is_alive


def test_slices_of_others_stay_and_obsolete_ones_go(published: Published) -> None:
    published.start()
    published.wait("the slice is there")
    (found,) = published.api.slices()

    def copy(name: str, **spec: Any) -> None:
        published.api.add_slice(found | {"metadata": {"name": name}, "spec": found["spec"] | spec})

    copy("other-driver", driver="nic.example")
    copy("other-node", nodeName="node-b")
    copy("of-an-earlier-version")
    names = {found["metadata"]["name"], "other-driver", "other-node"}
    wait_until(lambda: {one["metadata"]["name"] for one in published.api.slices()} == names, "the obsolete one goes")


def test_what_changes_on_the_node_is_published(published: Published) -> None:
    published.start()
    for cards in (
        [PublishedCard("GPU-0", "H200", "cuda", 20 * GIB)],
        [PublishedCard("GPU-0", "H200", "cuda", 20 * GIB, (Trouble.DRAINED,))],
        [PublishedCard(f"GPU-{number}", "H200", "cuda", 20 * GIB) for number in range(130)],
        [],
        [PublishedCard("GPU-0", "H200", "cuda", 80 * GIB)],
    ):
        published.cards = cards
        published.wait("the cards are there")
    assert published.messages == []


def test_nothing_is_written_while_nothing_changes(published: Published) -> None:
    published.cards = [PublishedCard(f"GPU-{number}", "H200", "cuda", 20 * GIB, (Trouble.SICK,)) for number in range(3)]
    published.start()
    published.wait("the slice is there")
    writes, comparisons = published.api.writes, []
    published._devices = lambda: comparisons.append(1) or list(map(device_of, published.cards or ()))  # type: ignore[method-assign, func-returns-value]
    second = published.start()
    wait_until(lambda: len(comparisons) > 5, "a second driver has compared")
    second.stop()
    assert published.api.writes == writes


def test_a_history_that_is_forgotten_costs_nothing(published: Published) -> None:
    published.start()
    published.wait("the slice is there")
    published.api.compact()
    published.api.wipe()
    published.wait("it is there again")
    assert published.messages == []


def test_a_watch_that_the_server_ends_is_continued(published: Published) -> None:
    published.start()
    published.wait("the slice is there")
    wait_until(lambda: published.api.watches == 1, "the driver watches")
    published.api.end_watches()
    wait_until(lambda: published.api.watches == 2, "the driver watches again")
    published.api.wipe()
    published.wait("the slice is there again")
    assert published.messages == []


def test_a_node_that_was_created_again_owns_its_slices(published: Published) -> None:
    published.start()
    published.wait("the slice is there")
    uid = published.api.add_node(NODE)

    def owners() -> list[str]:
        return [one["metadata"]["ownerReferences"][0]["uid"] for one in published.api.slices()]

    wait_until(lambda: owners() == [uid], "the new node owns it", seen=lambda: published.messages)


def test_an_api_server_that_was_away_is_used_again(published: Published) -> None:
    published.api.is_down = True
    published.start()
    wait_until(lambda: published.messages, "the problem is reported")
    published.cards = [PublishedCard("GPU-0", "H200", "cuda", 40 * GIB)]
    published.api.is_down = False
    published.wait("the slice is there")
    # Once, not at every attempt.
    assert len(set(published.messages)) == len(published.messages)


def test_a_daemon_that_never_answered_takes_no_slice_away(published: Published) -> None:
    first = published.start()
    published.wait("the slice is there")
    first.stop()
    cards, published.cards = published.cards, None
    published.start()
    wait_until(lambda: "no daemon answers" in str(published.messages), "the problem is reported")
    assert len(published.api.slices()) == 1
    published.cards = cards
    published.wait("it is as it was")


@pytest.mark.parametrize(
    ("gate", "field"), [("DRAConsumableCapacity", "allowMultipleAllocations"), ("DRADeviceTaints", "taints")]
)
def test_a_cluster_without_a_feature_is_named_and_not_written_to_for_ever(
    published: Published, gate: str, field: str
) -> None:
    published.api.gates.discard(gate)
    published.cards = [PublishedCard("GPU-0", "H200", "cuda", 80 * GIB, (Trouble.DRAINED,))]
    published.start()
    wait_until(lambda: gate in str(published.messages), "the message", seen=lambda: published.messages)
    assert f"dropped {field}" in str(published.messages)
    published.api.wipe()
    wait_until(published.api.slices, "it is published all the same")
    writes = published.api.writes
    comparisons: list[int] = []
    before = published._devices
    published._devices = lambda: comparisons.append(1) or before()  # type: ignore[method-assign, func-returns-value]
    published.api.compact()
    wait_until(lambda: published.api.slices(), "it stays")
    assert published.api.writes <= writes + 1
    assert len(published.messages) == 1


def test_an_account_without_its_role_is_told_which(published: Published, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(published.api, "_rules", [])
    published.start()
    wait_until(lambda: published.messages, "the problem is reported")
    assert "403" in published.messages[0]
    assert "ClusterRole" in published.messages[0]


def test_the_account_s_token_never_goes_in_the_clear() -> None:
    for url in ("http://api.example:6443", "ftp://127.0.0.1", "api.example"):
        with pytest.raises(ClusterRefused, match="must be https"):
            KubernetesCluster(url, None, None)


def test_a_token_that_the_kubelet_replaced_is_read_again(
    published: Published, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    published.start()
    published.wait("the slice is there")
    monkeypatch.setattr("helpers.kubernetes_api.ACCOUNT_TOKEN", "next token")
    # As a whole, as the kubelet replaces a projected token: a reader never finds half of one.
    (tmp_path / "next").write_text("next token")
    (tmp_path / "next").replace(tmp_path / "account")
    published.api.wipe()
    published.wait("it is there again")
