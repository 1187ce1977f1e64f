"""The graphs that serve.ll may replay without Python: a table of fixed size, filled on demand.

A graph is entered once Python has served the same GRAPH_LAUNCH of it twice in a row: then only the request id differs
between its frames, and no parameter has to be set. Another graph at the same place of the table displaces it, and
Python serves its next launch. A record never outlives its graph.
"""

import ctypes
from typing import Final

from gpulease.daemon.drivers.interface import DriverGraph
from gpulease.daemon.native.addresses import address_of
from gpulease.protocol.fastpath import MIDDLE_AT, REQUEST_ID_OFFSET
from gpulease.protocol.framing import Frame, build_frame

_PLACES: Final = 64
"""Number of entries: a graph's entry is at the graph's number modulo this."""

_REPLAYS: Final = 2048
"""Number of replays remembered: more than fit into the queue of any driver that can report which launch failed."""


class GraphRecord(ctypes.Structure):
    """One entry of the table; serve.ll repeats the offsets, eight bytes a field.

    number        The graph's number; 0 if the place is free.
    frame_bytes   Size of its GRAPH_LAUNCH.
    front         Address of the 16 bytes before the request id.
    rest          Address of the bytes after the request id.
    graph         The driver's `DriverGraph.native`.
    launches      What a replay adds to the counters: launches, copies, copied bytes.
    copies
    copied_bytes
    """

    _fields_ = (
        ("number", ctypes.c_uint64),
        ("frame_bytes", ctypes.c_uint64),
        ("front", ctypes.c_uint64),
        ("rest", ctypes.c_uint64),
        ("graph", ctypes.c_uint64),
        ("launches", ctypes.c_uint64),
        ("copies", ctypes.c_uint64),
        ("copied_bytes", ctypes.c_uint64),
    )


class GraphRecords:
    """The table.

    Attributes:
        address: Its address.
        is_read: Whether native code reads it; otherwise no entry is needed.
    """

    def __init__(self) -> None:
        self._places = (GraphRecord * _PLACES)()
        self.address = ctypes.addressof(self._places)
        self.is_read = False
        # By number: the graph, and the bytes that its record points to.
        self._shown: dict[int, tuple[DriverGraph, object]] = {}

    def show(
        self, number: int, frame: Frame, graph: DriverGraph, launches: int, copies: int, copied_bytes: int
    ) -> None:
        """Let native code serve launches like this one, if the driver can replay the graph there."""
        if not graph.native or number in self._shown:
            return
        ids = {"request_id": 0, "session_id": frame.session_id, "flags": frame.flags}
        frame_bytes = build_frame(frame.op, bytes(frame.payload), **ids)
        parts = frame_bytes[:REQUEST_ID_OFFSET], frame_bytes[MIDDLE_AT:]
        texts = [ctypes.create_string_buffer(part, len(part)) for part in parts]
        front, rest = map(ctypes.addressof, texts)
        place = number % _PLACES
        self.hide(self._places[place].number)
        self._shown[number] = graph, texts
        self._places[place] = GraphRecord(
            number, len(frame_bytes), front, rest, graph.native, launches, copies, copied_bytes
        )

    def hide(self, number: int) -> None:
        """Leave a graph's launches to Python. Has no effect on a graph that is not in the table."""
        if self._shown.pop(number, None) is not None:
            self._places[number % _PLACES] = GraphRecord()

    def replayed(self, number: int) -> None:
        """Notify the driver that native code queued this graph last. The graph must be in the table."""
        self._shown[number][0].replayed()


class RecentReplays:
    """The request ids of the latest replays, by native code and by Python, with which a failure names its operation.

    Attributes:
        address: The address of their number, followed by _REPLAYS request ids: that of replay n at n modulo _REPLAYS.
          serve.ll repeats these offsets.
    """

    def __init__(self) -> None:
        self._words = memoryview((ctypes.c_uint64 * (1 + _REPLAYS))()).cast("B").cast("Q")
        self.address = address_of(self._words)

    def add(self, request_id: int) -> None:
        """Remember a replay, in place of the oldest."""
        words = self._words
        words[0] = count = words[0] + 1
        words[1 + (count - 1) % _REPLAYS] = request_id

    def __contains__(self, request_id: int) -> bool:
        return request_id in self._words[1:].tolist()
