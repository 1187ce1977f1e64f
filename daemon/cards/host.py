"""What the host shows of NVIDIA's driver without asking the driver: its kernel module, its device nodes, its cards."""

import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Final

ROOT: Final = Path("/")

_VERSION: Final = re.compile(r"\b\d{3}\.\d{2,3}(?:\.\d{2})?\b")
_CARD_NODE: Final = re.compile(r"nvidia\d+")
_NVIDIA: Final = "0x10de"
_DISPLAY_CLASS: Final = "0x03"


@dataclass(frozen=True, slots=True)
class Host:
    """What was found.

    Attributes:
        module_version: Of the kernel module that is loaded; "" if none is.
        missing: Device nodes that CUDA needs and that are not there.
        closed: Those that this process can't open, each with the reason.
        has_cards: Whether an NVIDIA card is on the PCI bus; None where the bus can't be seen.
    """

    module_version: str = ""
    missing: tuple[str, ...] = ()
    closed: tuple[tuple[str, str], ...] = ()
    has_cards: bool | None = None


def look(root: Path = ROOT) -> Host:
    """What is there now. It opens the device nodes: a control group denies that, which nothing else shows."""
    dev = root / "dev"
    cards = sorted(node.name for node in _listed(dev) if _CARD_NODE.fullmatch(node.name)) or ["nvidia0"]
    missing: list[str] = []
    closed: list[tuple[str, str]] = []
    for name in ("nvidiactl", *cards, "nvidia-uvm"):
        try:
            os.close(os.open(dev / name, os.O_RDWR | os.O_CLOEXEC | os.O_NONBLOCK))
        except FileNotFoundError:
            missing.append(f"/dev/{name}")
        except OSError as error:
            closed.append((f"/dev/{name}", error.strerror or str(error)))
    return Host(
        module_version=_module_version(root / "proc/driver/nvidia/version"),
        missing=tuple(missing),
        closed=tuple(closed),
        has_cards=_has_cards(root / "sys/bus/pci/devices"),
    )


def _listed(folder: Path) -> list[Path]:
    try:
        return list(folder.iterdir())
    except OSError:
        return []


def _module_version(path: Path) -> str:
    try:
        found = _VERSION.search(path.read_text(errors="replace"))
    except OSError:
        return ""
    return "unknown" if found is None else found[0]


def _has_cards(folder: Path) -> bool | None:
    devices = _listed(folder)
    if not devices:
        return None
    return any(
        _says(card / "vendor") == _NVIDIA and _says(card / "class").startswith(_DISPLAY_CLASS) for card in devices
    )


def _says(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""
