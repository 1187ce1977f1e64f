"""Hypothesis strategies for every message, made from its definition, and constants that several tests use."""

from typing import Any

from hypothesis import strategies as st

from gpulease.protocol.messages import Body
from gpulease.protocol.opcodes import Status

from .encodings import BODY_CLASSES, Encoding, fields_of

REPORT_VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats(allow_nan=False)
    | st.text(max_size=20)
    | st.binary(max_size=20),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=8,
)


def integers(bits: int) -> st.SearchStrategy[int]:
    return st.integers(0, 2**bits - 1)


def bounded_text(limit: int) -> st.SearchStrategy[str]:
    return st.text(st.characters(exclude_categories=["Cs"]), max_size=min(limit // 4, 40))


def values(encoding: Encoding) -> st.SearchStrategy[Any]:
    """Return values for a field of this encoding. They are small, because limits have separate tests."""
    if encoding.kind == "i16":
        return st.integers(-(2**15), 2**15 - 1)
    if encoding.size is not None:
        return integers(encoding.size * 8)
    if encoding.kind in ("bytes", "short bytes"):
        return st.binary(max_size=min(encoding.limit or 60, 60))
    if encoding.kind == "text":
        return bounded_text(encoding.limit)
    if encoding.kind == "msgpack":
        return REPORT_VALUES
    if encoding.kind == "record":
        assert encoding.record is not None
        return records(encoding.record)
    assert encoding.item is not None
    item = values(encoding.item)
    if encoding.kind == "optional":
        return st.none() | item
    return st.lists(item, max_size=4).map(tuple)


def records(record: type[Any]) -> st.SearchStrategy[Any]:
    """Instances of a message class, or of a record inside one."""
    return st.builds(record, **{name: values(encoding) for name, encoding in fields_of(record).items()})


BODIES: st.SearchStrategy[Body] = st.sampled_from(sorted(BODY_CLASSES)).flatmap(
    lambda name: records(BODY_CLASSES[name])
)
REQUEST_IDS = integers(64).filter(bool)
SESSION_IDS = integers(128)
FAILED_STATUSES = st.sampled_from([status for status in Status if status is not Status.OK])


def chunks(data: bytes) -> st.SearchStrategy[list[bytes]]:
    cuts = st.lists(st.integers(0, len(data)), max_size=12).map(sorted)
    return cuts.map(lambda at: [data[a:b] for a, b in zip([0, *at], [*at, len(data)], strict=True)])
