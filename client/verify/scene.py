"""What every row of the matrix needs: leases, the card's figure, and the end of a lease, timed."""

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from gpulease.client import GpuBuilder, GpuLeaseError
from gpulease.client.cli.reports import first_card, leases_of
from gpulease.client.cli.tables import ask_card, card_title
from gpulease.client.sync.driver import ask
from gpulease.protocol import Opcode
from gpulease.protocol.messages import Empty, LeaseRef

SLICE_BYTES: Final = 256 << 20
LEASE_S: Final = 120.0

END_S: Final = 30.0
"""For a lease to be torn down."""

POOL_S: Final = 60.0
"""For the pool of contexts made ahead to be full again."""

CARD_S: Final = 5.0
"""For the card's own figure to be back; it was proved back before the lease was torn down."""

NAME_CHARS: Final = 15
"""Of a process's name that the kernel keeps."""

_LOOK_S: Final = 0.001


class Breach(Exception):
    """Something that leases promise does not hold here; the message says what."""


@dataclass(frozen=True, slots=True)
class Scene:
    """One card of the daemon at `address`.

    Attributes:
        vram_bytes: The card's capacity for leases.
    """

    address: str
    driver: str
    card_uuid: str
    card_name: str
    vram_bytes: int

    @classmethod
    def at(cls, address: str) -> "Scene":
        """The daemon's first card."""
        card = first_card(address)
        return cls(address, card["driver"], card["uuid"], card["name"], card["capacity_bytes"])

    def title(self) -> str:
        """The card, what computes on it, and the day: what a table must say to mean something later."""
        return card_title(self.driver, self.card_name, self.card_uuid)

    @property
    def is_card(self) -> bool:
        """Whether it is a real one."""
        return self.driver == "cuda"

    def wish(self, size_bytes: int = SLICE_BYTES, seconds: float = LEASE_S) -> GpuBuilder:
        """A lease to be."""
        return GpuBuilder(self.address).min_vram(size_bytes).lease_secs(seconds).device(self.card_uuid)

    def query(self, lease_id: int) -> dict[str, Any]:
        """What the daemon says of a lease."""
        return dict(ask(Opcode.LEASE_QUERY, LeaseRef(lease_id), self.address).report)

    def held_bytes(self) -> int:
        """What leases hold, by the daemon's account."""
        return int(first_card(self.address, "held_bytes")["held_bytes"])

    def wait_for_pool(self) -> None:
        """Return once every context that is to be made ahead is there. Raises Breach."""
        until = time.monotonic() + POOL_S
        while (card := first_card(self.address, "warm_contexts", "warm_wanted"))["warm_contexts"] < card["warm_wanted"]:
            if time.monotonic() > until:
                raise Breach(f"{card['warm_contexts']} of {card['warm_wanted']} contexts made ahead are there")
            time.sleep(_LOOK_S)

    def lease_ids(self) -> set[int]:
        """All leases that live."""
        report = leases_of(ask(Opcode.LEASE_LIST_ACTIVE, Empty(), self.address).report)
        return {int(lease["lease_id"], 16) for lease in report}

    def used_mib(self) -> int:
        """What is used on the card, by its own account; 0 for a pretended one."""
        return int(ask_card(self.card_uuid, "memory.used")) if self.is_card else 0

    def wait_for_end(self, lease_id: int) -> str:
        """Return once the lease is torn down; its cause. Raises Breach."""
        until = time.monotonic() + END_S
        while (report := self.query(lease_id))["state"] != "torndown":
            if time.monotonic() > until or report["state"] == "fenced":
                raise Breach(f"the lease is {report['state']}: {report['reason']}")
            time.sleep(_LOOK_S)
        return str(report["cause"])

    def free(self, lease_id: int) -> float:
        """Give a lease back; milliseconds until its memory is proved free."""
        started = time.perf_counter()
        try:
            ask(Opcode.LEASE_FREE, LeaseRef(lease_id), self.address)
        except GpuLeaseError:
            # It has ended by itself: what matters is that it has.
            self.wait_for_end(lease_id)
        return (time.perf_counter() - started) * 1e3

    def card_is_back_to(self, used_mib: int) -> int:
        """How many MiB more are used than before, once that has settled."""
        until = time.monotonic() + CARD_S
        while (more := self.used_mib() - used_mib) > 0 and time.monotonic() < until:
            time.sleep(_LOOK_S)
        return more


def worker_pid(lease_id: int) -> int:
    """The process of a lease's worker, found by its name. Raises Breach."""
    name = f"gpul-{lease_id:032x}"[:NAME_CHARS]
    for comm in Path("/proc").glob("[0-9]*/comm"):
        try:
            if comm.read_text().strip() == name:
                return int(comm.parent.name)
        except OSError:
            continue  # It ended while it was looked at.
    raise Breach(f"there is no process {name}")
