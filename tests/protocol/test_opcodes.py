from enum import IntEnum, IntFlag

import pytest

from gpulease.protocol import Exclusivity, Opcode, RevokeOutcome, Status
from gpulease.protocol.opcodes import ErrorTlv, Flag, InventoryFlag


@pytest.mark.parametrize("numbers", [Opcode, Status, Exclusivity, RevokeOutcome, ErrorTlv, Flag, InventoryFlag])
def test_no_number_has_two_names(numbers: type[IntEnum] | type[IntFlag]) -> None:
    assert len(numbers.__members__) == len(list(numbers))


def test_numbers_fit_their_fields() -> None:
    assert all(0 < op <= 0xFFFF for op in Opcode)
    assert all(-0x8000 <= status <= 0 for status in Status)
    assert all(0 < kind <= 0xFF for kind in ErrorTlv)
    assert all(0 <= value < 255 for value in Exclusivity)


def test_the_numbers_that_are_ours_never_change() -> None:
    """These are on the wire; a new one may be added, none may move."""
    assert {op.name: int(op) for op in Opcode}.items() >= {
        "HELLO": 0x0001,
        "ATTACH": 0x0002,
        "PING": 0x0003,
        "GOODBYE": 0x0004,
        "GET_INVENTORY": 0x0100,
        "LEASE_RENEW": 0x0201,
        "LEASE_FREE": 0x0202,
        "LEASE_QUERY": 0x0203,
        "LEASE_LIST_ACTIVE": 0x0204,
        "LEASE_SUBSCRIBE": 0x0205,
        "LEASE_UNSUBSCRIBE": 0x0206,
        "LEASE_EVENT": 0x0207,
        "FENCE_CLEAR": 0x020B,
        "DRAIN": 0x020C,
        "DRAIN_CANCEL": 0x020D,
        "METRICS": 0x020E,
        "HEALTH": 0x020F,
        "REGION_OPEN": 0x0210,
        "REGION_CANCEL": 0x0211,
        "LEASE_RESIZE": 0x0212,
        "LEASE_NOTE": 0x0215,
        "PLACE": 0x0216,
        "FLEET_LIST": 0x0217,
        "LEASE_PARK": 0x0218,
        "LEASE_MOVE": 0x0219,
        "CARD_DRAIN": 0x021A,
        "REGION_WATCH": 0x0213,
        "REGION_EVENT": 0x0214,
        "MODULE_UNLOAD": 0x0608,
        "ARENA_WRITE": 0x0609,
        "ARENA_READ": 0x060A,
        "STREAM_CREATE": 0x060B,
        "STREAM_DESTROY": 0x060C,
        "STREAM_SELECT": 0x060D,
        "STREAM_WAIT": 0x060E,
        "STREAM_SYNC": 0x060F,
        "MODULE_PARAMETERS": 0x0614,
        "REGION_SET": 0x0615,
        "REGION_SET_FREE": 0x0616,
        "REGION_RELEASE": 0x0617,
        "LAUNCH_IN": 0x0618,
        "GRAPH_LAUNCH_IN": 0x0619,
        "MODULE_VARIABLE": 0x061A,
        "MODULE_FIGURES": 0x061B,
        "EVENT_RECORD": 0x061C,
        "EVENT_ELAPSED": 0x061D,
        "EVENT_DESTROY": 0x061E,
        "PRINTED": 0x061F,
        "LAUNCH_WITH": 0x0620,
        "MEM_REUSE": 0x0621,
        "MEM_KEEP": 0x0622,
        "MEM_KEPT": 0x0623,
        "MEM_RESET": 0x0624,
        "REGION_REFUSED": 0x0625,
        "USE_TOKEN": 0x0626,
    }.items()


def test_the_statuses_and_details_that_are_ours_never_change() -> None:
    assert {status.name: int(status) for status in Status}.items() >= {
        "OK": 0,
        "INVALID_REQUEST": -16,
        "NOT_FOUND": -17,
        "DENIED": -18,
        "BUSY": -19,
        "INTERNAL": -20,
        "LEASE_FREED": -21,
        "DRAINED": -22,
        "CANCELLED": -24,
        "SESSION_FAILED": -32,
        "ALLOC_FAILED": -33,
        "INVALID_HANDLE": -34,
        "LOAD_FAILED": -35,
        "LAUNCH_FAILED": -36,
        "SYNC_FAILED": -37,
    }.items()
    assert [(kind.name, int(kind)) for kind in ErrorTlv][:11] == [
        ("HINT", 1),
        ("FAILED_REQUEST_ID", 2),
        ("FAILED_OP", 3),
        ("KERNEL", 4),
        ("ADDRESS", 5),
        ("LOG", 6),
        ("LINE", 7),
        ("REGION", 8),
        ("SITE", 9),
        ("FLIPPED_NS", 10),
        ("POSITION", 11),
    ]
