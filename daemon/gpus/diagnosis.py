"""Explains to the operator why cards are unusable, from an error number and the host's state.

The numbers come from NVML (nvmlReturn_t of nvml.h) and the CUDA driver API (CUresult of cuda.h). One number, such as
that for "no device", often has several causes. So the host's kernel module, device nodes and PCI cards are checked
first.
"""

import os
import re
from enum import Enum
from pathlib import Path
from typing import Final

from gpulease.daemon.gpus.source import CardsUnavailable
from gpulease.protocol.fast_dataclass import dataclass

ROOT: Final = Path("/")

_VERSION: Final = re.compile(r"\b\d{3}\.\d{2,3}(?:\.\d{2})?\b")
_CARD_NODE: Final = re.compile(r"nvidia\d+")
_NVIDIA: Final = "0x10de"
_DISPLAY_CLASS: Final = "0x03"


@dataclass(frozen=True, slots=True)
class Host:
    """The state of NVIDIA's driver on the host, read from files without the driver's help.

    Attributes:
        module_version: The version of the loaded kernel module; "" if none is loaded.
        missing: The device nodes that CUDA needs and the host lacks.
        closed: The device nodes that this process can't open, each with the reason.
        has_cards: Whether an NVIDIA card is on the PCI bus; None if the bus is invisible.
    """

    module_version: str = ""
    missing: tuple[str, ...] = ()
    closed: tuple[tuple[str, str], ...] = ()
    has_cards: bool | None = None


def describe_host(root: Path = ROOT) -> Host:
    """Return the host's state.

    This opens the device nodes, because only an open shows whether a control group denies them.
    """
    # If there is no card's node, report the first card's node as missing.
    dev = root / "dev"
    cards = sorted(node.name for node in _entries_of(dev) if _CARD_NODE.fullmatch(node.name)) or ["nvidia0"]
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


def _entries_of(folder: Path) -> list[Path]:
    try:
        return list(folder.iterdir())
    except OSError:
        return []


def _module_version(path: Path) -> str:
    try:
        match = _VERSION.search(path.read_text(errors="replace"))
    except OSError:
        return ""
    return "unknown" if match is None else match[0]


def _has_cards(folder: Path) -> bool | None:
    # In a container, the bus may be invisible. Then it is unknown whether there are cards.
    devices = _entries_of(folder)
    if not devices:
        return None
    return any(
        _read_line(card / "vendor") == _NVIDIA and _read_line(card / "class").startswith(_DISPLAY_CLASS)
        for card in devices
    )


def _read_line(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""


OTHERWISE: Final = "or start with --driver cpu."


class Library(Enum):
    """The libraries that return error numbers. The value is the library's name in messages."""

    NVML = "NVML"
    CUDA = "cuInit"


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """A fault of the cards or their driver, for the operator.

    Attributes:
        message: The fault; a sentence without a full stop.
        hint: What the operator can do.
        status: The daemon's exit status.
        may_pass: Whether a retry in a moment may succeed.
    """

    message: str
    hint: str
    status: int = os.EX_UNAVAILABLE
    may_pass: bool = False

    def as_error(self) -> CardsUnavailable:
        return CardsUnavailable(self.message, hint=self.hint, status=self.status, may_pass=self.may_pass)


NO_LIBRARY: Final = {
    Library.NVML: Diagnosis(
        "the NVIDIA driver's libnvidia-ml.so.1 (NVML) is not installed",
        f"Install the NVIDIA driver, {OTHERWISE}",
        os.EX_OSERR,
    ),
    Library.CUDA: Diagnosis(
        "the NVIDIA driver's libcuda.so.1 is not installed",
        f"Install the compute part of the driver (libcuda1, nvidia-driver-cuda or a similar package), {OTHERWISE}",
        os.EX_OSERR,
    ),
}

_MISMATCH: Final = Diagnosis(
    "the NVIDIA kernel module{module} and the driver's libraries have different versions",
    "The driver was updated while the module was loaded: reboot, or reload the kernel module when "
    "nothing uses the cards.",
    os.EX_OSERR,
)
_LOST: Final = Diagnosis(
    "the driver has lost a card",
    "Reset it (nvidia-smi --gpu-reset), or reboot; `dmesg | grep -i xid` shows what happened.",
    os.EX_OSERR,
)
_MPS: Final = Diagnosis(
    "CUDA was redirected to an MPS daemon, which does not isolate tenants",
    "Stop it (echo quit | nvidia-cuda-mps-control), and unset CUDA_MPS_PIPE_DIRECTORY.",
    os.EX_OSERR,
)

BY_NUMBER: Final = {
    # NVML_ERROR_NO_PERMISSION.
    (Library.NVML, 4): Diagnosis(
        "the daemon's user may not use the cards", "Give it read and write access to /dev/nvidia*.", os.EX_NOPERM
    ),
    # NVML_ERROR_DRIVER_NOT_LOADED.
    (Library.NVML, 9): Diagnosis(
        "the NVIDIA driver is not loaded",
        "Load it (modprobe nvidia); `dmesg | grep NVRM` shows why it is not loaded.",
        may_pass=True,
    ),
    # NVML_ERROR_TIMEOUT.
    (Library.NVML, 10): Diagnosis("the driver did not answer in time", "See `dmesg | grep NVRM`.", may_pass=True),
    # NVML_ERROR_IRQ_ISSUE.
    (Library.NVML, 11): Diagnosis(
        "a card's interrupts do not arrive", "See `dmesg | grep NVRM`, and reboot.", os.EX_OSERR
    ),
    # NVML_ERROR_LIBRARY_NOT_FOUND.
    (Library.NVML, 12): NO_LIBRARY[Library.NVML],
    # NVML_ERROR_FUNCTION_NOT_FOUND.
    (Library.NVML, 13): Diagnosis(
        "the installed NVML lacks a function that is needed", "Install a newer NVIDIA driver.", os.EX_OSERR
    ),
    # NVML_ERROR_GPU_IS_LOST and NVML_ERROR_RESET_REQUIRED.
    (Library.NVML, 15): _LOST,
    (Library.NVML, 16): _LOST,
    # NVML_ERROR_OPERATING_SYSTEM.
    (Library.NVML, 17): Diagnosis(
        "the operating system denies the cards to this process",
        "Allow char-nvidia* in its control group (DeviceAllow= of systemd.resource-control(5)).",
        os.EX_NOPERM,
    ),
    # NVML_ERROR_LIB_RM_VERSION_MISMATCH.
    (Library.NVML, 18): _MISMATCH,
    # NVML_ERROR_IN_USE.
    (Library.NVML, 19): Diagnosis(
        "another program uses the driver exclusively", "Try again when that program has ended.", may_pass=True
    ),
    # CUDA_ERROR_OUT_OF_MEMORY.
    (Library.CUDA, 2): Diagnosis(
        "CUDA found too little memory on the host", "Allow the daemon more memory, or end programs that use it."
    ),
    # CUDA_ERROR_STUB_LIBRARY.
    (Library.CUDA, 34): Diagnosis(
        "the libcuda.so.1 that was found is the CUDA toolkit's stub, which does nothing",
        "Remove the toolkit's folder `stubs` from LD_LIBRARY_PATH and /etc/ld.so.conf.d.",
        os.EX_OSERR,
    ),
    # CUDA_ERROR_NO_DEVICE.
    (Library.CUDA, 100): Diagnosis(
        "CUDA sees no card", "Unset CUDA_VISIBLE_DEVICES, and check that nvidia-smi lists the cards.", may_pass=True
    ),
    # CUDA_ERROR_ECC_UNCORRECTABLE.
    (Library.CUDA, 214): Diagnosis(
        "a card's memory has an error that can't be corrected",
        "Reset the card, and replace it if the error returns.",
        os.EX_OSERR,
    ),
    # CUDA_ERROR_OPERATING_SYSTEM.
    (Library.CUDA, 304): Diagnosis(
        "the operating system refused a call of CUDA's",
        "See `dmesg`; check that /dev/nvidia-uvm can be opened and that memory may be locked (LimitMEMLOCK=).",
        may_pass=True,
    ),
    # CUDA_ERROR_SYSTEM_NOT_READY.
    (Library.CUDA, 802): Diagnosis(
        "the switches that join the cards are not set up yet",
        "Start nvidia-fabricmanager of exactly the driver's version{version}.",
        may_pass=True,
    ),
    # CUDA_ERROR_SYSTEM_DRIVER_MISMATCH.
    (Library.CUDA, 803): _MISMATCH,
    # CUDA_ERROR_COMPAT_NOT_SUPPORTED_ON_DEVICE.
    (Library.CUDA, 804): Diagnosis(
        "the libcuda.so.1 that was found belongs to the forward compatibility package, which does not "
        "support these cards",
        "Remove cuda-compat from LD_LIBRARY_PATH and /etc/ld.so.conf.d, or update the driver.",
        os.EX_OSERR,
    ),
    # CUDA_ERROR_MPS_CONNECTION_FAILED, _MPS_RPC_FAILURE and _MPS_SERVER_NOT_READY.
    (Library.CUDA, 805): _MPS,
    (Library.CUDA, 806): _MPS,
    (Library.CUDA, 807): _MPS,
    # CUDA_ERROR_UNKNOWN.
    (Library.CUDA, 999): Diagnosis(
        "CUDA failed without giving a reason",
        "See `dmesg | grep NVRM`; after the host was suspended, reload nvidia_uvm.",
        may_pass=True,
    ),
}

_BY_HOST: Final = frozenset(
    {(Library.NVML, 4), (Library.NVML, 9), (Library.NVML, 17), (Library.NVML, 999)}
    | {(Library.CUDA, number) for number in (3, 100, 101, 304, 999)}
)
"""Numbers that a library returns for several different faults of the driver."""


def diagnose(library: Library, number: int, host: Host) -> Diagnosis:
    """Return the diagnosis of a library's error number on a host in this state."""
    # If the number has several causes, prefer a fault that the host's state shows.
    if (library, number) in _BY_HOST and (fault := _fault_of(library, host)) is not None:
        return fault
    diagnosis = BY_NUMBER.get((library, number))
    if diagnosis is None:
        return Diagnosis(
            f"{library.value} failed with error {number}",
            f"Check that nvidia-smi works for the daemon's user, {OTHERWISE}",
        )
    # Include the versions only if they are known.
    module = f" ({host.module_version})" if host.module_version else ""
    version = f", {host.module_version}" if host.module_version else ""
    return Diagnosis(
        diagnosis.message.format(module=module),
        diagnosis.hint.format(version=version),
        diagnosis.status,
        diagnosis.may_pass,
    )


def no_cards(host: Host) -> Diagnosis:
    """Return the diagnosis of a driver that works but lists no card."""
    if host.has_cards is False:
        return _no_such_card()
    return Diagnosis(
        "the NVIDIA driver lists no card",
        "See `dmesg | grep NVRM`, which reports cards that can't be initialized.",
        may_pass=True,
    )


def _fault_of(library: Library, host: Host) -> Diagnosis | None:
    # Check from the bottom up: the card, the kernel module, the device nodes, the right to open them.
    if not host.module_version:
        if host.has_cards is False:
            return _no_such_card()
        return Diagnosis(
            "the NVIDIA kernel module is not loaded",
            "Load it (modprobe nvidia); `dmesg | grep NVRM` shows why it can't be loaded.",
            may_pass=True,
        )
    # NVML does not need nvidia-uvm, the node of CUDA's unified memory.
    needed = [name for name in host.missing if library is Library.CUDA or not name.endswith("-uvm")]
    if needed:
        return Diagnosis(
            f"{_listed(needed)} missing",
            "Create them with nvidia-modprobe -u -c 0, or run nvidia-persistenced.",
            may_pass=True,
        )
    for name, reason in host.closed:
        return Diagnosis(
            f"the daemon's user may not open {name} ({reason})",
            "Give the user the device's group, or change its mode (NVreg_DeviceFileGID and "
            "NVreg_DeviceFileMode of the nvidia module). Under systemd, allow the device as well "
            "(DeviceAllow=).",
            os.EX_NOPERM,
        )
    return None


def _listed(names: list[str]) -> str:
    return f"{names[0]} is" if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]} are"


def _no_such_card() -> Diagnosis:
    return Diagnosis("this host has no NVIDIA card on its PCI bus", f"Start on another host, {OTHERWISE}", os.EX_OSERR)
