"""What the operator is told, by the number a library gave and by what the host shows."""

import os
import re

import pytest

from gpulease.daemon.gpus.diagnosis import BY_NUMBER, NO_LIBRARY, Host, Library, diagnose, no_cards

NVML, CUDA = Library.NVML, Library.CUDA

WELL = Host("580.159.04", has_cards=True)
NOT_LOADED = Host(missing=("/dev/nvidiactl", "/dev/nvidia0", "/dev/nvidia-uvm"), has_cards=True)
NO_NODES = Host("580.159.04", missing=("/dev/nvidiactl", "/dev/nvidia0"))
NO_MEMORY_NODE = Host("580.159.04", missing=("/dev/nvidia-uvm",))
SHUT = Host("580.159.04", closed=(("/dev/nvidiactl", "Permission denied"),))
NO_CARD = Host(missing=("/dev/nvidiactl",), has_cards=False)


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("library", "number", "host", "told", "status", "may_pass"),
    [
        (NVML, 9, NOT_LOADED, r"kernel module is not loaded.*modprobe nvidia", os.EX_UNAVAILABLE, True),
        (NVML, 9, NO_CARD, r"this host has no NVIDIA card on its PCI bus.*--driver cpu", os.EX_OSERR, False),
        (NVML, 9, NO_NODES, r"/dev/nvidiactl and /dev/nvidia0 are missing.*nvidia-modprobe", os.EX_UNAVAILABLE, True),
        (NVML, 999, NO_MEMORY_NODE, r"NVML failed with error 999.*nvidia-smi", os.EX_UNAVAILABLE, False),
        (NVML, 9, WELL, r"driver is not loaded.*dmesg", os.EX_UNAVAILABLE, True),
        (NVML, 4, SHUT, r"may not open /dev/nvidiactl \(Permission denied\).*DeviceAllow", os.EX_NOPERM, False),
        (NVML, 4, WELL, r"may not use the cards", os.EX_NOPERM, False),
        (NVML, 12, NOT_LOADED, r"libnvidia-ml.so.1 \(NVML\) is not installed.*--driver cpu", os.EX_OSERR, False),
        (NVML, 17, WELL, r"operating system denies.*DeviceAllow", os.EX_NOPERM, False),
        (NVML, 18, WELL, r"kernel module \(580.159.04\) and the driver's libraries.*reboot", os.EX_OSERR, False),
        (NVML, 15, WELL, r"lost a card.*xid", os.EX_OSERR, False),
        (NVML, 77, WELL, r"NVML failed with error 77.*nvidia-smi", os.EX_UNAVAILABLE, False),
        (CUDA, 100, WELL, r"sees no card.*CUDA_VISIBLE_DEVICES", os.EX_UNAVAILABLE, True),
        (CUDA, 100, SHUT, r"may not open /dev/nvidiactl", os.EX_NOPERM, False),
        (CUDA, 304, NO_MEMORY_NODE, r"/dev/nvidia-uvm is missing.*nvidia-modprobe", os.EX_UNAVAILABLE, True),
        (CUDA, 304, WELL, r"refused a call of CUDA's.*LimitMEMLOCK", os.EX_UNAVAILABLE, True),
        (CUDA, 999, NO_MEMORY_NODE, r"/dev/nvidia-uvm is missing", os.EX_UNAVAILABLE, True),
        (CUDA, 802, NO_MEMORY_NODE, r"switches.*fabricmanager of exactly.*580.159.04", os.EX_UNAVAILABLE, True),
        (CUDA, 803, WELL, r"kernel module \(580.159.04\) and the driver's libraries.*reboot", os.EX_OSERR, False),
        (CUDA, 804, WELL, r"forward compatibility.*cuda-compat", os.EX_OSERR, False),
        (CUDA, 34, WELL, r"stub", os.EX_OSERR, False),
        (CUDA, 806, WELL, r"MPS daemon", os.EX_OSERR, False),
        (CUDA, 12345, WELL, r"cuInit failed with error 12345", os.EX_UNAVAILABLE, False),
    ],
)
def test_told(library: Library, number: int, host: Host, told: str, status: int, may_pass: bool) -> None:
    found = diagnose(library, number, host)
    assert re.search(told, f"{found.message}. {found.hint}"), found
    assert (found.status, found.may_pass) == (status, may_pass)
    error = found.as_error()
    assert (str(error), error.hint, error.status, error.may_pass) == (found.message, found.hint, status, may_pass)


@pytest.mark.parametrize("host", [Host(), WELL, NOT_LOADED, NO_CARD, SHUT])
def test_every_one_is_a_sentence_with_a_fix(host: Host) -> None:
    all_of_them = [diagnose(library, number, host) for library, number in BY_NUMBER]
    for found in (*all_of_them, *NO_LIBRARY.values(), no_cards(host)):
        assert not found.message.endswith(".")
        assert found.hint.endswith(".")
        assert "{" not in found.message + found.hint
        assert found.status in (os.EX_UNAVAILABLE, os.EX_OSERR, os.EX_NOPERM)
        assert not (found.may_pass and found.status != os.EX_UNAVAILABLE), "what a restart does not mend does not pass"


def test_no_card_is_listed() -> None:
    assert no_cards(NO_CARD).status == os.EX_OSERR
    assert no_cards(WELL).may_pass
