"""The specification's name for the encoding of each field, derived from the field's construct.

The property tests' strategies, the vectors' JSON and the README's tables depend on these names. So a field that changes
its encoding changes all three, or a test fails.
"""

from dataclasses import dataclass, fields
from typing import Any

import construct as c

from gpulease.protocol import messages, primitives
from gpulease.protocol.messages import Body

BODY_CLASSES: dict[str, type[Any]] = {
    name: kind
    for name, kind in vars(messages).items()
    if isinstance(kind, type) and issubclass(kind, Body) and kind is not Body
}
_INTEGERS = {">B": "u8", ">H": "u16", ">h": "i16", ">L": "u32", ">Q": "u64"}


@dataclass(frozen=True)
class Encoding:
    """The encoding of a field.

    `kind` is its name in the specification. `item` and `record` are the parts of a list or an optional.
    """

    kind: str
    item: "Encoding | None" = None
    record: type[Any] | None = None
    limit: int = 0

    def __str__(self) -> str:
        if self.kind == "record":
            assert self.record is not None
            return self.record.__name__
        return f"{self.kind} of {self.item}" if self.item else self.kind

    @property
    def size(self) -> int | None:
        bits = self.kind[1:]
        return int(bits) // 8 if bits.isdigit() else None


def encoding_of(subcon: Any) -> Encoding:
    if isinstance(subcon, c.FormatField):
        return Encoding(_INTEGERS[subcon.fmtstr])
    if subcon is primitives.U128:
        return Encoding("u128")
    if subcon is primitives.REPORT:
        return Encoding("msgpack", limit=_limit(subcon.subcon.lengthfield))
    if isinstance(subcon, primitives.Record):
        return Encoding("record", record=subcon.record)
    if isinstance(subcon, c.Prefixed):
        return Encoding("bytes", limit=_limit(subcon.lengthfield))
    inner = subcon.subcon
    if isinstance(inner, c.Prefixed):
        return Encoding("text", limit=_limit(inner.lengthfield))
    if isinstance(inner, c.FocusedSeq):
        count, items = (named.subcon for named in inner.subcons)
        return Encoding("list", encoding_of(items.subcon), limit=_limit(count.subcon))
    return Encoding("optional", encoding_of(inner.subcons[1].subcon.thensubcon))


def fields_of(record: type[Any]) -> dict[str, Encoding]:
    """Return the name and encoding of each field, in the order on the wire."""
    if record in (primitives.Tlv, primitives.LeaseParameter):
        width = "u8" if record is primitives.Tlv else "u16"
        return {fields(record)[0].name: Encoding(width), "value": Encoding("short bytes", limit=0xFFFF)}
    return {item.name: encoding_of(item.metadata["wire"]) for item in fields(record)}


def _limit(length: Any) -> int:
    """Return the largest count that a length field accepts. The limit is in a closure, so this searches for it."""
    low, high = 0, 0x1_0000_0000
    while high - low > 1:
        middle = (low + high) // 2
        try:
            length.build(middle)
        except c.ConstructError:
            high = middle
        else:
            low = middle
    return low
