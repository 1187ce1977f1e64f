"""Acquires in a fleet, on both APIs: who is asked, in which order, how often, and what an error tells."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from gpulease.client import (
    Busy,
    CapacityExceeded,
    Denied,
    Disconnected,
    Drained,
    GpuBuilder,
    GpuExclusivityClass,
    InvalidRequest,
    aio,
)
from gpulease.client.core import exchange, fleet_acquire, lease
from gpulease.client.core.fleet_acquire import ROUND_PAUSE_S, WAIT_SLICE_S
from gpulease.protocol import Exclusivity, Failure, Opcode, Request, Status
from gpulease.protocol.lease_options import LABELS, LEASE_NAME, REQUEST_ID
from gpulease.protocol.messages import Body, Candidate, LeaseAlloc, Place, Placement
from helpers.client_faces import Face, Scenario
from helpers.scripted_peer import HangUp, Refusal, SayGoodbye, ScriptedPeer, Silence, scripted_peer

Run = Callable[[Scenario], None]


class MadeFleet:
    """A directory and its nodes, all of them made up.

    Attributes:
        places: The requests for places that the directory has heard.
        holder: The node that serves the name, as the directory says.
    """

    def __init__(self, peers: dict[str, ScriptedPeer], folder: Path) -> None:
        self.directory, self.nodes = peers.pop("directory"), peers
        self.addresses = {name: peer.address for name, peer in peers.items()}
        self.addresses["gone"] = f"unix:{folder}/gone"
        self.address = f"fleet:{self.directory.address}"
        self.places: list[Place] = []
        self.order: list[str] = []
        self.holder: str | None = None
        self.directory.script[Opcode.PLACE] = self._place

    def _place(self, request: Request) -> Body:
        body: Place = request.body  # type: ignore[assignment]
        self.places.append(body)
        left = [name for name in self.order if name not in body.tried]
        candidates = tuple(Candidate(name, (self.addresses[name],)) for name in left)
        return Placement(candidates, self.holder, len(self.order), "" if left else f"{len(body.tried)} asked already")

    def refuse(self, node: str, status: Status, message: str) -> None:
        """Have a node refuse every acquire."""

        def refuse(request: Request) -> Body:
            raise Refusal(Failure(status, message))

        self.nodes[node].script[Opcode.LEASE_ALLOC] = refuse

    def asked(self, node: str) -> list[LeaseAlloc]:
        """The acquires that a node has heard."""
        return [request.body for request in self.nodes[node].heard if isinstance(request.body, LeaseAlloc)]


@pytest.fixture
def fleet(tmp_path: Path) -> Iterator[MadeFleet]:
    with ExitStack() as stack:
        names = ("directory", "n1", "n2")
        peers = {name: stack.enter_context(scripted_peer(tmp_path / name)) for name in names}
        yield MadeFleet(peers, tmp_path)


def builder(face: Face, address: str) -> GpuBuilder | aio.GpuBuilder:
    kind = GpuBuilder if face.name == "blocking" else aio.GpuBuilder
    return kind(address).min_vram(1 << 20)


def named(wish: GpuBuilder | aio.GpuBuilder) -> GpuBuilder | aio.GpuBuilder:
    """Ask for the name model-a, on a node with a label."""
    return wish.name("model-a").labels(zone="a")


def request_ids(*asked: LeaseAlloc) -> set[bytes]:
    found = [one.value for body in asked for one in body.parameters if one.tag == REQUEST_ID.tag]
    assert len(found) == len(asked)
    assert all(len(value) == 16 and any(value) for value in found)
    return set(found)


def test_the_first_node_that_grants_is_the_lease_s(run: Run, fleet: MadeFleet) -> None:
    fleet.order = ["n1", "n2"]

    async def scenario(face: Face) -> None:
        wish = builder(face, fleet.address).exclusivity(GpuExclusivityClass.DEVICE_EXCLUSIVE).device(1)
        lease = await face.acquire(wish)
        assert lease.address == fleet.nodes["n1"].address
        await lease.renew(5)
        await lease.free()
        again = await lease.reacquire()
        await again.free()
        first, second = fleet.asked("n1")
        assert len(request_ids(first, second)) == 2
        assert fleet.places == [Place(1 << 20, Exclusivity.DEVICE_EXCLUSIVE, "", (), "1", ())] * 2
        assert fleet.asked("n2") == []

    run(scenario)


@pytest.mark.parametrize(
    "status",
    [Status.CAPACITY_EXCEEDED, Status.BUSY, Status.DRAINED, Status.FENCED, Status.UNSUPPORTED, Status.SESSION_FAILED],
)
def test_a_node_that_can_t_is_passed_over_by_one_request_id(run: Run, fleet: MadeFleet, status: Status) -> None:
    fleet.order = ["gone", "n1", "n2"]
    fleet.refuse("n1", status, "not here")

    async def scenario(face: Face) -> None:
        lease = await face.acquire(builder(face, fleet.address))
        assert lease.address == fleet.nodes["n2"].address
        assert len(request_ids(*fleet.asked("n1"), *fleet.asked("n2"))) == 1
        assert len(fleet.asked("n1")) == len(fleet.asked("n2")) == 1
        await lease.free()

    run(scenario)


def test_a_request_that_makes_no_sense_is_asked_nowhere_else(run: Run, fleet: MadeFleet) -> None:
    fleet.order = ["n1", "n2"]
    fleet.refuse("n1", Status.INVALID_REQUEST, "a lease of no bytes")

    async def scenario(face: Face) -> None:
        with pytest.raises(InvalidRequest, match="a lease of no bytes"):
            await face.acquire(builder(face, fleet.address))
        assert fleet.asked("n2") == []

    run(scenario)


@pytest.mark.parametrize(
    ("statuses", "error"),
    [
        ((Status.DRAINED, Status.DRAINED), Drained),
        ((Status.DENIED, Status.DENIED), Denied),
        ((Status.DRAINED, Status.CAPACITY_EXCEEDED), CapacityExceeded),
        ((Status.BUSY, Status.CAPACITY_EXCEEDED), CapacityExceeded),
    ],
)
def test_an_error_tells_how_many_were_asked_and_why_each_refused(
    run: Run, fleet: MadeFleet, statuses: tuple[Status, Status], error: type[Exception]
) -> None:
    fleet.order = ["n1", "n2"]
    fleet.refuse("n1", statuses[0], "the first reason.")
    fleet.refuse("n2", statuses[1], "another reason.")

    async def scenario(face: Face) -> None:
        with pytest.raises(error) as refused:
            await face.acquire(builder(face, fleet.address))
        told = "2 nodes were asked, and none of them granted the lease: n1: the first reason; n2: another reason"
        assert told in str(refused.value)
        assert type(refused.value) is error
        assert [place.tried for place in fleet.places[-2:]] == [(), ("n1", "n2")]

    run(scenario)


def test_a_fleet_without_a_fitting_node_is_full(run: Run, fleet: MadeFleet) -> None:
    fleet.order = []

    async def scenario(face: Face) -> None:
        with pytest.raises(CapacityExceeded, match="0 of the fleet's 0 nodes were asked"):
            await face.acquire(builder(face, fleet.address))

    run(scenario)


def test_a_node_whose_answer_was_lost_is_asked_again_before_another(run: Run, fleet: MadeFleet) -> None:
    fleet.order = ["n1", "n2"]
    node = fleet.nodes["n1"]

    async def scenario(face: Face) -> None:
        def hang_up_once(request: Request) -> Body:
            del node.script[Opcode.LEASE_ALLOC]
            raise HangUp

        node.heard.clear()
        node.script[Opcode.LEASE_ALLOC] = hang_up_once
        lease = await face.acquire(builder(face, fleet.address))
        assert lease.address == node.address
        assert len(fleet.asked("n1")) == 2
        assert len(request_ids(*fleet.asked("n1"))) == 1
        assert fleet.asked("n2") == []
        await lease.free()

    run(scenario)


def test_a_connection_that_is_refused_does_not_stand_for_the_lost_answer(run: Run, fleet: MadeFleet) -> None:
    fleet.order = ["n1", "n2"]
    node = fleet.nodes["n1"]

    async def scenario(face: Face) -> None:
        goodbyes = []

        def turn_away(request: Request) -> Body:
            goodbyes.append(request)
            if len(goodbyes) == 2:
                del node.script[Opcode.HELLO]
            raise SayGoodbye(Failure(Status.BUSY, "there are too many connections"))

        def hang_up_once(request: Request) -> Body:
            del node.script[Opcode.LEASE_ALLOC]
            node.script[Opcode.HELLO] = turn_away
            raise HangUp

        node.heard.clear()
        node.script[Opcode.LEASE_ALLOC] = hang_up_once
        lease = await face.acquire(builder(face, fleet.address))
        assert (lease.address, len(goodbyes)) == (node.address, 2)
        assert fleet.asked("n2") == []
        await lease.free()

    run(scenario)


def test_a_refusal_after_a_lost_answer_says_that_nothing_was_granted(run: Run, fleet: MadeFleet) -> None:
    fleet.order = ["n1", "n2"]
    node = fleet.nodes["n1"]

    async def scenario(face: Face) -> None:
        def hang_up_once(request: Request) -> Body:
            fleet.refuse("n1", Status.BUSY, "this node has not joined its fleet")
            raise HangUp

        node.heard.clear()
        fleet.nodes["n2"].heard.clear()
        node.script[Opcode.LEASE_ALLOC] = hang_up_once
        lease = await face.acquire(builder(face, fleet.address))
        assert lease.address == fleet.nodes["n2"].address
        assert len(fleet.asked("n1")) == 2
        assert len(request_ids(*fleet.asked("n1"), *fleet.asked("n2"))) == 1
        await lease.free()

    run(scenario)


@pytest.fixture
def asked_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have daemons asked at once whether they live, and given more time to answer than a slow host takes."""
    monkeypatch.setattr(exchange, "PING_AFTER_S", 0.01)
    monkeypatch.setattr(fleet_acquire, "NODE_LIMIT_S", 60.0)


def hang(peer: ScriptedPeer) -> None:
    """Have a daemon answer no acquire and nothing beside it, as a process that was stopped."""
    peer.on(Opcode.LEASE_ALLOC, Silence())
    peer.on(Opcode.PING, Silence())


@pytest.mark.usefixtures("asked_soon")
@pytest.mark.parametrize("is_named", [False, True])
def test_a_node_that_hangs_is_left_for_another(
    run: Run, fleet: MadeFleet, is_named: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fleet_acquire, "NODE_LIMIT_S", 0.5)
    fleet.order = ["n1", "n2"]
    hang(fleet.nodes["n1"])
    fleet.nodes["n2"].report = {"name": "model-a", "epoch": 8}

    async def scenario(face: Face) -> None:
        for node in fleet.nodes.values():
            node.heard.clear()
        # A slow host's other node may be taken for one that hangs, too, and is asked once more.
        wish = builder(face, fleet.address).timeout(60)
        lease = await face.acquire(named(wish) if is_named else wish)
        assert lease.address == fleet.nodes["n2"].address
        assert len(request_ids(*fleet.asked("n1"), *fleet.asked("n2"))) == 1
        await lease.free()

    run(scenario)


@pytest.mark.usefixtures("asked_soon")
def test_a_node_that_works_on_a_request_is_not_left(run: Run, fleet: MadeFleet) -> None:
    fleet.order = ["n1", "n2"]
    node = fleet.nodes["n1"]

    async def scenario(face: Face) -> None:
        pongs: list[Request] = []

        def pong(request: Request) -> Body:
            pongs.append(request)
            if len(pongs) == 3:
                del node.script[Opcode.LEASE_ALLOC]
                raise HangUp
            assert request.body
            return request.body

        node.on(Opcode.LEASE_ALLOC, Silence())
        node.script[Opcode.PING] = pong
        fleet.nodes["n2"].heard.clear()
        lease = await face.acquire(builder(face, fleet.address))
        # On a busy host the node may be asked once more, while it grants the lease.
        assert (lease.address, fleet.asked("n2")) == (node.address, [])
        assert len(pongs) >= 3
        await lease.free()

    run(scenario)


@pytest.mark.usefixtures("asked_soon")
def test_an_acquire_at_one_daemon_that_hangs_ends(run: Run, fleet: MadeFleet, monkeypatch: pytest.MonkeyPatch) -> None:
    node = fleet.nodes["n1"]
    hang(node)

    def welcome(request: Request) -> Body:
        # The limit is short only once the connect, which it bounds too, has succeeded.
        monkeypatch.setattr(lease, "CONNECT_LIMIT_S", 0.1)
        return node._hello(request)

    node.script[Opcode.HELLO] = welcome

    async def scenario(face: Face) -> None:
        with pytest.raises(Disconnected, match=r"ping: the daemon at .* did not answer within 0\.1 s"):
            await face.acquire(builder(face, fleet.nodes["n1"].address).timeout(600))

    run(scenario)


def test_who_waits_for_a_name_leaves_the_node_whose_answer_was_lost(run: Run, fleet: MadeFleet) -> None:
    fleet.order, fleet.holder = ["n1", "n2"], "n1"
    fleet.nodes["n2"].report = {"name": "model-a", "epoch": 8}

    def be_killed(request: Request) -> Body:
        body: LeaseAlloc = request.body  # type: ignore[assignment]
        if body.wait_ms:
            raise HangUp
        raise Refusal(Failure(Status.BUSY, "another lease has the name"))

    async def scenario(face: Face) -> None:
        for node in fleet.nodes.values():
            node.heard.clear()
        fleet.nodes["n1"].script[Opcode.LEASE_ALLOC] = be_killed
        lease = await face.acquire(named(builder(face, fleet.address)).timeout(60))
        assert lease.address == fleet.nodes["n2"].address
        assert len(fleet.asked("n1")) == 2
        assert len(request_ids(*fleet.asked("n1"), *fleet.asked("n2"))) == 1
        await lease.free()

    run(scenario)


def test_a_node_that_stops_says_so_and_is_not_asked_again(run: Run, fleet: MadeFleet) -> None:
    fleet.order = ["n1", "n2"]

    def stop(request: Request) -> Body:
        raise SayGoodbye(Failure(Status.DISCONNECTED, "the daemon is shutting down"))

    async def scenario(face: Face) -> None:
        fleet.nodes["n1"].heard.clear()
        fleet.nodes["n1"].script[Opcode.LEASE_ALLOC] = stop
        lease = await face.acquire(builder(face, fleet.address))
        assert lease.address == fleet.nodes["n2"].address
        assert len(fleet.asked("n1")) == 1
        await lease.free()

    run(scenario)


def test_a_name_is_waited_for_at_the_node_that_serves_it(run: Run, fleet: MadeFleet) -> None:
    fleet.order, fleet.holder = ["n1", "n2"], "n1"

    def refuse_to_hasty(request: Request) -> Body:
        body: LeaseAlloc = request.body  # type: ignore[assignment]
        if not body.wait_ms:
            raise Refusal(Failure(Status.BUSY, "the name is taken"))
        return fleet.nodes["n1"]._lease_alloc(request)

    async def scenario(face: Face) -> None:
        fleet.nodes["n1"].heard.clear()
        fleet.nodes["n1"].script[Opcode.LEASE_ALLOC] = refuse_to_hasty
        fleet.nodes["n1"].report = {"name": "model-a", "epoch": 7}
        wish = named(builder(face, fleet.address)).timeout(50)
        lease = await face.acquire(wish)
        assert (lease.name, lease.epoch) == ("model-a", 7)
        hasty, patient = fleet.asked("n1")
        assert hasty.wait_ms == 0
        assert 0 < patient.wait_ms <= 50_000
        tags = [parameter.tag for parameter in patient.parameters]
        assert {LEASE_NAME.tag, LABELS.tag, REQUEST_ID.tag} <= set(tags)
        assert (fleet.places[-1].name, fleet.places[-1].labels) == ("model-a", ("zone=a",))
        assert fleet.asked("n2") == []
        await lease.free()
        fleet.nodes["n1"].heard.clear()
        with pytest.raises(Busy, match="the name 'model-a' is served by node n1"):
            await face.acquire(named(builder(face, fleet.address)))
        assert fleet.asked("n2") == []

    run(scenario)


def test_a_name_is_waited_for_elsewhere_if_its_node_does_not_let_it_go(run: Run, fleet: MadeFleet) -> None:
    fleet.order, fleet.holder = ["n1", "n2"], "n1"
    fleet.refuse("n1", Status.BUSY, "this node is cut off from its fleet")
    fleet.nodes["n2"].report = {"name": "model-a", "epoch": 8}

    async def scenario(face: Face) -> None:
        for node in fleet.nodes.values():
            node.heard.clear()
        lease = await face.acquire(named(builder(face, fleet.address)).timeout(50))
        assert (lease.address, lease.epoch) == (fleet.nodes["n2"].address, 8)
        at_the_holder = [body.wait_ms for body in fleet.asked("n1")]
        assert at_the_holder == [0, 1000 * WAIT_SLICE_S]
        (elsewhere,) = fleet.asked("n2")
        assert 0 < elsewhere.wait_ms <= 1000 * WAIT_SLICE_S
        assert len(request_ids(*fleet.asked("n1"), elsewhere)) == 1
        await lease.free()

    run(scenario)


@pytest.mark.parametrize("status", [Status.BUSY, Status.CAPACITY_EXCEEDED])
def test_nodes_that_refuse_to_wait_are_asked_a_few_times_a_second(run: Run, fleet: MadeFleet, status: Status) -> None:
    fleet.order = ["n1", "n2"]
    for node in fleet.order:
        fleet.refuse(node, status, "no new lease is granted: this node is cut off from its fleet")
    wait_s = 1.0
    rounds = wait_s / ROUND_PAUSE_S + 2

    async def scenario(face: Face) -> None:
        fleet.places.clear()
        with pytest.raises((Busy, CapacityExceeded)):
            await face.acquire(named(builder(face, fleet.address)).timeout(wait_s))
        # Two in each round: for candidates, and for those beyond them. A slow host makes fewer rounds.
        assert 2 < len(fleet.places) <= 2 * rounds

    run(scenario)


def test_a_name_that_several_nodes_say_is_taken_is_asked_for_no_further(run: Run, fleet: MadeFleet) -> None:
    # Who serves it is not told: it is another tenant's.
    fleet.order, fleet.holder = ["n1", "n2", "n1-too", "n2-too"], None
    fleet.addresses |= {"n1-too": fleet.addresses["n1"], "n2-too": fleet.addresses["n2"]}
    for node in ("n1", "n2"):
        fleet.refuse(node, Status.BUSY, "another lease has the name")

    async def scenario(face: Face) -> None:
        for node in ("n1", "n2"):
            fleet.nodes[node].heard.clear()
        fleet.places.clear()
        with pytest.raises(Busy, match="another lease has the name"):
            await face.acquire(named(builder(face, fleet.address)))
        assert (len(fleet.asked("n1")), len(fleet.asked("n2")), len(fleet.places)) == (2, 1, 1)

    run(scenario)


def test_a_name_that_comes_free_elsewhere_is_asked_for_there(run: Run, fleet: MadeFleet) -> None:
    fleet.nodes["n2"].report = {"name": "model-a", "epoch": 7}

    def hold_on(request: Request) -> Body:
        body: LeaseAlloc = request.body  # type: ignore[assignment]
        if body.wait_ms:
            # The name's next home, as the directory will have it when this wait is over.
            fleet.order, fleet.holder = ["n2"], None
        raise Refusal(Failure(Status.BUSY, "another lease has the name"))

    async def scenario(face: Face) -> None:
        fleet.order, fleet.holder = ["n1"], "n1"
        fleet.nodes["n1"].heard.clear()
        fleet.nodes["n1"].script[Opcode.LEASE_ALLOC] = hold_on
        lease = await face.acquire(named(builder(face, fleet.address)).timeout(60))
        assert lease.address == fleet.nodes["n2"].address
        waits_ms = [body.wait_ms for body in fleet.asked("n1")]
        assert waits_ms[0] == 0
        assert 0 < waits_ms[1] <= WAIT_SLICE_S * 1000
        assert len(waits_ms) == 2
        await lease.free()

    run(scenario)


def test_a_directory_is_asked_for_each_label_by_itself(run: Run, fleet: MadeFleet) -> None:
    fleet.order = ["n1"]

    async def scenario(face: Face) -> None:
        lease = await face.acquire(builder(face, fleet.address).labels(zone="a", model="h200"))
        assert sorted(fleet.places[-1].labels) == ["model=h200", "zone=a"]
        await lease.free()

    run(scenario)


def test_directories_that_can_t_answer_are_told(run: Run, fleet: MadeFleet, tmp_path: Path) -> None:
    def away(request: Request) -> Body:
        raise Refusal(Failure(Status.DISCONNECTED, "this directory has not reached etcd for 11 s", "Look at etcd."))

    fleet.directory.script[Opcode.PLACE] = away

    async def scenario(face: Face) -> None:
        with pytest.raises(Disconnected, match="this directory has not reached etcd for 11 s"):
            await face.acquire(builder(face, fleet.address))
        both = f"{fleet.address},unix:{tmp_path}/nobody"
        with pytest.raises(Disconnected, match=r"none of the fleet's 2 directories can answer: .*has not reached etcd"):
            await face.acquire(builder(face, both))

    run(scenario)


def test_a_tls_fleet_needs_files(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("GPULEASE_TLS_KEY", raising=False)
    with pytest.raises(InvalidRequest, match=r"missing: .*GPULEASE_TLS_KEY"):
        GpuBuilder("fleet:tls:directory.example:7444").min_vram(1).acquire()
    with pytest.raises(InvalidRequest, match=r"the fleet's address: .*port from 0 to 65535"):
        GpuBuilder("fleet:tls:directory.example").min_vram(1).acquire()
