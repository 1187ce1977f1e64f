"""The environment of `gpulease verify`'s checks (one card, its leases, its memory), and `MatrixCheck`, one check."""

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final, Generic, TypeVar

from gpulease.client import GpuBuilder, GpuLeaseError
from gpulease.client.console.card import ask_card, card_title
from gpulease.client.console.reports import first_card, leases_of
from gpulease.client.sync.driver import ask
from gpulease.protocol import Opcode
from gpulease.protocol.fast_dataclass import dataclass
from gpulease.protocol.messages import Empty, LeaseRef

SLICE_BYTES: Final = 256 << 20
LEASE_S: Final = 120.0

END_S: Final = 30.0
"""Longest time for a lease to be torn down, in seconds."""

POOL_S: Final = 60.0
"""Longest time for the pool of ready contexts to be full again, in seconds."""

CARD_S: Final = 5.0
"""Longest time, in seconds, until the card's reported memory use is back at its earlier value. That may be later than
the daemon's proof."""

NAME_CHARS: Final = 15
"""Number of characters of a process's name that the kernel stores."""

_POLL_S: Final = 0.001
_POOL_POLL_S: Final = 0.01


class Breach(Exception):
    """A promise of leases does not hold on this host; the message names it."""


def await_pool(address: str) -> None:
    """Wait until the first card's pool of ready contexts is full. Raises Breach."""
    # A lease takes a context from the pool, and the pool makes another one in the background.
    deadline_s = time.monotonic() + POOL_S
    while (card := first_card(address, "warm_contexts", "warm_wanted"))["warm_contexts"] < card["warm_wanted"]:
        if time.monotonic() > deadline_s:
            raise Breach(f"{card['warm_contexts']} of {card['warm_wanted']} pre-created contexts are there")
        time.sleep(_POOL_POLL_S)


@dataclass(frozen=True, slots=True)
class Scene:
    """The first card of the daemon at `address`.

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
        """Return the scene on the first card of the daemon at `address`."""
        card = first_card(address)
        return cls(address, card["driver"], card["uuid"], card["name"], card["capacity_bytes"])

    def title(self) -> str:
        """The title of its tables: the card, its driver and the date."""
        return card_title(self.driver, self.card_name, self.card_uuid)

    @property
    def is_card(self) -> bool:
        """True for a real card, False for the embedded driver."""
        return self.driver == "cuda"

    def builder(self, size_bytes: int = SLICE_BYTES, seconds: float = LEASE_S) -> GpuBuilder:
        """Return a builder for a lease on this card, of that size and lifetime."""
        return GpuBuilder(self.address).min_vram(size_bytes).lease_secs(seconds).device(self.card_uuid)

    def query(self, lease_id: int) -> dict[str, Any]:
        """Return the daemon's LEASE_QUERY report about a lease, even after its end."""
        return dict(ask(Opcode.LEASE_QUERY, LeaseRef(lease_id), self.address).report)

    def held_bytes(self) -> int:
        """Return the number of bytes that leases hold, according to the daemon."""
        return int(first_card(self.address, "held_bytes")["held_bytes"])

    def wait_for_pool(self) -> None:
        """Wait as `await_pool` does."""
        await_pool(self.address)

    def lease_ids(self) -> set[int]:
        """Return the ids of all live leases on the daemon."""
        report = leases_of(ask(Opcode.LEASE_LIST_ACTIVE, Empty(), self.address).report)
        return {int(lease["lease_id"], 16) for lease in report}

    def used_mib(self) -> int:
        """Return the MiB used on the card, as nvidia-smi reports them; 0 for the embedded driver."""
        return int(ask_card(self.card_uuid, "memory.used")) if self.is_card else 0

    def wait_for_end(self, lease_id: int, within_s: float = END_S) -> str:
        """Wait until the lease is torn down; returns the cause of its end. Raises Breach."""
        # A fenced lease has also ended, but checks do not accept that as an end.
        deadline_s = time.monotonic() + within_s
        while (report := self.query(lease_id))["state"] != "torndown":
            if time.monotonic() > deadline_s or report["state"] == "fenced":
                raise Breach(f"the lease is {report['state']}: {report['reason']}")
            time.sleep(_POLL_S)
        return str(report["cause"])

    def free(self, lease_id: int) -> float:
        """Free a lease; returns the milliseconds until its memory is proved free."""
        # The reply to LEASE_FREE comes after the memory was proved free.
        started = time.perf_counter()
        try:
            ask(Opcode.LEASE_FREE, LeaseRef(lease_id), self.address)
        except GpuLeaseError:
            # The lease may have ended already.
            self.wait_for_end(lease_id)
        return (time.perf_counter() - started) * 1e3

    def card_is_back_to(self, used_mib: int) -> int:
        """Wait until the card's use has settled; returns the MiB in use beyond `used_mib`."""
        # The driver returns pages a little after the daemon's proof.
        deadline_s = time.monotonic() + CARD_S
        while (excess_mib := self.used_mib() - used_mib) > 0 and time.monotonic() < deadline_s:
            time.sleep(_POLL_S)
        return excess_mib


Outcome = TypeVar("Outcome")


@dataclass(frozen=True, slots=True)
class MatrixCheck(Generic[Outcome]):
    """A row of the matrix: a fault or a promise, with its name and its proof.

    Attributes:
        prove: Returns its finding. Raises Breach or GpuLeaseError if a promise does not hold.
    """

    name: str
    prove: Callable[[Scene], Outcome]


def breach_of(error: Exception) -> str:
    """Describe the error that ended a proof in a sentence."""
    return f"{type(error).__name__}: {error}"


def worker_pid(lease_id: int) -> int:
    """Return the process id of a lease's worker, found by its name. Raises Breach if there is none."""
    # The worker's name is its lease's id, cut to the length that the kernel keeps.
    name = f"gpul-{lease_id:032x}"[:NAME_CHARS]
    for comm in Path("/proc").glob("[0-9]*/comm"):
        try:
            if comm.read_text().strip() == name:
                return int(comm.parent.name)
        except OSError:
            continue  # The process has ended by now.
    raise Breach(f"no process is named {name}")
