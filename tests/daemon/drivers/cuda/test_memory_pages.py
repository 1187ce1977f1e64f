import pytest

from gpulease.daemon.drivers.cuda.memory import PAGE_BYTES, LocalMemory, Pages

MIB = 1 << 20
H100 = LocalMemory(stack_bytes=1024, threads=132 * 2048, buffers_bytes=9 * MIB)


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("size_bytes", "count", "taken_mib"),
    # What an H100 showed for 64 allocations of each size.
    [
        (4, 64, 2),
        (4096, 64, 2),
        (65536, 64, 4),
        (MIB - 1, 64, 64),
        (MIB, 64, 64),
        (MIB + 1, 64, 128),
        (3 * MIB, 64, 256),
    ],
)
def test_what_allocations_take(size_bytes: int, count: int, taken_mib: int) -> None:
    pages = Pages()
    step = max(512, -(-size_bytes // 512) * 512) if size_bytes <= MIB else -(-size_bytes // PAGE_BYTES) * PAGE_BYTES
    for number in range(count):
        pages.add(0x7F0000000000 + number * step, size_bytes)
    assert pages.taken_bytes == taken_mib * MIB
    assert pages.rounding_bytes == taken_mib * MIB - count * size_bytes
    for number in range(count):
        pages.remove(0x7F0000000000 + number * step)
    assert (pages.taken_bytes, pages.rounding_bytes) == (0, 0)


def test_a_page_goes_back_with_its_last_allocation() -> None:
    pages = Pages()
    pages.add(0, 512)
    pages.add(512, 512)
    pages.remove(0)
    assert pages.taken_bytes == PAGE_BYTES
    pages.remove(512)
    assert pages.taken_bytes == 0


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("local_bytes", "measured_mib"), [(600, 0), (1024, 0), (2048, 264), (16384, 3960), (65536, 16632), (200000, 51298)]
)
def test_local_memory_is_never_charged_too_little(local_bytes: int, measured_mib: int) -> None:
    charged_mib = H100.kept_by(local_bytes) / MIB
    # An H100 keeps 150 MiB more if a module with system calls was loaded too.
    assert charged_mib == 0 if not measured_mib else measured_mib + 150 <= charged_mib <= measured_mib + 154


def test_system_calls_fit_the_allowance() -> None:
    assert 150 * MIB <= H100.kept_by_system_calls <= 154 * MIB
