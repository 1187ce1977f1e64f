"""NVIDIA cards, through NVML: the broker's only look at them, which makes no context and holds no VRAM.

A look has two halves (NVML API, nvmlDeviceGetComputeRunningProcesses and nvmlDeviceGetMemoryInfo): what each process
holds, and what is used on the card beyond that, which belongs to no process. A process that has died leaves the first
some milliseconds before its bytes leave the second. The lease table decides what a look proves (core/others).
"""

import contextlib
from collections.abc import Mapping
from typing import Any, Final

import pynvml

from gpulease.daemon.gpus import cuinit
from gpulease.daemon.gpus.diagnosis import EX_OSERR, NO_LIBRARY, Library, diagnose, look, no_cards
from gpulease.daemon.gpus.source import CardFacts, CardLoad, CardReading, CardsUnavailable, Shared
from gpulease.daemon.leases import KeptCard

RESERVE_BYTES: Final = 256 << 20
"""Kept off every card's capacity: the driver's own needs grow a little with the number of contexts."""

UNATTRIBUTED_SLACK_BYTES: Final = 64 << 20
"""How far the bytes that belong to no listed process may move without being a leak; a context's share is larger. Of
programs outside the daemon as much again may go unseen: the reserve covers both."""


ALLOWANCE_BYTES: Final = 176 << 20
"""For what the driver takes of a card in pages of 2 MiB beside what a tenant asked for. Nearly all of it is for modules
that use assertions or the device's heap: 150 MiB of local memory and heap, once, were seen on an H100. Without it a
tenant whose lease is full could not load a kernel with an assertion."""

SLACK_BYTES: Final = 16 << 20
"""What the rules miss, gaps between small modules for one; a session beyond it is ended."""


class NvidiaCards:
    """The cards NVML lists. Raises CardsUnavailable if the driver can't be used."""

    driver = "cuda"
    allowance_bytes = ALLOWANCE_BYTES
    reserve_bytes = ALLOWANCE_BYTES + SLACK_BYTES
    has_others = True

    def __init__(self, limit_bytes: int | None = None) -> None:
        """`limit_bytes`: lease at most this much of each card, None for all of it."""
        self._limit_bytes = limit_bytes
        self._handles: dict[str, Any] = {}
        self._unattributed_bytes: dict[str, int] = {}
        self._earlier_bytes: dict[str, int] = {}
        self._listings: dict[str, Shared[dict[int, int]]] = {}
        try:
            pynvml.nvmlInit()
        except pynvml.NVMLError as error:
            raise _unavailable(error) from None

    def discover(self, known: Mapping[str, KeptCard]) -> list[CardFacts]:
        """All cards, with what is used on each now off its capacity, unless that was measured before."""
        try:
            found = [self._facts(index, known) for index in range(pynvml.nvmlDeviceGetCount())]
        except pynvml.NVMLError as error:
            raise _unavailable(error) from None
        if not found:
            raise no_cards(look()).as_error()
        return found

    def why_no_context(self) -> CardsUnavailable | None:
        """Cards that NVML lists may be out of CUDA's reach all the same."""
        answer = cuinit.ask()
        if answer.number == 0:
            return None
        if answer.number is not None:
            return diagnose(Library.CUDA, answer.number, look()).as_error()
        if not answer.reason:
            return NO_LIBRARY[Library.CUDA].as_error()
        return CardsUnavailable(f"cuInit can't be called: {answer.reason}", hint="See `dmesg | grep NVRM`.")

    def process_bytes(self, card_uuid: str, pid: int) -> int:
        """What NVML says the process holds. Raises CardsUnavailable if it does not say.

        Without that figure neither admission nor the proof of a reclaim would mean anything.
        """
        try:
            held = self._processes(card_uuid).get(pid, 0)
        except pynvml.NVMLError as error:
            raise CardsUnavailable(
                f"NVML can't list what runs on {card_uuid}: {error}", hint="See what nvidia-smi says of it."
            ) from None
        if held == 0:
            raise CardsUnavailable(
                f"NVML does not show what process {pid} holds on {card_uuid}",
                hint="Run the daemon in the host's PID namespace: NVML numbers processes as the host does.",
            )
        return held

    def read(self, card_uuid: str) -> CardReading:
        """See the module's text.

        The processes are listed twice. One that begins or ends between NVML's answers would hide as many bytes that
        belong to nobody: so only what a process held both before and after the card's sum was read is taken off it.
        """
        try:
            before = self._processes(card_uuid)
            used = self._used(card_uuid)
            after = self._processes(card_uuid)
        except pynvml.NVMLError as error:
            raise CardsUnavailable(
                f"NVML can't say what the card holds: {error}", hint="See what nvidia-smi says of it."
            ) from None
        owned = sum(min(held, after.get(pid, 0)) for pid, held in before.items())
        unowned = used - owned - self._unattributed_bytes[card_uuid]
        return CardReading(unowned, after, self._earlier_bytes[card_uuid])

    def load(self, card_uuid: str) -> CardLoad:
        """What NVML says, each figure for itself: some cards tell one and not the other."""
        handle = self._handles[card_uuid]
        utilization_percent, used_bytes = None, None
        with contextlib.suppress(pynvml.NVMLError):
            utilization_percent = int(pynvml.nvmlDeviceGetUtilizationRates(handle).gpu)
        with contextlib.suppress(pynvml.NVMLError):
            used_bytes = self._used(card_uuid)
        return CardLoad(utilization_percent, used_bytes)

    def close(self) -> None:
        """Shut NVML down."""
        pynvml.nvmlShutdown()

    def _facts(self, index: int, known: Mapping[str, KeptCard]) -> CardFacts:
        handle = pynvml.nvmlDeviceGetHandleByIndex(index)
        if _is_partitioned(handle):
            raise CardsUnavailable(
                f"card {index} is in MIG mode, and leases on partitions are not supported",
                hint="Turn MIG off on it, or hide it from the daemon.",
                status=EX_OSERR,
            )
        uuid = str(pynvml.nvmlDeviceGetUUID(handle))
        self._handles[uuid] = handle
        self._listings[uuid] = Shared(lambda: _list_processes(handle))
        name = str(pynvml.nvmlDeviceGetName(handle))
        total = int(pynvml.nvmlDeviceGetMemoryInfo(handle).total)
        if (measured := known.get(uuid)) is not None:
            # What is used now is the leases' that live on, and that of others which are just dying.
            found_bytes, unattributed_bytes = measured.capacity_bytes, measured.unattributed_bytes
        else:
            used = self._used(uuid)
            unattributed_bytes = used - sum(self._processes(uuid).values())
            found_bytes = max(0, total - used - RESERVE_BYTES)
        self._unattributed_bytes[uuid] = unattributed_bytes
        self._earlier_bytes[uuid] = max(0, total - RESERVE_BYTES - found_bytes - unattributed_bytes)
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

    def _used(self, card_uuid: str) -> int:
        return int(pynvml.nvmlDeviceGetMemoryInfo(self._handles[card_uuid]).used)

    def _processes(self, card_uuid: str) -> dict[int, int]:
        """For all processes at once, which many ask for at a time."""
        return self._listings[card_uuid].ask()


def _list_processes(handle: Any) -> dict[int, int]:
    listed = [
        *pynvml.nvmlDeviceGetComputeRunningProcesses(handle),
        *pynvml.nvmlDeviceGetGraphicsRunningProcesses(handle),
    ]
    return {int(process.pid): int(process.usedGpuMemory or 0) for process in listed}


def _is_partitioned(handle: Any) -> bool:
    try:
        current, _ = pynvml.nvmlDeviceGetMigMode(handle)
    except pynvml.NVMLError_NotSupported:
        return False
    return bool(current == pynvml.NVML_DEVICE_MIG_ENABLE)


def _unavailable(error: Any) -> CardsUnavailable:
    """Why NVML failed, as far as number and host tell."""
    return diagnose(Library.NVML, int(error.value), look()).as_error()
