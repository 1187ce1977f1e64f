"""The regions page as the broker writes it, and what a descriptor for its reader allows."""

import fcntl
import mmap
import os
import struct
from collections.abc import Iterator

import pytest

from gpulease.daemon.contract.regions_page import MAX_NUMBER, BrokerRegionsPage
from gpulease.protocol.limits import MAX_REGIONS
from gpulease.protocol.opcodes import Status
from gpulease.protocol.session_words import (
    DEADLINES_AT,
    EPOCH_AT,
    FLIPPED_AT,
    GENERATION_AT,
    LEASE_WORD_AT,
    MAX_SHOWN_REASON_BYTES,
    SESSION_WORDS_BYTES,
    WORDS_AT,
    RegionWord,
    cause_of,
    reason_of,
)

LAST = MAX_REGIONS - 1


@pytest.fixture
def page() -> Iterator[BrokerRegionsPage]:
    page = BrokerRegionsPage()
    yield page
    page.close()


def field(page: BrokerRegionsPage, at: int, slot: int = 0) -> int:
    found: int = struct.unpack("=Q", os.pread(page.reading_fd, 8, at + 8 * slot))[0]
    return found


@pytest.mark.parametrize("slot", [0, 7, LAST])
def test_a_word_is_number_and_state(page: BrokerRegionsPage, slot: int) -> None:
    page.set(slot, MAX_NUMBER, RegionWord.ACTIVE, 55, now_ns=44)
    assert field(page, WORDS_AT, slot) == MAX_NUMBER << 32 | RegionWord.ACTIVE
    assert field(page, DEADLINES_AT, slot) == 55
    assert field(page, FLIPPED_AT, slot) == 44


def test_no_other_slot_is_touched(page: BrokerRegionsPage) -> None:
    page.set(7, 1, RegionWord.ACTIVE, 55, now_ns=44)
    for at in (WORDS_AT, FLIPPED_AT, DEADLINES_AT):
        assert [slot for slot in range(MAX_REGIONS) if field(page, at, slot)] == [7]


def test_each_change_raises_the_epoch(page: BrokerRegionsPage) -> None:
    before = field(page, EPOCH_AT)
    page.set(1, 1, RegionWord.ACTIVE, 55, now_ns=44)
    page.set(1, 1, RegionWord.ACTIVE, 66, now_ns=45)
    page.set(1, 1, RegionWord.REVOKED, 66, now_ns=46)
    assert field(page, EPOCH_AT) == before + 3


def test_a_renewal_is_no_flip(page: BrokerRegionsPage) -> None:
    page.set(1, 1, RegionWord.ACTIVE, 55, now_ns=44)
    page.set(1, 1, RegionWord.ACTIVE, 66, now_ns=45)
    assert field(page, FLIPPED_AT, 1) == 44
    page.set(1, 1, RegionWord.EXPIRED, 66, now_ns=46)
    assert field(page, FLIPPED_AT, 1) == 46


def test_a_later_page_begins_above_every_epoch_of_an_earlier_one(page: BrokerRegionsPage) -> None:
    for _ in range(100):
        page.set(1, 1, RegionWord.ACTIVE, 55, now_ns=44)
    later = BrokerRegionsPage()
    assert field(later, EPOCH_AT) > field(page, EPOCH_AT)
    later.close()


@pytest.mark.parametrize(("slot", "number"), [(-1, 1), (MAX_REGIONS, 1), (0, 0), (0, MAX_NUMBER + 1)])
def test_a_slot_or_number_out_of_bounds_is_refused_and_changes_nothing(
    page: BrokerRegionsPage, slot: int, number: int
) -> None:
    before = os.pread(page.reading_fd, SESSION_WORDS_BYTES, 0)
    with pytest.raises(ValueError, match="slot must be below"):
        page.set(slot, number, RegionWord.ACTIVE, 55, now_ns=44)
    assert os.pread(page.reading_fd, SESSION_WORDS_BYTES, 0) == before


def test_the_reader_can_not_write(page: BrokerRegionsPage) -> None:
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.pwrite(page.reading_fd, b"1", WORDS_AT)
    with pytest.raises(PermissionError):
        mmap.mmap(page.reading_fd, SESSION_WORDS_BYTES)
    with mmap.mmap(page.reading_fd, SESSION_WORDS_BYTES, prot=mmap.PROT_READ) as seen:
        assert len(seen) == SESSION_WORDS_BYTES


def test_nobody_can_shrink_it(page: BrokerRegionsPage) -> None:
    seals = fcntl.fcntl(page.reading_fd, fcntl.F_GET_SEALS)
    assert seals & (fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_SEAL) == fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_SEAL


def test_who_may_open_it_anew_can_not_write_it_either(page: BrokerRegionsPage) -> None:
    # This process owns the file, as a tenant in a container that runs as root may.
    os.fchmod(page.reading_fd, 0o600)
    anew = os.open(f"/proc/self/fd/{page.reading_fd}", os.O_RDWR)
    try:
        for attack in (
            lambda: os.pwrite(anew, b"1", LEASE_WORD_AT),
            lambda: mmap.mmap(anew, SESSION_WORDS_BYTES),
            lambda: os.ftruncate(anew, 0),
        ):
            with pytest.raises(PermissionError):
                attack()
    finally:
        os.close(anew)
    page.end_lease(Status.REVOKED, "revoked")
    assert field(page, LEASE_WORD_AT) == -Status.REVOKED, "the broker still writes it"


def test_the_lease_s_end_has_its_cause_and_reason_and_stays(page: BrokerRegionsPage) -> None:
    page.set_generation(7)
    page.end_lease(Status.REVOKED, "revoked", "ö" * MAX_SHOWN_REASON_BYTES)
    page.end_lease(Status.LEASE_EXPIRED, "expired")
    content = os.pread(page.reading_fd, SESSION_WORDS_BYTES, 0)
    assert (field(page, LEASE_WORD_AT), field(page, GENERATION_AT)) == (-Status.REVOKED, 7)
    assert (cause_of(content), reason_of(content)) == ("revoked", "ö" * (MAX_SHOWN_REASON_BYTES // 2))
