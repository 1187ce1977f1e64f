"""NVIDIA cards. The broker reads them through NVML, which creates no context and takes no VRAM.

A reading has the bytes of each process (nvmlDeviceGetComputeRunningProcesses), and the used bytes that belong to no
process (from nvmlDeviceGetMemoryInfo). When a process ends, it disappears from the list of processes some milliseconds
before its bytes are free. In between, its bytes count as belonging to no process. The lease table decides what a
reading proves.
"""

import contextlib
import os
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any, Final

import pynvml

from gpulease.daemon.gpus import cuinit
from gpulease.daemon.gpus.diagnosis import NO_LIBRARY, Library, describe_host, diagnose, no_cards
from gpulease.daemon.gpus.source import CardFacts, CardLoad, CardReading, CardsUnavailable, SharedCall
from gpulease.daemon.gpus.visible_cards import HostCard, visible_cards
from gpulease.daemon.leases.persisted import CardRow

RESERVE_BYTES: Final = 256 << 20
"""Bytes subtracted from every card's capacity, because the driver's own use grows a little with the number of contexts.
"""

UNATTRIBUTED_SLACK_BYTES: Final = 64 << 20
"""Maximum growth of the unowned bytes that does not count as a leak. A context takes more than this. The bytes of
programs outside the daemon may also grow by this much without effect. RESERVE_BYTES covers both."""


ALLOWANCE_BYTES: Final = 176 << 20
"""Bytes that the driver may use for a session in addition to the tenant's bytes. Nearly all of it is for modules with
assertions or the device's heap: on an H100, local memory and heap took 150 MiB. Without this allowance, a tenant with a
full lease could not load a kernel with an assertion."""

SLACK_BYTES: Final = 16 << 20
"""Bytes that a session may use beyond those that are counted, for example for gaps between small modules. A session
that uses more is ended.
"""


class NvidiaCards:
    """The cards that NVML lists and CUDA_VISIBLE_DEVICES allows. Raises CardsUnavailable if the driver is unusable.

    Args:
        limit_bytes: The most bytes to lease of each card; None for all of it.
    """

    driver = "cuda"
    warning = ""
    allowance_bytes = ALLOWANCE_BYTES
    reserve_bytes = ALLOWANCE_BYTES + SLACK_BYTES
    has_others = True

    def __init__(self, limit_bytes: int | None = None) -> None:
        self._limit_bytes = limit_bytes
        self._handles: dict[str, Any] = {}
        self._unattributed_bytes: dict[str, int] = {}
        self._outside_bytes_at_first: dict[str, int] = {}
        self._listings: dict[str, SharedCall[dict[int, int]]] = {}
        try:
            # Unlike CUDA, NVML creates no context, so this takes no memory of the cards.
            pynvml.nvmlInit()
        except pynvml.NVMLError as error:
            raise _unavailable(error) from None

    def discover(self, rows: Mapping[str, CardRow]) -> list[CardFacts]:
        """Return all cards. Bytes in use now reduce a card's capacity, unless `rows` has an earlier measurement."""
        try:
            handles = [pynvml.nvmlDeviceGetHandleByIndex(number) for number in range(pynvml.nvmlDeviceGetCount())]
            host_cards = [_host_card(handle) for handle in handles]
            if not handles:
                raise no_cards(describe_host()).as_error()
            visible = [handles[number] for number in visible_cards(host_cards, dict(os.environ))]
            cards = [self._facts(index, handle, rows) for index, handle in enumerate(visible)]
            return [replace(card, peers=self._peers_of(card.uuid)) for card in cards]
        except pynvml.NVMLError as error:
            raise _unavailable(error) from None

    def why_no_context(self) -> CardsUnavailable | None:
        """Return the reason why CUDA can't use the cards that NVML lists; None if it can."""
        # NVML works, or the daemon would not have started. So check CUDA, in a child process.
        answer = cuinit.ask()
        if answer.number == 0:
            return None
        if answer.number is not None:
            return diagnose(Library.CUDA, answer.number, describe_host()).as_error()
        if not answer.reason:
            return NO_LIBRARY[Library.CUDA].as_error()
        return CardsUnavailable(f"cuInit can't be called: {answer.reason}", hint="See `dmesg | grep NVRM`.")

    def process_bytes(self, card_uuid: str, pid: int) -> int:
        """Return the bytes of a process, by NVML. Raises CardsUnavailable if NVML does not show them.

        Admission and the proof of a reclaim both need this figure.
        """
        try:
            # Only compute programs are listed here: every worker is one, and the other list takes as long again.
            used_bytes = self._listings[card_uuid].get().get(pid, 0)
        except pynvml.NVMLError as error:
            raise CardsUnavailable(
                f"NVML can't list the processes on {card_uuid}: {error}", hint="Check the card with nvidia-smi."
            ) from None
        # Every worker has a context and holds bytes. 0 means that NVML lists the process by another number.
        if used_bytes == 0:
            raise CardsUnavailable(
                f"NVML does not show the memory of process {pid} on {card_uuid}",
                hint="Run the daemon in the host's PID namespace, because NVML uses the host's process numbers.",
            )
        return used_bytes

    def read(self, card_uuid: str) -> CardReading:
        """Read a card's bytes by process, and its unowned bytes.

        The processes are listed before and after the card's used bytes are read. Only bytes that a process held both
        times are subtracted from the used bytes. Otherwise a process that begins or ends in between would hide unowned
        bytes.
        """
        try:
            before = self._processes(card_uuid)
            used = self._used(card_uuid)
            after = self._processes(card_uuid)
        except pynvml.NVMLError as error:
            raise CardsUnavailable(
                f"NVML can't report the card's memory: {error}", hint="Check the card with nvidia-smi."
            ) from None
        # The smaller of the two figures of each process: bytes that it held in only one listing may not be in the sum.
        owned = sum(min(before_bytes, after.get(pid, 0)) for pid, before_bytes in before.items())
        # Subtract the bytes that were unowned when the daemon first measured the card, before the first lease.
        unowned = used - owned - self._unattributed_bytes[card_uuid]
        return CardReading(unowned, after, self._outside_bytes_at_first[card_uuid])

    def load(self, card_uuid: str) -> CardLoad:
        """Return the load. Each figure is read separately, because some cards report only one of them."""
        handle = self._handles[card_uuid]
        utilization_percent, used_bytes = None, None
        with contextlib.suppress(pynvml.NVMLError):
            utilization_percent = int(pynvml.nvmlDeviceGetUtilizationRates(handle).gpu)
        with contextlib.suppress(pynvml.NVMLError):
            used_bytes = self._used(card_uuid)
        return CardLoad(utilization_percent, used_bytes)

    def close(self) -> None:
        pynvml.nvmlShutdown()

    def _facts(self, index: int, handle: Any, rows: Mapping[str, CardRow]) -> CardFacts:
        if _is_partitioned(handle):
            raise CardsUnavailable(
                f"card {index} is in MIG mode, but leases on MIG partitions are not supported",
                hint="Turn MIG mode off for this card, or remove the card from CUDA_VISIBLE_DEVICES.",
                status=os.EX_OSERR,
            )
        uuid = str(pynvml.nvmlDeviceGetUUID(handle))
        self._handles[uuid] = handle
        self._listings[uuid] = SharedCall(lambda: _bytes_by_pid(pynvml.nvmlDeviceGetComputeRunningProcesses(handle)))
        name = str(pynvml.nvmlDeviceGetName(handle))
        total = int(pynvml.nvmlDeviceGetMemoryInfo(handle).total)
        # A card is measured once in each boot, before the first lease. Later, the bytes of leases could not be
        # distinguished from those of other programs.
        if (measured := rows.get(uuid)) is not None:
            # Bytes in use now belong to leases of the daemon before this one.
            found_bytes, unattributed_bytes = measured.capacity_bytes, measured.unattributed_bytes
        else:
            used = self._used(uuid)
            unattributed_bytes = used - sum(self._processes(uuid).values())
            found_bytes = max(0, total - used - RESERVE_BYTES)
        self._unattributed_bytes[uuid] = unattributed_bytes
        # The capacity is already reduced by these bytes, so `outside_bytes` subtracts them.
        self._outside_bytes_at_first[uuid] = max(0, total - RESERVE_BYTES - found_bytes - unattributed_bytes)
        capacity = found_bytes if self._limit_bytes is None else min(found_bytes, self._limit_bytes)
        return CardFacts(
            uuid,
            index,
            name,
            capacity,
            found_bytes=found_bytes,
            unattributed_bytes=unattributed_bytes,
            slack_bytes=UNATTRIBUTED_SLACK_BYTES,
        )

    def _peers_of(self, card_uuid: str) -> tuple[str, ...]:
        """Return the cards whose memory a card can read over NVLink (nvmlDeviceGetP2PStatus)."""
        own = self._handles[card_uuid]
        return tuple(uuid for uuid, other in self._handles.items() if uuid != card_uuid and _are_peers(own, other))

    def _used(self, card_uuid: str) -> int:
        return int(pynvml.nvmlDeviceGetMemoryInfo(self._handles[card_uuid]).used)

    def _processes(self, card_uuid: str) -> dict[int, int]:
        """Return the bytes of all processes. Concurrent callers share the listing of compute programs."""
        # Graphics programs hold memory, too. A process in both lists has the same figure in each.
        graphics = pynvml.nvmlDeviceGetGraphicsRunningProcesses(self._handles[card_uuid])
        return _bytes_by_pid(graphics) | self._listings[card_uuid].get()


def _host_card(handle: Any) -> HostCard:
    return HostCard(str(pynvml.nvmlDeviceGetUUID(handle)), str(pynvml.nvmlDeviceGetName(handle)))


def _bytes_by_pid(processes: Iterable[Any]) -> dict[int, int]:
    return {int(process.pid): int(process.usedGpuMemory or 0) for process in processes}


def _are_peers(reader: Any, other: Any) -> bool:
    # Reads between cards also work over PCIe on some hosts, but no faster than through the host's memory.
    # nvml.h, nvmlGpuP2PCapsIndex_t: READ and NVLINK. pynvml's constants of these names are tuples.
    kinds = 0, 2
    try:
        states = [pynvml.nvmlDeviceGetP2PStatus(reader, other, kind) for kind in kinds]
    except pynvml.NVMLError:
        # This driver does not report whether cards reach each other, so sessions move through the host's memory.
        return False
    return all(state == pynvml.NVML_P2P_STATUS_OK for state in states)


def _is_partitioned(handle: Any) -> bool:
    try:
        current, _ = pynvml.nvmlDeviceGetMigMode(handle)
    except pynvml.NVMLError_NotSupported:
        return False
    return bool(current == pynvml.NVML_DEVICE_MIG_ENABLE)


def _unavailable(error: Any) -> CardsUnavailable:
    """Return the diagnosis of an NVML error as an exception."""
    return diagnose(Library.NVML, int(error.value), describe_host()).as_error()
