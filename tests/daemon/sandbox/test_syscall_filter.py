import re
from pathlib import Path

import pytest

from gpulease.daemon.sandbox import syscall_filter
from gpulease.daemon.sandbox.syscall_filter import ALLOWED, FATAL, FOR_FILES, NEWEST, UNKNOWN, X86_64

HEADERS = [Path("/usr/include/x86_64-linux-gnu/asm/unistd_64.h"), Path("/usr/include/asm/unistd_64.h")]


def test_no_call_is_named_twice() -> None:
    names = [*ALLOWED, *FATAL, *FOR_FILES, *UNKNOWN]
    assert len(names) == len(set(names))
    assert set(names) <= X86_64.keys()
    assert not set(ALLOWED) & syscall_filter._by_arguments(1, writes_files=False).keys()


def test_numbers_are_the_kernels() -> None:
    found = next((path for path in HEADERS if path.exists()), None)
    if found is None:
        pytest.skip("this host has no headers of the kernel")
    numbers = dict(re.findall(r"#define __NR_(\w+) (\d+)", found.read_text()))
    assert {name: int(numbers[name]) for name in X86_64} == dict(X86_64)
    assert str(NEWEST) in numbers.values()


def test_a_machine_that_there_is_no_filter_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("platform.machine", lambda: "aarch64")
    with pytest.raises(syscall_filter.NoFilter, match="must be x86_64 for a filter, not aarch64"):
        syscall_filter.filter_for(1, writes_files=False)


def test_a_filter_is_the_process_own() -> None:
    assert syscall_filter.filter_for(1, writes_files=False) != syscall_filter.filter_for(2, writes_files=False)
