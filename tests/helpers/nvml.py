"""NVML's reports about the cards, for tests that need real ones."""

import os
from typing import Final

import pynvml

from helpers.waiting import wait_until

SLACK_BYTES: Final = 128 << 20
"""How much a card's used bytes may change without a cause. Every context, and every lease in these tests, is larger."""


class Cards:
    """The cards that CUDA_VISIBLE_DEVICES names, or all cards. NVML is initialised.

    So several runs of these tests can share a host, if each uses different cards.
    """

    def __init__(self) -> None:
        # NVML opens a card at the first call that names it, and keeps it open. So open all cards here; otherwise a test
        # whose code lists all cards would leave descriptors behind.
        every = [pynvml.nvmlDeviceGetHandleByIndex(index) for index in range(int(pynvml.nvmlDeviceGetCount()))]
        named = os.environ.get("CUDA_VISIBLE_DEVICES")
        self._handles = (
            every
            if named is None
            else [
                every[int(entry)] if entry.isdecimal() else pynvml.nvmlDeviceGetHandleByUUID(entry)
                for entry in named.split(",")
            ]
        )

    def uuids(self) -> list[str]:
        """The cards' UUIDs, by index."""
        return [str(pynvml.nvmlDeviceGetUUID(handle)) for handle in self._handles]

    def total_bytes(self) -> list[int]:
        return [int(pynvml.nvmlDeviceGetMemoryInfo(handle).total) for handle in self._handles]

    def used_bytes(self) -> list[int]:
        return [int(pynvml.nvmlDeviceGetMemoryInfo(handle).used) for handle in self._handles]

    def process_bytes(self, card: int, pid: int) -> int:
        """Return the bytes that a card reports for one process; 0 if it does not list the process."""
        listed = pynvml.nvmlDeviceGetComputeRunningProcesses(self._handles[card])
        return sum(int(process.usedGpuMemory or 0) for process in listed if process.pid == pid)

    def check_back_to(self, before: list[int]) -> None:
        """Fail unless no card soon has more used bytes than before, apart from the slack."""

        def is_back() -> bool:
            return all(now <= then + SLACK_BYTES for now, then in zip(self.used_bytes(), before, strict=True))

        wait_until(is_back, f"NVML shows the memory back to {before}", seen=self.used_bytes)
