"""Submits with requests that no correct client sends, and submits with tokens."""

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest

from gpulease.client import Denied, GpuLease, Permission, my_audience, submit_by
from gpulease.protocol import Failure, Opcode, Reply, Status
from gpulease.protocol.capabilities import AttachOption
from gpulease.protocol.lease_options import SUBMIT
from gpulease.protocol.limits import MAX_SUBMIT_OUTPUT_BYTES
from gpulease.protocol.messages import (
    AttachReply,
    Body,
    Empty,
    GpuSubmit,
    LeaseSubscribe,
    MemAlloc,
    ModuleLoad,
    Ping,
    SubmitArgument,
    SubmitDone,
    SubmitRun,
)
from gpulease.protocol.opcodes import ArgumentKind, Flag
from gpulease.protocol.primitives import LeaseParameter, Tlv
from helpers.daemon import Daemon, Faults
from helpers.kernels import FAULTS, Neighbour
from helpers.raw_peer import RawPeer, frame_of, lease_alloc
from helpers.submits import ROOM, check_scaled, scaling, workers_of
from helpers.waiting import wait_until

WORD = SubmitArgument(ArgumentKind.VALUE, 0, bytes(4))
OUT = SubmitArgument(ArgumentKind.OUTPUT, 16, b"")
RUN = SubmitRun("fill_u32", 1, 1, 1, 1, 1, 1, 0, (OUT, WORD, WORD), FAULTS)


@pytest.fixture
def gpu(daemon: Daemon) -> Iterator[GpuLease]:
    with daemon.builder().submits(ROOM).acquire() as lease:
        yield lease


@contextlib.contextmanager
def submit(daemon: Daemon, lease_id: int, *options: Tlv) -> Iterator[RawPeer]:
    """Yield a raw connection whose submit is ready to run."""
    with RawPeer(daemon.address).hello() as peer:
        reply = peer.request(Opcode.GPU_SUBMIT, GpuSubmit(100_000, options), lease_id)
        assert isinstance(reply, AttachReply)
        assert reply.slice_bytes == ROOM
        yield peer


def with_arguments(*arguments: SubmitArgument) -> SubmitRun:
    return replace(RUN, arguments=arguments)


def out(size_bytes: int) -> SubmitArgument:
    return SubmitArgument(ArgumentKind.OUTPUT, size_bytes, b"")


HALF = MAX_SUBMIT_OUTPUT_BYTES // 2
REFUSED: dict[str, tuple[Body, Status]] = {
    "an unknown kind": (with_arguments(SubmitArgument(4, 0, b"abcd"), WORD), Status.INVALID_REQUEST),
    "a value without bytes": (with_arguments(SubmitArgument(0, 0, b"")), Status.INVALID_REQUEST),
    "an input with a size": (with_arguments(SubmitArgument(1, 4, b"abcd")), Status.INVALID_REQUEST),
    "an output with data": (with_arguments(SubmitArgument(2, 4, b"abcd")), Status.INVALID_REQUEST),
    "an output of nothing": (with_arguments(out(0)), Status.INVALID_REQUEST),
    "an output past all memory": (with_arguments(out(2**64 - 1)), Status.INVALID_REQUEST),
    "outputs too large together": (with_arguments(out(HALF), out(HALF), out(1)), Status.INVALID_REQUEST),
    "more than is kept for it": (with_arguments(out(ROOM + 1)), Status.ALLOC_FAILED),
    "arguments too long": (with_arguments(SubmitArgument(0, 0, bytes(40_000))), Status.INVALID_REQUEST),
    "no grid": (replace(RUN, grid_x=0), Status.LAUNCH_FAILED),
    "a huge grid and block": (replace(RUN, block_x=2**32 - 1, block_y=2**32 - 1), Status.LAUNCH_FAILED),
    "no kernel": (replace(RUN, kernel=""), Status.LAUNCH_FAILED),
    "an image that is none": (replace(RUN, image=b"\x7fELF" + bytes(100)), Status.LOAD_FAILED),
}


@pytest.mark.parametrize(("body", "status"), REFUSED.values(), ids=REFUSED)
def test_a_run_that_makes_no_sense_is_answered(daemon: Daemon, gpu: GpuLease, body: Body, status: Status) -> None:
    with submit(daemon, gpu.lease_id) as peer:
        assert peer.refused(Opcode.SUBMIT_RUN, body, gpu.lease_id).status is status
        peer.check_closed()


OTHERS: dict[str, tuple[Opcode, Body]] = {
    "MEM_ALLOC": (Opcode.MEM_ALLOC, MemAlloc(16)),
    "MODULE_LOAD": (Opcode.MODULE_LOAD, ModuleLoad(FAULTS)),
    "SYNC": (Opcode.SYNC, Empty()),
    "STREAM_CREATE": (Opcode.STREAM_CREATE, Empty()),
}


def test_nothing_but_one_run_is_served(daemon: Daemon, gpu: GpuLease, neighbour: Neighbour) -> None:
    with submit(daemon, gpu.lease_id) as peer:
        for op, body in OTHERS.values():
            assert peer.refused(op, body, gpu.lease_id).status is Status.INVALID_REQUEST
        assert peer.request(Opcode.PING, Ping(5), gpu.lease_id) == Ping(5)
        assert peer.refused(Opcode.SUBMIT_RUN, RUN, gpu.lease_id + 1).status is Status.INVALID_REQUEST
        assert peer.request(Opcode.SUBMIT_RUN, RUN, gpu.lease_id) == SubmitDone((bytes(16),))
        peer.check_closed()
    neighbour.check()


def test_a_second_run_behind_the_first_is_not_done(daemon: Daemon, gpu: GpuLease) -> None:
    with submit(daemon, gpu.lease_id) as peer:
        frames = [peer.connection.send_request(Opcode.SUBMIT_RUN, RUN, session_id=gpu.lease_id)[1] for _ in range(2)]
        peer.sock.sendall(b"".join(frames))
        first = peer.next_event()
        assert isinstance(first, Reply)
        assert first.result == SubmitDone((bytes(16),))
        peer.check_closed()


def test_a_session_takes_no_run(daemon: Daemon, gpu: GpuLease) -> None:
    with RawPeer(daemon.address).hello() as peer:
        assert not isinstance(peer.attach(gpu.lease_id), Failure)
        assert peer.refused(Opcode.SUBMIT_RUN, RUN, gpu.lease_id).status is Status.INVALID_REQUEST


def test_a_quiet_run_is_not_done(daemon: Daemon, gpu: GpuLease) -> None:
    """A quiet SUBMIT_RUN is refused.

    Its failure is kept, like that of any quiet request, and reported with the next reply.
    """
    with submit(daemon, gpu.lease_id) as peer:
        peer.quiet(Opcode.SUBMIT_RUN, RUN, gpu.lease_id)
        told = peer.refused(Opcode.SUBMIT_RUN, RUN, gpu.lease_id)
        assert "can't be quiet" in told.message
        assert peer.request(Opcode.SUBMIT_RUN, RUN, gpu.lease_id) == SubmitDone((bytes(16),))


BROKEN = {
    "garbage": b"\xff" * 64,
    "a reply": frame_of(Opcode.SYNC, Empty(), 9, flags=int(Flag.REPLY)),
    "request id 0": frame_of(Opcode.PING, Ping(1), 0),
}


@pytest.mark.parametrize("data", BROKEN.values(), ids=BROKEN)
def test_what_can_not_be_followed_ends_it(daemon: Daemon, gpu: GpuLease, data: bytes) -> None:
    with submit(daemon, gpu.lease_id) as peer:
        peer.sock.sendall(data)
        assert peer.goodbye().status is Status.INVALID_REQUEST
    wait_until(lambda: not workers_of(daemon.processes), "its worker is gone")


def test_half_a_frame_and_a_peer_that_leaves_cost_nothing(daemon: Daemon, gpu: GpuLease) -> None:
    for cut in (1, 40, 4000):
        with submit(daemon, gpu.lease_id) as peer:
            peer.sock.sendall(frame_of(Opcode.SUBMIT_RUN, RUN, 9, gpu.lease_id)[:cut])
    with RawPeer(daemon.address).hello() as peer:
        # The client disconnects before its context exists.
        peer.sock.sendall(frame_of(Opcode.GPU_SUBMIT, GpuSubmit(1000, ()), 9, gpu.lease_id))
    check_scaled(scaling(gpu).launch())


def test_one_that_says_nothing_ends_with_its_time(start_daemon: Callable[..., Daemon]) -> None:
    # On a busy host, the usual grace may be over before the worker reports the end.
    daemon = start_daemon(faults=Faults(constants={"gpulease.daemon.leases.submits:GRACE_MS": 60_000}))
    with daemon.builder().submits(ROOM).acquire() as gpu, RawPeer(daemon.address).hello() as peer:
        peer.request(Opcode.GPU_SUBMIT, GpuSubmit(1000, ()), gpu.lease_id)
        assert peer.goodbye().status is Status.TIMED_OUT


def test_who_may_ask(daemon: Daemon, gpu: GpuLease) -> None:
    with RawPeer(daemon.address).hello() as peer:
        assert peer.refused(Opcode.GPU_SUBMIT, GpuSubmit(1000, ()), 77).status is Status.NOT_FOUND
        assert peer.refused(Opcode.GPU_SUBMIT, GpuSubmit(0, ()), gpu.lease_id).status is Status.INVALID_REQUEST
        two = (Tlv(AttachOption.TOKEN, b"a"), Tlv(AttachOption.TOKEN, b"b"))
        assert peer.refused(Opcode.GPU_SUBMIT, GpuSubmit(1000, two), gpu.lease_id).status is Status.INVALID_REQUEST
        # The connection is still a control connection.
        assert peer.request(Opcode.LEASE_SUBSCRIBE, LeaseSubscribe(gpu.lease_id)) == Empty()
    with RawPeer(daemon.tcp_address).hello() as stranger:
        assert stranger.refused(Opcode.GPU_SUBMIT, GpuSubmit(1000, ()), gpu.lease_id).status is Status.NOT_FOUND


@pytest.mark.parametrize("value", [b"", bytes(8), bytes(4), bytes(7) + b"\x01" + b"\x00"])
def test_what_is_kept_for_submits_is_a_number(daemon: Daemon, value: bytes) -> None:
    with RawPeer(daemon.address).hello() as peer:
        wanted = replace(lease_alloc(), parameters=(LeaseParameter(SUBMIT.tag, value),))
        assert peer.refused(Opcode.LEASE_ALLOC, wanted).status is Status.INVALID_REQUEST


def test_a_token_lets_another_tenant_submit_and_see_nothing_else(daemon: Daemon, gpu: GpuLease) -> None:
    theirs = my_audience(daemon.tcp_address)
    token = gpu.issue(Permission.TASKLET_SUBMIT, theirs).token
    check_scaled(scaling(Guest(token, daemon.tcp_address)).launch())
    with pytest.raises(Denied, match="replayed nonce"):
        scaling(Guest(token, daemon.tcp_address)).launch()
    wrong = gpu.issue(Permission.MEM_READ | Permission.MEM_WRITE, theirs).token
    with pytest.raises(Denied, match="permission missing"):
        scaling(Guest(wrong, daemon.tcp_address)).launch()
    check_scaled(scaling(gpu).launch())


@pytest.mark.parametrize("end", [lambda gpu, _: gpu.renew(60), GpuLease.revoke_token], ids=["renewal", "revocation"])
def test_what_ends_a_token_ends_its_submit(
    daemon: Daemon, gpu: GpuLease, end: Callable[[GpuLease, bytes], None]
) -> None:
    token = gpu.issue(Permission.TASKLET_SUBMIT, my_audience(daemon.tcp_address)).token
    with RawPeer(daemon.tcp_address).hello() as guest:
        option = Tlv(AttachOption.TOKEN, token)
        guest.request(Opcode.GPU_SUBMIT, GpuSubmit(30_000, (option,)), gpu.lease_id)
        body = SubmitRun("endless", 1, 1, 1, 1, 1, 1, 0, (OUT,), FAULTS)
        guest.sock.sendall(guest.connection.send_request(Opcode.SUBMIT_RUN, body, session_id=gpu.lease_id)[1])
        wait_until(lambda: daemon.query(gpu.lease_id)["submit"]["launches"] == 1, "its kernel is launched")
        end(gpu, token)
        told = guest.next_event()
        assert isinstance(told, Reply)
        assert isinstance(told.result, Failure)
        assert told.result.status is Status.DENIED
    check_scaled(scaling(gpu).launch())


class Guest:
    """A tenant that uses another tenant's lease with a token."""

    def __init__(self, token: bytes, address: str) -> None:
        self._token, self._address = token, address

    def submit(self, kernel: str, image: bytes) -> object:
        return submit_by(self._token, kernel, image, self._address)


def floods_in_vain(daemon: Daemon, gpu: GpuLease) -> bool:
    """Whether the daemon reads nothing after a submit that waits.

    If the submit is refused, because an earlier one has not ended yet, it reads.
    """
    with RawPeer(daemon.address).hello() as flood:
        flood.sock.settimeout(0.3)
        flood.sock.sendall(frame_of(Opcode.GPU_SUBMIT, GpuSubmit(1000, ()), 9, gpu.lease_id))
        try:
            flood.sock.sendall(bytes(64 << 20))
        except TimeoutError:
            return True
        except OSError:
            return False
    return False


def test_one_that_leaves_while_it_waits_makes_room(daemon: Daemon, gpu: GpuLease) -> None:
    with submit(daemon, gpu.lease_id):
        for _ in range(3):
            with RawPeer(daemon.address).hello() as waiter:
                waiter.sock.sendall(frame_of(Opcode.GPU_SUBMIT, GpuSubmit(1000, ()), 9, gpu.lease_id))
        wait_until(lambda: floods_in_vain(daemon, gpu), "one that waits is not read without bound")
    wait_until(lambda: "submit" not in gpu.query(), "its turn has come and gone", seen=gpu.query)
    check_scaled(scaling(gpu).launch())
