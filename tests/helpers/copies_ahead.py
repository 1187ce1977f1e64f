"""Models that share a card in turn, so that their parks are copied ahead: checked work, on any driver."""

import os
import struct
import time
from collections.abc import Iterator
from contextlib import ExitStack

from prometheus_client.parser import text_string_to_metric_families

from gpulease.client import Buffer, GpuLease, GpuSession, Module
from gpulease.client.sync.driver import ask
from gpulease.protocol import Opcode
from gpulease.protocol.messages import Empty
from helpers.daemon import Daemon
from helpers.pointers import POINTERS, chase_args
from helpers.waiting import PATIENCE_S

MIB = 1 << 20
PART = os.urandom(MIB)
NODES = 5
"""Nodes of the ring that each model's kernel follows."""

IDLE_S = 0.3
"""The first pause, in seconds, in which a model is to be copied ahead: several times the time after which a worker is
idle."""


class Model:
    """A session with a large buffer that never changes, and a ring of nodes along which its kernel counts."""

    def __init__(self, lease: GpuLease, session: GpuSession, size_bytes: int) -> None:
        self.lease = lease
        self._session = session
        self._data: Buffer = session.mem_alloc(size_bytes)
        self._places = range(0, size_bytes - MIB + 1, max(MIB, size_bytes // 16 // MIB * MIB))
        for at in self._places:
            session.mem_write(self._data, at, PART)
        self._module: Module = session.module_load(POINTERS)
        self._nodes = [session.mem_alloc(16) for _ in range(NODES)]
        for one, following in zip(self._nodes, self._nodes[1:] + self._nodes[:1], strict=True):
            session.mem_write(one, 0, struct.pack("<QQ", following.handle, 0))
        self._rounds = 0
        self.work()

    def work(self) -> None:
        """Compute as for a request, and check the result. The kernel follows addresses in the session's own data."""
        self._session.launch(self._module, "chase", [1], [1], chase_args(self._nodes[0], NODES))
        self._rounds += 1
        counts = [struct.unpack("<Q", self._session.mem_read(one, 8, 8))[0] for one in self._nodes]
        assert counts == [self._rounds] * NODES

    def check(self) -> None:
        self.work()
        for at in self._places:
            assert bytes(self._session.mem_read(self._data, at, MIB)) == PART, "wrong bytes"


class CopiesAhead:
    """Three models on a card that holds two.

    Args:
        node: The daemon, with `overcommit`.
        size_bytes: Bytes of each model's buffer. The card has room for two slices that are 16 MiB larger, and three
            contexts.
    """

    def __init__(self, node: Daemon, size_bytes: int) -> None:
        self._node = node
        self._stack = ExitStack()
        self._size_bytes = size_bytes
        # The least recently used model, which comes first, is parked; the next one is parked when the first returns.
        self._by_use: list[Model] = []

    def __enter__(self) -> "CopiesAhead":
        with self._stack as stack:
            for _ in range(3):
                builder = self._node.builder(self._size_bytes + 16 * MIB, 300).device(0).timeout(60).parkable()
                lease = stack.enter_context(builder.acquire())
                self._by_use.append(Model(lease, stack.enter_context(GpuSession(lease)), self._size_bytes))
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def count(self, name: str) -> float:
        """Return the sum of a family's series, by the name of its samples."""
        families = text_string_to_metric_families(ask(Opcode.METRICS, Empty(), self._node.address).exposition)
        return sum(sample.value for family in families for sample in family.samples if sample.name == name)

    def serve_in_turn(self, parks: int) -> None:
        """Have the models work in turn, with pauses, until `parks` more parks were copied ahead."""
        for idle_s in self._pauses_until("gpu_lease_parked_ahead_total", parks):
            for model in self._by_use:
                time.sleep(idle_s)
                model.check()

    def serve_what_was_copied(self, copies: int) -> None:
        """Use the model that is parked next after it is copied ahead, until `copies` more copies were discarded."""
        for idle_s in self._pauses_until("gpu_lease_park_ahead_discarded_total", copies):
            parked, leaving, copied = self._by_use
            parked.check()
            time.sleep(idle_s)
            copied.check()
            # Changes that its kernel has made since the copy must not be lost.
            copied.lease.park()
            copied.check()
            self._by_use = [leaving, parked, copied]

    def _pauses_until(self, sample: str, increment: int) -> Iterator[float]:
        wanted, idle_s, until_s = self.count(sample) + increment, IDLE_S, time.monotonic() + PATIENCE_S
        while self.count(sample) < wanted:
            assert time.monotonic() < until_s, f"{sample} is {self.count(sample)}, not {wanted}"
            yield idle_s
            # A busy host needs longer for a copy.
            idle_s *= 1.5
