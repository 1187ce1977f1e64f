"""The bytes of a revoked region's refusal, prepared so that native code only puts numbers into them.

The payload of such a reply is, in this order: the region's sentence and hint, up to and including the refused launch's
request id; the launch's operation and kernel; the region's id, and the numbers of the launch. `Failure.to_body` is the
reference: the parts are cut from its bytes.
"""

import ctypes
from dataclasses import replace
from functools import cache
from typing import Final

from gpulease.daemon.session.native.layout import RegionRecord
from gpulease.protocol.codec import build_body
from gpulease.protocol.failures import Failure, region_refusal
from gpulease.protocol.framing import HEADER_BYTES, build_frame
from gpulease.protocol.limits import MAX_ERROR_TEXT_BYTES
from gpulease.protocol.opcodes import Flag, Opcode, Status
from gpulease.protocol.session_words import RegionWord, word_of

NO_WORD: Final = (1 << 64) - 1
"""A word that no broker writes: no word of the page equals it."""

REFUSAL_BYTES: Final = HEADER_BYTES + MAX_ERROR_TEXT_BYTES + 1024
"""Room for a whole reply: sentence and hint take about 200 bytes, the kernel's name at most MAX_ERROR_TEXT_BYTES."""

_BACK_BYTES: Final = 48
"""The TLVs after the kernel's: the region's id, the site, the time of the flip and the position. serve.ll repeats this
number, and where their values are."""

# A region's id that is replaced by each region's own. No text contains its digits by chance.
_MARK: Final = 0xFEDC_BA98_7654_3210_0123_4567_89AB_CDEF


def refusal_front() -> bytes:
    """Return the first 12 bytes of a reply that reports a revoked region: all before the payload's length."""
    return build_frame(Opcode.SYNC, request_id=0, session_id=0, flags=Flag.REPLY, status=Status.REVOKED)[:12]


def kernel_part(kernel: str) -> bytes:
    """Return the bytes of a LAUNCH_IN's refusal about its operation and kernel."""
    # These bytes are between the region's two parts, which do not depend on the kernel.
    front, _ = _parts()
    return _payload(kernel)[len(front) : -_BACK_BYTES]


def record_of(region_id: int, slot: int, number: int) -> RegionRecord:
    """Return a region's record. The region must not have ended."""
    old_text, new_text = f"{_MARK:032x}".encode(), f"{region_id:032x}".encode()
    old_id, new_id = _MARK.to_bytes(16, "big"), region_id.to_bytes(16, "big")
    front, tail = _parts()
    front, tail = front.replace(old_text, new_text), tail.replace(old_id, new_id)
    texts = [ctypes.create_string_buffer(text, len(text)) for text in (front, tail)]
    record = RegionRecord(
        column=ctypes.sizeof(ctypes.c_uint64) * slot,
        active=word_of(number, RegionWord.ACTIVE),
        revoked=word_of(number, RegionWord.REVOKED),
        front=ctypes.addressof(texts[0]),
        front_bytes=len(front),
        back=ctypes.addressof(texts[1]),
    )
    # Store these in an attribute of the record, so that the bytes to which the record points live as long as the
    # record.
    record.referents = texts
    return record


@cache
def _parts() -> tuple[bytes, bytes]:
    """The parts before and after the kernel's, of the region _MARK."""
    short, long = _payload("k"), _payload("kk")
    # The number of TLVs and every length but the kernel's are the same: both payloads begin and end alike.
    kernel_bytes = _tlv_bytes(Opcode.LAUNCH_IN.to_bytes(2, "big")) + _tlv_bytes(b"k")
    front, tail = short[: -_BACK_BYTES - kernel_bytes], short[-_BACK_BYTES:]
    if not (long.startswith(front) and long.endswith(tail)):
        raise AssertionError("a refusal's payload depends on its kernel in more than the kernel")
    return front, tail


def _tlv_bytes(value: bytes) -> int:
    # The type, the length, the value.
    return 3 + len(value)


def _payload(kernel: str) -> bytes:
    failure: Failure = region_refusal(_MARK, RegionWord.REVOKED, 0, is_repeat=False, kernel=kernel, site=0, position=0)
    return build_body(replace(failure, failed_request_id=0, failed_op=Opcode.LAUNCH_IN).to_body())
