"""Values of etcd: any bytes give a record within its bounds, or are unreadable; nothing is raised."""

import json
from collections.abc import Callable
from dataclasses import asdict, fields, is_dataclass, replace
from typing import Any, Final

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from gpulease.daemon.fleet.etcd.transactions import KeyValue
from gpulease.daemon.fleet.records.fleet_records import (
    NAMES,
    NODES,
    CardRecord,
    ClaimRecord,
    EpochsRecord,
    InventoryRecord,
    NodeRecord,
    held_key,
    held_name,
    name_of,
    node_id_of,
    read_generation,
    read_horizon_s,
    read_node,
)
from gpulease.daemon.fleet.records.record_reader import (
    MAX_NUMBER,
    MAX_QUOTA_BYTES,
    MAX_RECORD_BYTES,
    MAX_TEXT_CHARS,
    Unreadable,
)
from gpulease.daemon.fleet.records.unreadable_records import MAX_REMEMBERED, MAX_SHOWN, UnreadableRecords, shown_key
from gpulease.daemon.fleet.rules.clock_rates import ClockRecord
from gpulease.daemon.fleet.rules.quota_records import (
    DefaultQuota,
    QuotaEntry,
    Shard,
    held_entry,
    held_entry_key,
    read_default,
    read_shards,
    shard_key,
)

LEASE: Final = "0a" * 16
CARD: Final = CardRecord("GPU-1", "a card", 80 << 30, 40 << 30, 1, False)
INVENTORY: Final = InventoryRecord(("tls:h:1",), {"zone": "a"}, (CARD,), False, "1")
NODE: Final = NodeRecord("n", 1, 2, INVENTORY)
EPOCHS: Final = EpochsRecord("first", 5)
CLAIM: Final = ClaimRecord("n1", 3, LEASE, "ann", "n")
CLOCK: Final = ClockRecord("n1.1", 3, 5, 7)
SHARD: Final = {"budget": 9, "used": {LEASE: ["n1", 3, 5]}, "default": 0}
DEFAULT: Final = {"total": 5}


def shard_of(value: bytes) -> Shard | Unreadable:
    """Read a shard as the rules and the command line do."""
    (shard,) = read_shards([KeyValue(shard_key("ann", 1), value, 1, 1)]).values()
    return Unreadable(shard.unreadable) if shard.unreadable else shard


def default_of(value: bytes) -> DefaultQuota | Unreadable:
    """Read the default as the rules and the command line do."""
    default = read_default((KeyValue(b"k", value, 1, 1),))
    assert default is not None
    return Unreadable(default.unreadable) if default.unreadable else default


READERS: Final[dict[str, tuple[Callable[[bytes], Any], Any]]] = {
    "node": (read_node, json.loads(NODE.encode())),
    "inventory": (InventoryRecord.read, asdict(INVENTORY)),
    "epochs": (EpochsRecord.read, asdict(EPOCHS)),
    "claim": (ClaimRecord.read, asdict(CLAIM)),
    "clock": (ClockRecord.read, asdict(CLOCK)),
    "shard": (shard_of, SHARD),
    "default": (default_of, DEFAULT),
    "horizon": (read_horizon_s, 30),
}
"""Each reader, and a value that it reads."""

BAD_NUMBERS: Final = ("1e999", "-1e999", "NaN", "Infinity", "9" * 5_000, str(2**70), "-1", "1.5", '"1"', "true", "[]")
BAD_TEXTS: Final = (
    '"\\ud800"',
    '"\\udc00\\ud800"',
    '"\udcff"',
    f'"{"x" * (MAX_TEXT_CHARS + 1)}"',
    "1",
    "null",
    "[]",
    "{}",
)


def leaves(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[tuple[Any, ...], Any]]:
    """All numbers and texts of a value, by their paths."""
    if isinstance(value, dict):
        return [leaf for key, inner in value.items() for leaf in leaves(inner, (*path, key))]
    if isinstance(value, list | tuple):
        return [leaf for number, inner in enumerate(value) for leaf in leaves(inner, (*path, number))]
    return [(path, value)]


def with_leaf(value: Any, path: tuple[Any, ...], text: str) -> bytes:
    """JSON of a value with another leaf, in JSON's own words."""
    mark = "the leaf that is another one"

    def changed(inner: Any, rest: tuple[Any, ...]) -> Any:
        if not rest:
            return mark
        if isinstance(inner, dict):
            return inner | {rest[0]: changed(inner[rest[0]], rest[1:])}
        return [changed(each, rest[1:]) if number == rest[0] else each for number, each in enumerate(inner)]

    return json.dumps(changed(value, path)).replace(f'"{mark}"', text).encode(errors="surrogateescape")


def test_every_reader_reads_what_is_sound() -> None:
    for node in (NODE, replace(NODE, inventory=None)):
        assert read_node(node.encode()) == node
    assert InventoryRecord.read(INVENTORY.encode()) == INVENTORY
    assert EpochsRecord.read(EPOCHS.encode()) == EPOCHS
    assert ClaimRecord.read(CLAIM.encode()) == CLAIM
    assert ClockRecord.read(CLOCK.encode()) == CLOCK
    shard = Shard(shard_key("ann", 1), 1, 9, {LEASE: QuotaEntry("n1", 3, 5)})
    assert shard_of(shard.put().value) == shard
    assert default_of(DefaultQuota(5, 1).put().value) == DefaultQuota(5, 1)
    assert read_horizon_s(b"30") == 30


@pytest.mark.parametrize("kind", READERS)
def test_no_leaf_of_a_record_can_be_a_number_or_a_text_beyond_its_bounds(kind: str) -> None:
    reader, sound = READERS[kind]
    assert not isinstance(reader(json.dumps(sound).encode()), Unreadable)
    for path, leaf in leaves(sound):
        for text in BAD_NUMBERS if isinstance(leaf, int) and not isinstance(leaf, bool) else BAD_TEXTS:
            if kind == "horizon" and text == "1.5":
                continue
            value = with_leaf(sound, path, text)
            assert isinstance(reader(value), Unreadable), (path, value[:200])


def test_a_lease_s_id_has_32_digits_and_nothing_behind_them() -> None:
    for text in (LEASE + "\n", LEASE.upper(), LEASE[1:], LEASE + "0"):
        assert isinstance(ClaimRecord.read(json.dumps(asdict(CLAIM) | {"lease_id": text}).encode()), Unreadable)
        assert isinstance(shard_of(json.dumps(SHARD | {"used": {text: ["n1", 3, 5]}}).encode()), Unreadable)


@pytest.mark.parametrize(
    "value", [b"", b"null", b"[]", b"\xff", b"[" * 60_000, b'{"a":' * 10_000, b"{}x", bytes(MAX_RECORD_BYTES + 1)]
)
def test_what_is_no_record_at_all_is_unreadable(value: bytes) -> None:
    assert {kind: type(reader(value)) for kind, (reader, _) in READERS.items()} == dict.fromkeys(READERS, Unreadable)


@pytest.mark.parametrize("kind", [kind for kind in READERS if kind != "horizon"])
def test_members_of_later_versions_are_no_fault(kind: str) -> None:
    reader, sound = READERS[kind]
    members = json.dumps(sound)[:-1]
    for text in ("1e999", "9" * 5_000, "[[]]", '"x"'):
        assert not isinstance(reader(f'{members},"later":{text}}}'.encode()), Unreadable)


ANY_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)


def checked(record: Any) -> None:
    """Fail if a record has a number or a text that is out of bounds, or that nobody could send on."""
    if is_dataclass(record):
        for field in fields(record):
            checked(getattr(record, field.name))
    elif isinstance(record, dict):
        checked([*record.keys(), *record.values()])
    elif isinstance(record, list | tuple):
        for inner in record:
            checked(inner)
    elif isinstance(record, str):
        assert len(record.encode()) <= 4 * MAX_TEXT_CHARS
    elif isinstance(record, float):
        assert 0 < record <= 600
    elif not isinstance(record, bytes | None):
        assert 0 <= record <= max(MAX_NUMBER, MAX_QUOTA_BYTES)


@given(st.binary(max_size=200) | ANY_JSON.map(lambda value: json.dumps(value).encode()))
def test_any_bytes_and_any_json_give_a_record_or_are_unreadable(value: bytes) -> None:
    """Every reader gets each value: to draw one takes much longer than to read it."""
    for reader, _ in READERS.values():
        checked(reader(value))


OBJECTS: Final = [(reader, sound, [*sound, "later"]) for kind, (reader, sound) in READERS.items() if kind != "horizon"]
"""The readers of JSON objects, a value that each reads, and the members that such a value may have."""


@given(st.dictionaries(st.integers(0, max(len(names) for _, _, names in OBJECTS) - 1), ANY_JSON))
def test_any_members_give_a_record_or_are_unreadable(drawn: dict[int, Any]) -> None:
    """Every reader gets each value, as the member of that number, of as many as it has."""
    for reader, sound, names in OBJECTS:
        members = {names[number % len(names)]: value for number, value in drawn.items()}
        checked(reader(json.dumps(sound | members).encode()))


@given(st.binary(max_size=300))
@example(b"\xff" * 300)
def test_any_key_gives_a_name_or_is_unreadable(key: bytes) -> None:
    """What is read of a key leads back to it: whoever deletes it deletes that very key."""
    name, node_id = name_of(NAMES + key), node_id_of(NODES + key)
    assert isinstance(name, Unreadable) or name.encode() == key
    assert isinstance(node_id, Unreadable) or node_id.encode() == key
    held, entry = held_name(held_key("n") + key, "n"), held_entry(held_key("n") + key, "n")
    assert isinstance(held, Unreadable) or held.encode() == key
    assert isinstance(entry, Unreadable) or held_entry_key("n", *entry) == held_key("n") + key
    assert shown_key(key).isprintable()


@given(st.binary(), st.binary())
def test_generations_are_short_texts_and_differ_as_their_values_do(one: bytes, other: bytes) -> None:
    texts = read_generation(one), read_generation(other)
    assert all(0 < len(text.encode()) <= 128 for text in texts)
    assert (one == other) == (texts[0] == texts[1])


def found(key: bytes, mod_revision: int) -> KeyValue:
    """A key with a value of no kind."""
    return KeyValue(key, b"?", 1, mod_revision)


def test_each_revision_of_a_key_counts_once_and_is_shown_until_it_is_gone() -> None:
    unreadable = UnreadableRecords()
    for seen_ns in (1, 2):
        unreadable.add(found(b"/a", 3), "it is none", seen_ns)
    unreadable.add(found(b"/b\x1b[2J", 4), "it is none", 5)
    assert unreadable.count == 2
    assert unreadable.sentence().startswith("2 values in etcd can't be read: /a (it is none), /b?[2J (it is none). ")
    unreadable.add(found(b"/a", 6), "it is none", 6)
    unreadable.forget_older(6)
    assert (unreadable.count, unreadable.sentence()[:41]) == (3, "1 value in etcd can't be read: /a (it is ")
    unreadable.forget(b"/a")
    assert unreadable.sentence() == ""


def test_a_foreign_writer_of_many_keys_fills_no_memory() -> None:
    unreadable = UnreadableRecords()
    for number in range(10 * MAX_REMEMBERED):
        unreadable.add(found(b"/%d" % number, number), "it is none")
    assert unreadable.count == 10 * MAX_REMEMBERED
    assert f"{MAX_REMEMBERED} values in etcd" in unreadable.sentence()
    assert f", and {MAX_REMEMBERED - MAX_SHOWN} more. " in unreadable.sentence()
