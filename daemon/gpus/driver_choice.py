"""Chooses cards by the `driver` setting and the host's drivers. If it chooses emulated cards by itself, it warns."""

import os
from pathlib import Path
from typing import Final

from gpulease.daemon.gpus.emulated_cards import EmbeddedCards
from gpulease.daemon.gpus.source import CardSource, CardsUnavailable

_NVIDIA_TRACES: Final = (Path("/dev/nvidiactl"), Path("/proc/driver/nvidia/version"))

DEFAULT_VRAM_BYTES: Final = 8 << 30
"""Memory of the embedded driver's default card. The host provides the memory only when it is written."""

EMULATION_WARNING: Final = (
    "this host has no NVIDIA driver, so its cards are emulated: kernels run on the CPU, in the host's "
    "memory. Install the driver and restart gpuleased, or start it with --driver cpu if this is intended"
)
"""The warning about emulated cards that the settings did not request."""


def has_nvidia_driver() -> bool:
    """Return whether this host has an NVIDIA driver, working or not."""
    return any(trace.exists() for trace in _NVIDIA_TRACES)


def choose_cards(driver: str, vram_bytes: tuple[int, ...]) -> CardSource:
    """Return a driver's cards. "auto" means cuda if the host has an NVIDIA driver, working or not, and else cpu.

    Raises CardsUnavailable. A broken NVIDIA driver is an error too: it never leads to emulated cards.
    """
    if driver == "cpu" or (driver == "auto" and not has_nvidia_driver()):
        warning = "" if driver == "cpu" else EMULATION_WARNING
        return EmbeddedCards(vram_bytes or (DEFAULT_VRAM_BYTES,), warning=warning)
    # Only emulated cards may have a size each. Real cards have one limit for all of them.
    if len(vram_bytes) > 1:
        raise CardsUnavailable(
            "with real cards, vram must be one size, not several",
            hint="Give one size, the most memory of each card that may be leased, or none.",
            status=os.EX_CONFIG,
        )
    try:
        # Import this late, because NVML's package is an extra that only hosts with cards install.
        from gpulease.daemon.gpus.nvidia import NvidiaCards
    except ImportError as error:
        raise CardsUnavailable(
            f"the cuda driver needs {error.name}, which is not installed",
            hint="pip install '.[daemon,cuda]' in gpulease's repository",
            status=os.EX_CONFIG,
        ) from None
    return NvidiaCards(vram_bytes[0] if vram_bytes else None)
