from pathlib import Path

import pytest

from gpulease.daemon.gpus.diagnosis import Host, describe_host

VERSION = (
    "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  {}  Release Build  (builder)  Tue\nGCC version: 12.2\n"
)


def write(root: Path, **files: str) -> Path:
    """A root with these files; `__` stands for a slash."""
    for name, text in files.items():
        path = root / name.replace("__", "/").replace("0000_", "0000:")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def test_an_empty_host(tmp_path: Path) -> None:
    assert describe_host(tmp_path) == Host(missing=("/dev/nvidiactl", "/dev/nvidia0", "/dev/nvidia-uvm"))


def test_a_whole_host(tmp_path: Path) -> None:
    root = write(
        tmp_path,
        proc__driver__nvidia__version=VERSION.format("580.159.04"),
        dev__nvidiactl="",
        dev__nvidia3="",
        dev__nvidia12="",
        sys__bus__pci__devices__0000_01__vendor="0x10de\n",
        sys__bus__pci__devices__0000_01__class="0x030200\n",
    )
    (root / "dev" / "nvidia-uvm").touch()
    assert describe_host(root) == Host("580.159.04", (), (), has_cards=True)
    (root / "dev" / "nvidia-uvm").unlink()
    assert describe_host(root).missing == ("/dev/nvidia-uvm",)


@pytest.mark.parametrize(
    ("vendor", "kind", "expected"),
    [("0x10de", "0x030000", True), ("0x10de", "0x068000", False), ("0x1002", "0x030000", False)],
)
def test_what_is_on_the_bus(tmp_path: Path, vendor: str, kind: str, expected: bool) -> None:
    write(tmp_path, sys__bus__pci__devices__0000_01__vendor=vendor, sys__bus__pci__devices__0000_01__class=kind)
    assert describe_host(tmp_path).has_cards is expected


@pytest.mark.parametrize(("text", "expected"), [(VERSION.format("535.54"), "535.54"), ("gibberish", "unknown")])
def test_the_module_s_version(tmp_path: Path, text: str, expected: str) -> None:
    assert describe_host(write(tmp_path, proc__driver__nvidia__version=text)).module_version == expected


def test_a_node_that_can_not_be_opened(tmp_path: Path) -> None:
    root = write(tmp_path, dev__nvidiactl="")
    # In a folder's stead there would be a node that another user, or a control group, keeps from this process.
    (root / "dev" / "nvidia0").mkdir()
    assert describe_host(root).closed == (("/dev/nvidia0", "Is a directory"),)
