"""Fields of the messages between our processes: how each is packed, and which values are accepted.

A message class is a frozen dataclass derived from `Message`. Each of its fields is annotated with a `FieldKind`:
`Annotated[int, integer(0, MAX_PID)]`. `Message.to_map` and `Message.from_map` convert messages by these declarations.

Versions differ between processes: an upgraded broker takes over the zygote and the workers of its predecessor. So
`from_map` ignores unknown keys. A field with a default may be missing, because an older process does not send it.

The messages that one process may receive from another form one union of classes. `messages_of` turns the union into the
table that parses them. The receiver ends its `match` with `assert_never`, so that mypy finds a message without a
handler.
"""

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import MISSING, Field, fields, replace
from enum import Enum
from typing import Annotated, Any, ClassVar, Final, NamedTuple, Self, TypeVar, get_args, get_type_hints

from gpulease.protocol.fast_dataclass import dataclass
from gpulease.protocol.lease_options import ChoiceOption, FlagOption, LeaseOption, NumberOption

U64_MAX: Final = 2**64 - 1

MAX_PID: Final = 1 << 22
"""PID_MAX_LIMIT of Linux (proc_sys_kernel(5), pid_max)."""

MAX_LEASE_NUMBER: Final = 1 << 131
"""Bound of the numbers by which broker and zygote identify workers. A lease's number has 128 bits. Numbers of warm
contexts start at 1 << 128, those of submits at 1 << 129."""


REQUEST_KEY: Final = "number"
"""The key of a request's number, in the request and in its answer."""


MAX_OP_CHARS: Final = 32
"""Maximum number of characters of an unknown op that are logged. All known ops are shorter."""

MAX_PROBLEM_CHARS: Final = 200
"""Maximum number of characters of the reason why a message is refused. The reason quotes the value received, and is
logged."""


class MalformedMessage(ValueError):
    """A message lacks a field, or a field has the wrong type or a value out of bounds, or its op is unknown.

    Attributes:
        op: The message's op; "" if it has none.
    """

    def __init__(self, op: str, problem: str) -> None:
        super().__init__(f"{op}: {problem[:MAX_PROBLEM_CHARS]}")
        self.op = op


@dataclass(frozen=True, slots=True)
class FieldKind:
    """The form of one field in a map, and the values that it accepts.

    Attributes:
        parse: Converts the received value to the field's value; raises ValueError.
        pack: Converts the field's value to the value that is sent.
        key: The key in the map; "" for the field's name.
        is_inline: Whether the field is a message with its keys in the same map.
        is_optional: Whether the key is left out of the map if the value is None.
    """

    parse: Callable[[Any], Any]
    pack: Callable[[Any], Any] = lambda value: value
    key: str = ""
    is_inline: bool = False
    is_optional: bool = False

    def named(self, key: str) -> Self:
        """Return this kind with `key` in place of the field's name in the map."""
        return replace(self, key=key)

    def or_nil(self) -> Self:
        """Return the kind of a value or None, where None is sent as nil."""
        parse, pack = self.parse, self.pack
        return replace(
            self,
            parse=lambda value: None if value is None else parse(value),
            pack=lambda value: None if value is None else pack(value),
        )

    def optional(self) -> Self:
        """Return the kind of a value or None, where nothing is sent for None."""
        return replace(self, is_optional=True)


def integer(least: int, most: int) -> FieldKind:
    """Return the kind of an integer between two bounds, both included."""

    def parse(value: Any) -> int:
        # Not isinstance: a bool is an int, and True must not pass as 1.
        if type(value) is not int or not least <= value <= most:
            raise ValueError(f"{value!r} must be an integer from {least} to {most}")
        return value

    return FieldKind(parse)


def instance(kind: type[Any]) -> FieldKind:
    """Return the kind of a type that msgpack itself can represent: text, bytes, booleans."""

    def parse(value: Any) -> Any:
        if not isinstance(value, kind):
            # Do not quote the value, because it may be a token.
            raise ValueError(f"it must be of type {kind.__name__}, not {type(value).__name__}")
        return value

    return FieldKind(parse)


def decimal(least: float, most: float) -> FieldKind:
    """Return the kind of a finite number between two bounds, both included."""

    def parse(value: Any) -> float:
        if type(value) not in (int, float) or not math.isfinite(value) or not least <= value <= most:
            raise ValueError(f"{value!r} must be a number from {least:g} to {most:g}")
        return float(value)

    return FieldKind(parse)


def matching(pattern: str) -> FieldKind:
    """Return the kind of a text that matches a pattern as a whole."""
    expected = re.compile(pattern)

    def parse(value: Any) -> str:
        if not isinstance(value, str) or not expected.fullmatch(value):
            raise ValueError(f"{value!r} must be a text that matches {pattern}")
        return value

    return FieldKind(parse)


def text(most_chars: int) -> FieldKind:
    """Return the kind of a text of at most `most_chars` characters."""

    def parse(value: Any) -> str:
        if not isinstance(value, str) or len(value) > most_chars:
            raise ValueError(f"it must be a text of at most {most_chars} characters")
        return value

    return FieldKind(parse)


def one_of(kind: type[Enum]) -> FieldKind:
    """Return the kind of an enum's members, which are sent as their values."""
    return converted(kind, lambda value: value.value)


def listed(kind: FieldKind, most: int) -> FieldKind:
    """Return the kind of a tuple of at most `most` values of one kind."""

    def parse(value: Any) -> tuple[Any, ...]:
        # Check the length first, because a compromised process may send a list of any size.
        if not isinstance(value, list) or len(value) > most:
            raise ValueError(f"it must be a list of at most {most} values")
        return tuple(map(kind.parse, value))

    return FieldKind(parse, lambda values: list(map(kind.pack, values)))


def mapped(key: FieldKind, value: FieldKind, most: int) -> FieldKind:
    """Return the kind of a mapping of at most `most` keys."""

    def parse(mapping: Any) -> dict[Any, Any]:
        if not isinstance(mapping, dict) or len(mapping) > most:
            raise ValueError(f"it must be a map of at most {most} keys")
        return {key.parse(name): value.parse(item) for name, item in mapping.items()}

    return FieldKind(parse, lambda items: {key.pack(name): value.pack(item) for name, item in items.items()})


def row(make: Callable[..., Any], **columns: FieldKind) -> FieldKind:
    """Return the kind of a class with instances that are sent as the list of their attributes.

    Args:
        make: The class; it takes the columns' values in order.
        columns: The attributes' kinds, by their names.
    """
    kinds = tuple(columns.values())

    def parse(value: Any) -> Any:
        if not isinstance(value, list) or len(value) != len(kinds):
            raise ValueError(f"it must be a list of {len(kinds)} values")
        return make(*(kind.parse(item) for kind, item in zip(kinds, value, strict=True)))

    return FieldKind(parse, lambda one: [kind.pack(getattr(one, name)) for name, kind in columns.items()])


def converted(parse: Callable[[Any], Any], pack: Callable[[Any], Any] = lambda value: value) -> FieldKind:
    """Return the kind of values that `parse` and `pack` convert. `parse` may also raise TypeError."""

    def checked(value: Any) -> Any:
        try:
            return parse(value)
        except TypeError as error:
            raise ValueError(str(error)) from None

    return FieldKind(checked, pack)


def nested(message: "type[Message]") -> FieldKind:
    """Return the kind of a message within the map of another."""

    def parse(value: Any) -> "Message":
        if not isinstance(value, dict):
            raise ValueError(f"{value!r} must be a map")
        return message.from_map(value)

    return FieldKind(parse, message.to_map)


def inline(message: "type[Message]") -> FieldKind:
    """Return the kind of a message with its keys in the map of another."""
    return replace(nested(message), is_inline=True)


def _number(text: Any) -> int:
    number = int(text, 16)
    if not 0 <= number < MAX_LEASE_NUMBER:
        raise ValueError(f"{text!r} is not a lease number")
    return number


LEASE_NUMBER: Final = converted(_number, lambda number: f"{number:032x}")
"""A lease's number as hexadecimal text: msgpack's integers end at 64 bits."""

TEXT: Final = instance(str)
BYTES: Final = instance(bytes)
FLAG: Final = instance(bool)
U64: Final = integer(0, U64_MAX)

LeaseNumber = Annotated[int, LEASE_NUMBER.named("lease")]
Pid = Annotated[int, integer(0, MAX_PID)]
Serial = Annotated[int, integer(0, U64_MAX)]
Request = Annotated[int, U64.named(REQUEST_KEY)]
"""The number of a request, in the request and in its answer: unique among the open requests of a channel."""
LEASE_TEXT: Final = matching("[0-9a-f]{32}")
"""A lease's id, in 32 hexadecimal digits."""
LeaseText = Annotated[str, LEASE_TEXT]
Text = Annotated[str, TEXT]
Flag = Annotated[bool, FLAG]


class _Field(NamedTuple):
    name: str
    key: str
    kind: FieldKind
    default: Any


class Message:
    """A message. Subclasses are frozen dataclasses and set `OP`, the value of the key "op".

    Attributes:
        OP: The value of the key "op"; "" for a map that has no such key, because it is only sent inside other messages.
        ORDER: The fields that come first in the map, if they do not come first in the class. It keeps the packed bytes
          equal to those of other versions.
    """

    __slots__ = ()
    OP: ClassVar[str] = ""
    ORDER: ClassVar[tuple[str, ...]] = ()

    def to_map(self) -> dict[str, Any]:
        """Return the map to be packed and sent; its keys are in the order of the fields."""
        # "op" comes first, so that a dump of the channel is readable.
        message: dict[str, Any] = {"op": self.OP} if self.OP else {}
        for name, key, kind, _ in _fields_of(type(self)):
            value = getattr(self, name)
            if kind.is_inline:
                # The inline message brings its own "op", which must not replace that of this message.
                message |= kind.pack(value)
                message["op"] = self.OP
            elif value is not None or not kind.is_optional:
                message[key] = kind.pack(value)
        return message

    @classmethod
    def from_map(cls, message: Mapping[str, Any]) -> Self:
        """Return the message in a map that was received. Raises MalformedMessage."""
        values = {}
        key = ""
        try:
            # Ignore keys that belong to no field: a newer process may send them.
            for name, key, kind, default in _fields_of(cls):
                if kind.is_inline:
                    values[name] = kind.parse(message)
                elif key in message:
                    values[name] = kind.parse(message[key])
                # A field with a default may be missing, because an older process does not send it.
                elif default is MISSING:
                    raise ValueError("it is missing")
        # `key` is still the key of the field that failed.
        except ValueError as error:
            raise MalformedMessage(cls.OP or cls.__name__, f"{key}: {error}") from None
        return cls(**values)


_FIELDS: Final[dict[type[Any], tuple[_Field, ...]]] = {}


def _fields_of(message: type[Any]) -> tuple[_Field, ...]:
    # Resolve annotations only once for each class, because that is slow.
    if (cached := _FIELDS.get(message)) is not None:
        return cached
    hints = get_type_hints(message, include_extras=True)
    # ORDER moves fields to the front of the map. In the class they can't move, because defaults must come last there.
    message_fields = {field.name: _field_of(field, hints[field.name]) for field in fields(message)}
    _FIELDS[message] = tuple(message_fields[name] for name in dict.fromkeys((*message.ORDER, *message_fields)))
    return _FIELDS[message]


def _field_of(field: Field[Any], hint: Any) -> _Field:
    # A field must have exactly one kind. A field without a kind fails here, when its class is prepared.
    (kind,) = hint.__metadata__
    if isinstance(kind, LeaseOption):
        kind = _kind_of(kind)
    default = field.default if field.default_factory is MISSING else field.default_factory
    return _Field(field.name, kind.key or field.name, kind, default)


def _kind_of(option: LeaseOption[Any, Any]) -> FieldKind:
    """Return the kind of a lease option that a worker applies. Raises TypeError for a type that no message has yet."""
    match option:
        case NumberOption():
            return U64
        case FlagOption():
            return FLAG
        case ChoiceOption():
            return converted(option.kind).or_nil()
    raise TypeError(f"{type(option).__name__} has no kind here: add one for the worker's messages")


M = TypeVar("M", bound=Message)


def by_op(*messages: type[M]) -> Mapping[str, type[M]]:
    """Return message classes by their ops, and resolve their fields now rather than later in a newly forked process."""
    for message in messages:
        _fields_of(message)
    return {message.OP: message for message in messages}


def messages_of(union: Any) -> Mapping[str, type[Any]]:
    """Return the classes of a union of messages by their ops. Raises TypeError if two have the same op."""
    classes = get_args(union)
    classes_by_op = by_op(*classes)
    if len(classes_by_op) != len(classes):
        raise TypeError(f"two messages of {union} have the same op")
    return classes_by_op


def parse_message(ops: Mapping[str, type[M]], message: Mapping[str, Any]) -> M | None:
    """Return the message in a map, or None if its op is not in `ops`, because a newer process may send more messages.

    Args:
        ops: The messages that the receiver accepts: TO_ZYGOTE, FROM_WORKER and so on.
        message: The map, as `host.ipc.receive_message` returns it.

    Raises:
        MalformedMessage: A field is missing, has the wrong type, or is out of bounds.
    """
    # If the op is not a text, treat it like an unknown op: only a bug or a compromised process sends one.
    op = message.get("op")
    kind = ops.get(op) if isinstance(op, str) else None
    return None if kind is None else kind.from_map(message)


def expect_message(ops: Mapping[str, type[M]], message: Mapping[str, Any]) -> M:
    """Return the message in a map that a process of the same version sent.

    Raises MalformedMessage, as `parse_message` does, and also for an op that is not in `ops`.
    """
    if (parsed := parse_message(ops, message)) is not None:
        return parsed
    op = message.get("op")
    raise MalformedMessage(op[:MAX_OP_CHARS] if isinstance(op, str) else "", f"the op must be one of {', '.join(ops)}")


def request_of(message: Mapping[str, Any]) -> int | None:
    """Return the number of the request that a map makes or answers, even if the map is malformed; None without one."""
    # Read only the number, because the rest of the map may be malformed, and the requester must still get an answer.
    number = message.get(REQUEST_KEY)
    return number if type(number) is int and 0 <= number <= U64_MAX else None
