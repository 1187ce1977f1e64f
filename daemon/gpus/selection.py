"""Which cards to lease, given what the operator asked for and what the host has. Never a silent fall-back."""

from pathlib import Path
from typing import Final

from gpulease.daemon.gpus.embedded import EmbeddedCards
from gpulease.daemon.gpus.source import EX_CONFIG, CardSource, CardsUnavailable

_NVIDIA_TRACES: Final = (Path("/dev/nvidiactl"), Path("/proc/driver/nvidia/version"))

DEFAULT_VRAM_BYTES: Final = 8 << 30
"""The embedded driver's one card if the operator says nothing; committed only as it is written to."""


def has_nvidia_driver() -> bool:
    """Whether this host has an NVIDIA driver, working or not."""
    return any(trace.exists() for trace in _NVIDIA_TRACES)


def choose_cards(driver: str, vram_bytes: tuple[int, ...]) -> CardSource:
    """The cards of a driver; "auto" is cuda where an NVIDIA driver is present, working or not.

    Raises CardsUnavailable: an operator with a broken driver wants to know, not to compute on the host.
    """
    if driver == "cpu" or (driver == "auto" and not has_nvidia_driver()):
        return EmbeddedCards(vram_bytes or (DEFAULT_VRAM_BYTES,))
    if len(vram_bytes) > 1:
        raise CardsUnavailable(
            "several vram sizes were given for real cards",
            hint="Give one, the most to lease of each card, or none.",
            status=EX_CONFIG,
        )
    try:
        from gpulease.daemon.gpus.nvidia import NvidiaCards
    except ImportError as error:
        raise CardsUnavailable(
            f"the cuda driver needs {error.name}, which is not installed",
            hint="pip install '.[daemon,cuda]' in gpulease's repository",
            status=EX_CONFIG,
        ) from None
    return NvidiaCards(vram_bytes[0] if vram_bytes else None)
