"""The public facts of the wire, each as literal bytes: a round trip can't tell when both directions are wrong alike."""

import pytest

from gpulease.protocol import BodyError, Exclusivity, Failure, Opcode, RevokeOutcome, Status
from gpulease.protocol import messages as m
from gpulease.protocol.codec import build_body, parse_body
from gpulease.protocol.framing import build_frame
from gpulease.protocol.lease_options import EXCLUSIVITY
from gpulease.protocol.opcodes import GPU_RESOURCE_TYPE, KNOWN_FLAGS, Flag, InventoryFlag
from gpulease.protocol.operations import SESSION_OPCODES
from gpulease.protocol.primitives import LeaseParameter, Tlv

OPERATIONS = {
    "LEASE_ALLOC": 0x0200,
    "LEASE_REVOKE": 0x020A,
    "MEM_ALLOC": 0x0601,
    "MEM_FREE": 0x0602,
    "MEM_WRITE": 0x0603,
    "MEM_READ": 0x0604,
    "MODULE_LOAD": 0x0605,
    "LAUNCH": 0x0606,
    "SYNC": 0x0607,
}
HOST_ERRORS = {
    "DISCONNECTED": -1,
    "LEASE_EXPIRED": -2,
    "FENCED": -3,
    "CAPACITY_EXCEEDED": -4,
    "UNSUPPORTED": -5,
    "REVOKED": -6,
}
LEASE = 0x00112233445566778899AABBCCDDEEFF

BODIES: dict[str, tuple[m.Body, str]] = {
    "integers are big-endian": (
        m.MemRead(1, 0x0203, 0x0405060708),
        "0000000000000001 0000000000000203 0000000405060708",
    ),
    "bytes are a u32 length and the data": (m.Data(b"\xaa\xbb\xcc"), "00000003 aabbcc"),
    "a list is a u16 count and the items, a tlv a u8 type and a u16 length": (
        m.Attach((Tlv(1, b"\xaa\xbb"), Tlv(0xFE, b""))),
        "0002 01 0002 aabb fe 0000",
    ),
    "an optional is a u8 present flag": (m.FenceClear(None), "00"),
    "and the field": (m.FenceClear("0"), "01 00000001 30"),
    "lease ids are u128": (m.LeaseRef(LEASE), "00112233445566778899aabbccddeeff"),
    "free needs only the lease id": (m.LeaseRef(1), "00000000000000000000000000000001"),
    "revoke outcome 0 is torn down": (m.LeaseRevoked(RevokeOutcome.TORN_DOWN), "00"),
    "revoke outcome 1 is fenced": (m.LeaseRevoked(RevokeOutcome.FENCED), "01"),
    "revoke outcome 2 is not found": (m.LeaseRevoked(RevokeOutcome.NOT_FOUND), "02"),
    "a lease parameter is a u16 tag and a u16 length": (
        m.LeaseAlloc(GPU_RESOURCE_TYPE, 1 << 30, 60_000, 0, None, (LeaseParameter(0x0903, b"\x02"),)),
        "0005 0000000040000000 0000ea60 00000000 00 0001 09 03 00 01 02",
    ),
    "kernel arguments are little-endian, with a list of their sizes": (
        m.Launch(1, "k", 4, 1, 1, 256, 1, 1, 0, (0x7F00).to_bytes(8, "little") + b"\x2a\0\0\0", (8, 4)),
        "0000000000000001 00000001 6b"
        "00000004 00000001 00000001 00000100 00000001 00000001 00000000"
        "0000000c 007f000000000000 2a000000"
        "0002 00000008 00000004",
    ),
}


@pytest.mark.parametrize("fact", BODIES)
def test_a_fact_byte_for_byte(fact: str) -> None:
    body, expected = BODIES[fact]
    assert build_body(body).hex() == expected.replace(" ", "")
    assert parse_body(type(body), bytes.fromhex(expected)) == body


@pytest.mark.parametrize(("name", "number"), OPERATIONS.items())
def test_a_public_operation_number(name: str, number: int) -> None:
    assert Opcode[name] == number
    assert build_frame(Opcode[name], request_id=1)[6:8] == number.to_bytes(2, "big")


def test_session_operations_are_numbered_from_0601_on() -> None:
    assert sorted(SESSION_OPCODES) == list(range(0x0601, 0x0601 + len(SESSION_OPCODES)))


@pytest.mark.parametrize(("name", "number"), HOST_ERRORS.items())
def test_a_public_host_error_number(name: str, number: int) -> None:
    assert Status[name] == number
    wire = build_frame(Opcode.SYNC, request_id=1, flags=Flag.REPLY, status=Status[name])
    assert wire[8:10] == bytes([0xFF, 0x100 + number])


def test_the_header_byte_for_byte() -> None:
    wire = build_frame(Opcode.PING, b"\xee", request_id=0x0102030405060708, session_id=LEASE, flags=Flag.QUIET)
    assert wire.hex(" ", -4) == (
        "47504c53 01020003 00000000 00000001 01020304 05060708 00112233 44556677 8899aabb ccddeeff ee"
    )


def test_the_flags() -> None:
    assert (Flag.REPLY, Flag.QUIET, KNOWN_FLAGS) == (1, 2, 3)


def test_the_inventory_entry_is_36_bytes() -> None:
    flags = InventoryFlag.FENCED | InventoryFlag.DEGRADED
    entry = m.InventoryEntry(LEASE, GPU_RESOURCE_TYPE, flags, 80 << 30, 1 << 30)
    payload = build_body(m.Inventory((entry, entry), None))
    assert payload[:2].hex() == "0002"
    assert payload[2:38].hex(" ") == (
        "00 11 22 33 44 55 66 77 88 99 aa bb cc dd ee ff "  # id
        "00 05 "  # resource type: GPU
        "00 03 "  # bit 0 FENCED, bit 1 DEGRADED
        "00 00 00 14 00 00 00 00 "  # capacity
        "00 00 00 00 40 00 00 00"  # available
    )
    assert payload[38:74] == payload[2:38]
    assert payload[74:].hex() == "00000001c0"
    assert (InventoryFlag.FENCED, InventoryFlag.DEGRADED) == (1, 2)


def test_the_gpu_resource_type() -> None:
    assert GPU_RESOURCE_TYPE == 5


@pytest.mark.parametrize(("name", "number"), list(zip(Exclusivity, range(4), strict=True)))
def test_the_exclusivity_parameter_byte_for_byte(name: Exclusivity, number: int) -> None:
    assert name == number
    parameter = LeaseParameter(EXCLUSIVITY.tag, bytes([name]))
    payload = build_body(m.LeaseAlloc(5, 0, 0, 0, None, (parameter,)))
    assert payload[-5:].hex(" ") == f"09 03 00 01 0{number}"


@pytest.mark.parametrize("value", [4, 17, 254, 255])
def test_other_exclusivity_classes_can_be_said(value: int) -> None:
    """So that a daemon refuses them by name, not as a malformed request."""
    payload = bytes.fromhex("0005 0000000000000001 00000001 00000000 00 0001 09030001") + bytes([value])
    assert parse_body(m.LeaseAlloc, payload).parameters == (LeaseParameter(0x0903, bytes([value])),)


def test_unknown_parameters_and_tlvs_are_skipped_not_refused() -> None:
    payload = bytes.fromhex("0005 0000000000000001 00000001 00000000 00 0002 ffff0002abcd 0903000100")
    assert len(parse_body(m.LeaseAlloc, payload).parameters) == 2
    error = parse_body(m.ErrorBody, bytes.fromhex("00000001 78 0002 f0 0003 010203 01 0001 79"))
    assert Failure.from_body(Status.BUSY, error) == Failure(Status.BUSY, "x", hint="y")


def test_a_present_flag_is_0_or_1() -> None:
    for flag in range(2, 256):
        with pytest.raises(BodyError):
            parse_body(m.FenceClear, bytes([flag]) + bytes(4))
