"""Format kernels' output: from the records of native code (translate/vprintf.py) to text, as CUDA's printf does.

A record holds the bytes of the format. After the last byte of each conversion follow its values, of 8 bytes each, and
after a string's address the string's bytes. To find them, a decoder parses the format as the writer did.
"""

import ctypes
import sys
from collections.abc import Iterator
from dataclasses import field

from gpulease.daemon.host.captured_output import write_output
from gpulease.daemon.ptx.limits import MAX_PRINT_BYTES, MAX_PRINT_WIDTH
from gpulease.daemon.ptx.memory import Mapping
from gpulease.daemon.ptx.native.structures import Mark, PrintHead, PrintRecord
from gpulease.protocol.fast_dataclass import dataclass

_LIBC = ctypes.CDLL(None)
_HEAD_BYTES = ctypes.sizeof(PrintHead)
_RECORD_BYTES = ctypes.sizeof(PrintRecord)
_FLAGS = b" #+-0"
_SIGNED = b"di"
_TEXT_ROOM = MAX_PRINT_WIDTH * 2 + 400  # a double has up to 309 digits before the point

# The meaning of each byte after a percent sign; native code reads the same table.
MARKS = bytearray(256)
for _mark, _bytes in (
    (Mark.FLAG, b" #+-0123456789.h"),
    (Mark.LONG, b"lLzjt"),
    (Mark.STAR, b"*"),
    (Mark.INTEGER, b"diuxXoc"),
    (Mark.WIDE, b"fFeEgGaApn"),
    (Mark.STRING, b"s"),
):
    for _byte in _bytes:
        MARKS[_byte] = _mark


class PrintBuffer:
    """The records of launches since the last `take`. If the buffer is full, further records are dropped and counted."""

    def __init__(self) -> None:
        self._mapping = Mapping(_HEAD_BYTES + MAX_PRINT_BYTES)
        self.address = self._mapping.address
        self._head = PrintHead.from_address(self.address)
        self._head.capacity = MAX_PRINT_BYTES

    def take(self) -> list[tuple[int, str]]:
        """Return the texts so far, each with its kernel's number, and empty the buffer.

        No kernel may run during this call.
        """
        head = self._head
        if not head.used and not head.dropped:
            return []
        # Copy the contents before they are parsed, because a tenant's kernels wrote them.
        data = bytes(self._mapping.view[_HEAD_BYTES : _HEAD_BYTES + head.used])
        texts: list[tuple[int, str]] = []
        position = length = 0
        dropped = head.dropped
        while position < len(data):
            record = PrintRecord.from_buffer_copy(data, position)
            # Padding can make a text longer than its record, so the text has a separate bound.
            if length < MAX_PRINT_BYTES:
                text = render(data[position + _RECORD_BYTES : position + record.size])
                length += len(text)
                texts.append((record.kernel, text))
            else:
                dropped += 1
            position += record.size
        # Report lost records in a last line, under the last kernel that printed.
        if dropped:
            last = texts[-1][0] if texts else -1
            texts.append((last, f"... the output of {dropped} calls of printf did not fit {MAX_PRINT_BYTES} bytes\n"))
        head.used = head.dropped = 0
        return texts

    def close(self) -> None:
        self._mapping.close()


def print_to_output(kernel: str, text: str) -> None:
    """Write a kernel's output to standard output, which a worker keeps for its tenant."""
    write_output(text.encode())


def print_to_log(prefix: str, text: str) -> None:
    """Write lines to this process's standard error, each prefixed with the name of its subject."""
    sys.stderr.write("".join(f"{prefix}: {line}\n" for line in text.splitlines()))


def joined(texts: list[tuple[int, str]]) -> Iterator[tuple[int, str]]:
    """Join consecutive texts of one kernel: a line may be printed in parts."""
    kernel, parts = -1, list[str]()
    for number, text in texts:
        if number != kernel and parts:
            yield kernel, "".join(parts)
            parts = []
        kernel = number
        parts.append(text)
    if parts:
        yield kernel, "".join(parts)


@dataclass(slots=True)
class _Conversion:
    """The part of a conversion read so far: its text, the values of its stars, whether its argument has 64 bits."""

    text: bytearray = field(default_factory=bytearray)
    stars: list[int] = field(default_factory=list)
    is_long: bool = False


def render(record: bytes) -> str:
    output = bytearray()
    conversion: _Conversion | None = None
    position = 0
    # The format ends at its null byte. Copy bytes outside of conversions.
    while position < len(record) and record[position]:
        byte = record[position]
        position += 1
        if conversion is None:
            if byte == ord("%"):
                conversion = _Conversion()
            else:
                output.append(byte)
            continue
        # This byte is inside a conversion. Native code has put a value after each byte that requires one.
        mark = MARKS[byte]
        value = int.from_bytes(record[position : position + 8], "little")
        if mark in (Mark.STAR, Mark.INTEGER, Mark.WIDE, Mark.STRING):
            position += 8
        match mark:
            case Mark.LONG:
                conversion.is_long = True
            case Mark.STAR:
                conversion.stars.append(_signed(value, 32))
                conversion.text += b"*"
            case Mark.FLAG:
                conversion.text.append(byte)
            case Mark.STRING:
                # The string's bytes follow its address; a null pointer has none.
                end = record.index(0, position) if value else position
                output += _pad(conversion, record[position:end] if value else b"(null)")
                position = end + 1 if value else position
                conversion = None
            case Mark.INTEGER | Mark.WIDE:
                output += _number(conversion, byte, value)
                conversion = None
            # This is not a conversion, or it is "%%".
            case _:
                output += b"%" if byte == ord("%") else b"%" + conversion.text + bytes([byte])
                conversion = None
    return output.decode("utf-8", errors="replace")


def _number(conversion: _Conversion, kind: int, value: int) -> bytes:
    letter = bytes([kind])
    # Ignore %n, which would write to memory, as CUDA's printf does.
    if letter == b"n":
        return b""
    if letter == b"c":
        return _pad(conversion, bytes([value & 255]), is_cut=False)
    # Integers have the width of their length modifiers. Each is then passed to libc as a long long.
    flags, width, precision = _layout(conversion)
    short = conversion.text.count(b"h")
    bits = 64 if conversion.is_long else {0: 32, 1: 16}.get(short, 8)
    argument: ctypes.c_double | ctypes.c_longlong | ctypes.c_void_p
    if letter in b"fFeEgGaA":
        argument = ctypes.c_double.from_buffer_copy(value.to_bytes(8, "little"))
        length = b""
    elif letter == b"p":
        argument, length = ctypes.c_void_p(value), b""
    else:
        argument = ctypes.c_longlong(_signed(value, bits) if letter in _SIGNED else value & (2**bits - 1))
        length = b"ll"
    # The conversion is rebuilt from parsed and bounded numbers, so no tenant's text reaches libc.
    form = b"%" + flags + (b"%d" % width if width else b"")
    form += (b".%d" % precision if precision is not None else b"") + length + letter
    room = ctypes.create_string_buffer(_TEXT_ROOM)
    _LIBC.snprintf(room, ctypes.c_size_t(_TEXT_ROOM), form, argument)
    return room.value


def _layout(conversion: _Conversion) -> tuple[bytes, int, int | None]:
    """Return flags, width and precision. A negative width means left-aligned, a negative precision none (C's rules)."""
    # Stars take their values in the order of the text: width first.
    text = bytes(conversion.text).replace(b"h", b"")
    stars = iter(conversion.stars)
    start = len(text) - len(text.lstrip(_FLAGS))
    flags, (wide, _, narrow) = text[:start], text[start:].partition(b".")
    width = _count(wide, stars)
    if width < 0:
        flags, width = flags + b"-", -width
    precision = _count(narrow, stars) if b"." in text else None
    if precision is not None and precision < 0:
        precision = None
    return flags, min(width, MAX_PRINT_WIDTH), None if precision is None else min(precision, MAX_PRINT_WIDTH)


def _count(text: bytes, stars: Iterator[int]) -> int:
    # Read at most nine digits, because the caller bounds the number and a longer one must not take time.
    if text[:1] == b"*":
        return next(stars, 0)
    digits = text[: len(text) - len(text.lstrip(b"0123456789"))][:9]
    return int(digits or b"0")


def _pad(conversion: _Conversion, text: bytes, *, is_cut: bool = True) -> bytes:
    flags, width, precision = _layout(conversion)
    if is_cut and precision is not None:
        text = text[:precision]
    return text.ljust(width) if b"-" in flags else text.rjust(width)


def _signed(value: int, bits: int) -> int:
    value &= 2**bits - 1
    return value - (value >> (bits - 1) << bits)
