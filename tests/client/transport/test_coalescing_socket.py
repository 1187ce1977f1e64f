"""A session's outbox: nothing in it is lost, sent twice, torn, or forgotten."""

import gc
import itertools
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from types import FrameType

import pytest

from gpulease.client.transport import coalescing_socket
from gpulease.client.transport.channel import Channel
from gpulease.client.transport.coalescing_socket import CLOSE_LIMIT_S, FLUSH_BYTES, MAX_OUTBOX_BYTES, CoalescingSocket
from gpulease.client.transport.spin_policy import SpinPolicy
from gpulease.protocol.address import UnixAddress
from helpers.scripted_peer import ScriptedPeer
from helpers.waiting import PATIENCE_S, wait_until

FRAME = b"f" * 100


class Pair:
    """A channel and its peer's socket."""

    def __init__(self) -> None:
        ours, self.peer = socket.socketpair()
        ours.setblocking(False)
        self.peer.settimeout(PATIENCE_S)
        self.channel = CoalescingSocket(Channel(ours, UnixAddress("/made/up")), SpinPolicy())

    def arrived(self) -> bytes:
        """What has come so far."""
        return self.peer.recv(1 << 20) if select.select([self.peer], [], [], 0)[0] else b""


@pytest.fixture
def pair() -> Iterator[Pair]:
    pair = Pair()
    yield pair
    pair.channel.close()
    pair.peer.close()


@pytest.fixture
def idle(monkeypatch: pytest.MonkeyPatch) -> list[CoalescingSocket]:
    """No flusher comes by; whom it would have come for."""
    noticed: list[CoalescingSocket] = []
    monkeypatch.setattr(coalescing_socket._flusher, "notice", noticed.append)
    return noticed


@pytest.fixture
def gathered(pair: Pair, idle: list[CoalescingSocket]) -> Pair:
    """A pair with one frame sent, so that the next ones gather."""
    assert pair.channel.put_whole(FRAME)
    assert pair.arrived() == FRAME
    assert not idle, "nothing is left to be flushed"
    return pair


def parts(*data: bytes) -> deque[memoryview]:
    return deque(memoryview(item) for item in data)


def test_what_is_gathered_goes_by_itself(pair: Pair) -> None:
    for _ in range(5):
        assert pair.channel.put_whole(FRAME)
    received = b""
    while len(received) < 5 * len(FRAME):
        received += pair.peer.recv(1 << 16)
    assert received == FRAME * 5
    # And so again after a pause in which the flusher went to sleep.
    wait_until(lambda: not coalescing_socket._flusher._is_awake, "the flusher sleeps")
    for _ in range(3):
        assert pair.channel.put_whole(b"later")
    while len(received) < 5 * len(FRAME) + 15:
        received += pair.peer.recv(1 << 16)


def test_frames_gather_up_to_a_size(gathered: Pair, idle: list[CoalescingSocket]) -> None:
    whole = -(-FLUSH_BYTES // len(FRAME))
    for _ in range(whole - 1):
        assert gathered.channel.put_whole(FRAME)
    assert gathered.arrived() == b""
    assert idle == [gathered.channel]
    assert gathered.channel.put_whole(FRAME[:60], FRAME[60:])
    assert gathered.arrived() == FRAME * whole


def test_a_frame_that_is_waited_for_takes_the_others_along(gathered: Pair) -> None:
    assert gathered.channel.put_whole(FRAME)
    asked = parts(b"ask", b"ing")
    assert gathered.channel.push(asked)
    assert not asked
    assert gathered.arrived() == FRAME + b"asking"


@pytest.mark.parametrize("is_waited_for", [True, False])
def test_a_frame_that_waits_goes_with_the_next_one(
    pair: Pair, idle: list[CoalescingSocket], is_waited_for: bool
) -> None:
    channel = pair.channel
    assert channel.put_with_next(b"first")
    assert (pair.arrived(), channel.tail) == (b"", 5)
    assert channel.push(parts(FRAME)) if is_waited_for else channel.put_whole(FRAME)
    assert pair.arrived() == b"first" + FRAME
    assert not idle, "nothing was left to the flusher"
    # It was for one frame: later ones gather as before.
    channel.put_whole(FRAME)
    pair.arrived()
    assert channel.put_whole(FRAME)
    assert pair.arrived() == b""
    assert idle == [channel]


def test_a_frame_that_waits_is_sent_when_the_channel_closes_and_after_gathered_ones(gathered: Pair) -> None:
    assert gathered.channel.put_whole(FRAME)
    assert gathered.channel.put_with_next(b"second")
    assert gathered.arrived() == b""
    gathered.channel.close()
    assert gathered.arrived() == FRAME + b"second"


def test_a_large_frame_comes_behind_the_others(gathered: Pair) -> None:
    large = bytes(range(256)) * 256
    assert gathered.channel.put_whole(FRAME)
    assert not gathered.channel.put_whole(large), "it is not copied"
    rest, received = parts(b"head", large), b""
    while rest:
        gathered.channel.push(rest)
        received += gathered.arrived()
    assert received + gathered.arrived() == FRAME + b"head" + large


def test_the_first_frame_behind_one_that_is_waited_for_goes_at_once(gathered: Pair) -> None:
    assert gathered.channel.push(parts(b"asking"))
    assert gathered.arrived() == b"asking"
    assert gathered.channel.put_whole(FRAME)
    assert gathered.arrived() == FRAME


def test_a_peer_that_does_not_read_holds_a_bounded_outbox(gathered: Pair) -> None:
    taken = 0
    while gathered.channel.put_whole(FRAME):
        taken += 1
    assert gathered.channel.has_unsent
    assert not gathered.channel.push(parts(b"asking"))
    assert len(gathered.channel._outbox.data) <= MAX_OUTBOX_BYTES + len(FRAME)
    received = b""
    while len(received) < taken * len(FRAME):
        received += gathered.arrived()
        gathered.channel.push(deque())
    assert received == FRAME * taken
    assert not gathered.channel.has_unsent


def test_a_peer_that_is_gone_is_found_out_by_who_waits(gathered: Pair) -> None:
    gathered.peer.close()
    for _ in range(2 * MAX_OUTBOX_BYTES // len(FRAME)):
        gathered.channel.put_whole(FRAME)
    assert not gathered.channel.push(parts(b"asking"))
    assert gathered.channel.link.end is not None


def test_closing_sends_the_rest(gathered: Pair) -> None:
    gathered.channel.put_whole(FRAME)
    gathered.channel.close()
    assert gathered.arrived() == FRAME
    assert gathered.peer.recv(1) == b""


def test_closing_does_not_wait_for_ever(gathered: Pair) -> None:
    while gathered.channel.put_whole(FRAME):
        pass
    started = time.monotonic()
    gathered.channel.close()
    assert CLOSE_LIMIT_S / 2 < time.monotonic() - started < PATIENCE_S


def test_interrupts_lose_tear_and_repeat_nothing(pair: Pair) -> None:
    """Numbered frames under a rain of interrupts: what `put` took is there once, in order, and whole."""
    received = bytearray()

    def receive() -> None:
        while data := pair.peer.recv(1 << 16):
            received.extend(data)

    armed: list[bool] = []

    def interrupt(_signal: int, _frame: FrameType | None) -> None:
        if armed:
            armed.clear()
            raise KeyboardInterrupt

    taken: set[int] = set()
    numbered = itertools.count(1)

    def put_until(until: float) -> None:
        # A function of its own: Python 3.13 does not count the jumps of a loop among what its try holds.
        armed.append(True)
        while time.monotonic() < until:
            number = next(numbered)
            frame = number.to_bytes(8, "big") * 10
            if pair.channel.put_whole(frame) or pair.channel.push(parts(frame)):
                taken.add(number)
        armed.clear()

    reader = threading.Thread(target=receive)
    reader.start()
    interrupts = 0
    before = signal.signal(signal.SIGALRM, interrupt)
    # Finalizers of other tests' garbage are not what is tested.
    gc.collect()
    gc.disable()
    signal.setitimer(signal.ITIMER_REAL, 1e-4, 1.7e-4)
    until = time.monotonic() + PATIENCE_S
    while interrupts < 300 and time.monotonic() < until:
        try:
            # Not for long: one that strikes in a finalizer is swallowed, and the next must strike all the same.
            put_until(time.monotonic() + 0.1)
        except KeyboardInterrupt:
            interrupts += 1
    signal.setitimer(signal.ITIMER_REAL, 0)
    signal.signal(signal.SIGALRM, before)
    gc.enable()
    pair.channel.close()
    reader.join(PATIENCE_S)
    frames = [bytes(received[at : at + 80]) for at in range(0, len(received), 80)]
    numbers = [int.from_bytes(frame[:8], "big") for frame in frames]
    assert frames == [number.to_bytes(8, "big") * 10 for number in numbers], "no frame is torn"
    assert numbers == sorted(set(numbers)), "none comes twice, or out of order"
    assert taken <= set(numbers), "none is lost"
    assert interrupts == 300


def test_a_fork_sends_nothing_twice(gathered: Pair) -> None:
    # pytest's own threads do not matter to a child that only closes; some Pythons warn of them.
    gathered.channel.put_whole(FRAME)
    coalescing_socket._before_fork()
    assert gathered.arrived() == FRAME
    while gathered.channel.put_whole(FRAME):
        pass
    coalescing_socket._before_fork()  # as far as the socket takes it
    flusher = coalescing_socket._flusher
    try:
        coalescing_socket._after_fork()
        assert not gathered.channel.has_unsent, "the rest is the parent's"
        assert coalescing_socket._flusher is not flusher
    finally:
        coalescing_socket._flusher = flusher


PROGRAM = """
import os, sys, time
from gpulease.client import GpuBuilder, GpuSession, KernelArgs
lease = GpuBuilder(sys.argv[1]).min_vram(1 << 20).acquire()
session = GpuSession(lease, shared_memory=False)
module = session.module_load(b"ptx")
for _ in range(20):
    session.launch(module, "nothing", [1], [1], KernelArgs())
if sys.argv[2] == "fork":
    if os.fork() == 0:
        sys.exit()
    os.wait()
    session.sync()
"""


@pytest.mark.parametrize("ending", ["exit", "fork"])
def test_a_program_s_end_and_its_child_s(peer: ScriptedPeer, ending: str) -> None:
    command = [sys.executable, "-W", "ignore", "-c", PROGRAM, peer.address, ending]
    subprocess.run(command, check=True, timeout=PATIENCE_S * 3, cwd=Path(__file__).parent, env=dict(os.environ))
    wait_until(lambda: peer.ops().count("LAUNCH") >= 20, "what was launched arrives")
    assert peer.ops().count("LAUNCH") == 20
