"""The client of etcd on a network that is cut in every way. Each of the three members has its own namespace."""

import json
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Final

import pytest

from helpers.daemon import python_environment
from helpers.etcd_cluster import EtcdCluster, need_etcd
from helpers.network_namespaces import Network
from helpers.waiting import wait_until

MEMBERS: Final = ("m0", "m1", "m2")
NODES: Final = ("d0", "d1", "d2")
PROGRESS: Final = 5
"""Outcomes that each writer must have during a fault."""


class Contest:
    """Writers on separate hosts, and the lines that they have written."""

    def __init__(self, network: Network, cluster: EtcdCluster, folder: Path) -> None:
        self.network, self.cluster, self._folder = network, cluster, folder
        self._writers: dict[str, subprocess.Popen[bytes]] = {}

    def __enter__(self) -> "Contest":
        for node in NODES:
            self._writers[node] = self._start(node, node)
        return self

    def __exit__(self, *_: object) -> None:
        for writer in self._writers.values():
            writer.kill()
            writer.wait(60)

    def outcomes(self, node: str) -> list[dict[str, Any]]:
        """Return the outcomes that a writer has recorded. The last line is left out if it is incomplete."""
        path = self._folder / node
        lines = path.read_text().split("\n")[:-1] if path.exists() else []
        return [json.loads(line) for line in lines]

    def history(self) -> list[dict[str, Any]]:
        """Return all writes to the store, in their order."""
        reader = self._start(NODES[0], "history")
        try:
            assert reader.wait(60) == 0
        finally:
            reader.kill()
            reader.wait(60)
        return self.outcomes("history")

    def wait_for_progress(self, nodes: tuple[str, ...], outcome: str = "") -> None:
        """Wait until each of these writers has PROGRESS more outcomes, or more of one kind."""

        def counts() -> dict[str, int]:
            return {
                node: sum(outcome in (told["outcome"], "") for told in self.outcomes(node))
                for node in nodes
                if self._writers[node].poll() is None
            }

        before = counts()
        assert tuple(before) == nodes
        wanted = 1 if outcome else PROGRESS
        wait_until(
            lambda: all(count >= before[node] + wanted for node, count in counts().items()),
            f"writers on {nodes} go on ({outcome or 'any outcome'})",
            seen=counts,
        )

    def _start(self, node: str, name: str) -> subprocess.Popen[bytes]:
        endpoints = ",".join(self.cluster.endpoints)
        program = [sys.executable, "-P", "-m", "helpers.etcd_contender", endpoints, name, str(self._folder / name)]
        return subprocess.Popen(
            [*self.network.within(node), *program], stdin=subprocess.DEVNULL, env=python_environment()
        )


@pytest.fixture
def contest(tmp_path: Path) -> Iterator[Contest]:
    need_etcd()
    with ExitStack() as stack:
        network = stack.enter_context(Network((*MEMBERS, *NODES)))
        places = [(network.address(member), network.within(member)) for member in MEMBERS]
        cluster = stack.enter_context(EtcdCluster(tmp_path, 3, places=places))
        yield stack.enter_context(Contest(network, cluster, tmp_path))


def leader_paused(contest: Contest) -> None:
    leader = contest.cluster.leader()
    contest.cluster.pause(leader)
    contest.wait_for_progress(NODES)
    contest.cluster.resume(leader)


def leader_killed(contest: Contest) -> None:
    leader = contest.cluster.leader()
    contest.cluster.kill(leader)
    contest.wait_for_progress(NODES)
    contest.cluster.restart(leader)


def leader_cut_from_members(contest: Contest) -> None:
    leader = contest.cluster.leader().name
    contest.network.cut((leader,), MEMBERS)
    contest.wait_for_progress(NODES)


def leader_s_words_lost(contest: Contest) -> None:
    leader = contest.cluster.leader().name
    contest.network.cut_one_way((leader,), (*MEMBERS, *NODES))
    contest.wait_for_progress(NODES)


def member_unplugged(contest: Contest) -> None:
    contest.network.cut_off(contest.cluster.follower().name)
    contest.wait_for_progress(NODES)


def answers_to_a_node_lost(contest: Contest) -> None:
    contest.network.cut_one_way(MEMBERS, NODES[:1])
    contest.wait_for_progress(NODES[1:])


def node_unplugged(contest: Contest) -> None:
    contest.network.cut_off(NODES[1])
    contest.wait_for_progress((NODES[0], NODES[2]))


FAULTS: Final[tuple[Callable[[Contest], None], ...]] = (
    answers_to_a_node_lost,
    node_unplugged,
    leader_paused,
    leader_cut_from_members,
    leader_s_words_lost,
    member_unplugged,
    leader_killed,
)


@pytest.mark.exhaustive
def test_no_outcome_is_wrong_and_no_write_done_twice(contest: Contest) -> None:
    contest.wait_for_progress(NODES)
    for fault in FAULTS:
        fault(contest)
        contest.network.heal()
        # Wait until writes of all writers succeed again.
        contest.wait_for_progress(NODES, "TransactionAnswer")
    told = [outcome for node in NODES for outcome in contest.outcomes(node)]
    history = contest.history()
    revisions = {change["nonce"]: change["revision"] for change in history}
    assert len(revisions) == len(history), "a write was done twice"
    kinds = Counter((each["outcome"], each.get("succeeded")) for each in told)
    assert {("TransactionAnswer", True), ("TransactionAnswer", False), ("Unknown", None)} <= set(kinds), kinds
    for each in (each for each in told if each["nonce"] is not None):
        if each["outcome"] == "TransactionAnswer" and each["succeeded"]:
            assert revisions.get(each["nonce"]) == each["revision"], each
        elif each["outcome"] != "Unknown":
            assert each["nonce"] not in revisions, each
    check_order(told)


def check_order(told: list[dict[str, Any]]) -> None:
    """Fail unless a write that was sent after another one's reply has a higher revision."""
    written = [each for each in told if each.get("succeeded")]
    by_done = sorted(written, key=lambda each: each["done_ns"])
    newest, position = 0, 0
    for each in sorted(written, key=lambda each: each["sent_ns"]):
        while position < len(by_done) and by_done[position]["done_ns"] < each["sent_ns"]:
            newest = max(newest, by_done[position]["revision"])
            position += 1
        assert each["revision"] > newest, each
