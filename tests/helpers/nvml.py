"""NVML's reports about the cards, for tests that need real ones."""

import os
from typing import Final

import pynvml

from helpers.waiting import wait_until

SLACK_BYTES: Final = 128 << 20
"""How far a card's used bytes move by themselves; less than any context, or any lease a test takes, holds."""


class Cards:
    """The cards that CUDA_VISIBLE_DEVICES leaves this process and its daemons, or all; NVML is initialised.

    So several runs of these tests can share a host, each with cards of its own.
    """

    def __init__(self) -> None:
        count = int(pynvml.nvmlDeviceGetCount())
        named = os.environ.get("CUDA_VISIBLE_DEVICES")
        entries = [str(index) for index in range(count)] if named is None else named.split(",")
        self._handles = [
            pynvml.nvmlDeviceGetHandleByIndex(int(entry))
            if entry.isdecimal()
            else pynvml.nvmlDeviceGetHandleByUUID(entry)
            for entry in entries
        ]

    def uuids(self) -> list[str]:
        """By index."""
        return [str(pynvml.nvmlDeviceGetUUID(handle)) for handle in self._handles]

    def total_bytes(self) -> list[int]:
        return [int(pynvml.nvmlDeviceGetMemoryInfo(handle).total) for handle in self._handles]

    def used_bytes(self) -> list[int]:
        return [int(pynvml.nvmlDeviceGetMemoryInfo(handle).used) for handle in self._handles]

    def process_bytes(self, card: int, pid: int) -> int:
        """What a card shows for one process, 0 if it does not list it."""
        listed = pynvml.nvmlDeviceGetComputeRunningProcesses(self._handles[card])
        return sum(int(process.usedGpuMemory or 0) for process in listed if process.pid == pid)

    def check_back_to(self, before: list[int]) -> None:
        """Fails unless no card has more used than before, but for the slack."""

        def is_back() -> bool:
            return all(now <= then + SLACK_BYTES for now, then in zip(self.used_bytes(), before, strict=True))

        wait_until(is_back, f"NVML shows the memory back to {before}", seen=self.used_bytes)
