"""The options of a lease: one `LeaseOption` for each tag, with all facts about it that several modules need.

A tenant gives options in LEASE_ALLOC, as lease parameters. All other places that state such a fact are derived from
these declarations or compared with them: the builder's setters, the broker's parser, a lease's terms and its row in the
journal, the worker's terms, and the tables of `README.md` and of the client's guide. Define a new option here first,
with its constant and its field. If a fact is missing, the import of this module, or of the client's builder, fails.
"""

from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields
from enum import Enum, IntEnum, auto
from types import MappingProxyType
from typing import Annotated, Any, Final, Generic, TypeVar, get_type_hints

from gpulease.protocol import fast_dataclass
from gpulease.protocol.failures import Failure, Refused
from gpulease.protocol.fast_dataclass import dataclass
from gpulease.protocol.lease_names import MAX_NAME_CHARS, NAME, NAME_RULE
from gpulease.protocol.limits import MAX_LABELS
from gpulease.protocol.opcodes import Exclusivity, Status, Waiting
from gpulease.protocol.primitives import LeaseParameter

Value = TypeVar("Value")
Default = TypeVar("Default")
Choice = TypeVar("Choice", bound=IntEnum)

REQUEST_ID_BYTES: Final = 16


class JournalRow(Enum):
    """Whether leases' rows in the journal contain an option, if there is no value for rows without it (`before`)."""

    ALWAYS = auto()
    """Every row has it, even those of the first version."""

    NEVER = auto()
    """No row has it: it only decides whether the node grants the lease."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LeaseOption(Generic[Value, Default]):
    """The facts about one option; each kind of value has a subclass with the value's encoding and its bounds.

    Attributes:
        tag: Its number in LEASE_ALLOC.
        default: Its value if a request does not have it.
        rule: The message about a malformed value, or about an option that is given twice.
        wire: What its value means, for a cell of the specification's table.
        call: The builder's method and its arguments, such as "max_kernel_secs(seconds)"; "" for an option that the
            client sets by itself.
        effect: The method's effect, for a cell of the guide's table.
        in_submits: Whether a submit's worker also applies it; None for an option that no worker receives.
        before: Its value for a row of the journal that does not contain it, perhaps because the daemon that wrote the
            row did not support it. Rows also leave it out if it has this value. A `JournalRow` if every row contains
            it, or none does.
        report_key: Its key in a lease's report; "" if no report has it.
    """

    tag: int
    default: Default
    rule: str
    wire: str
    call: str
    effect: str
    in_submits: bool | None
    before: Value | Default | JournalRow
    report_key: str

    @abstractmethod
    def _length(self) -> str:
        """Return the bytes of its value, for a cell."""

    @abstractmethod
    def _encode(self, value: Value) -> bytes:
        """Return the value's bytes. Raises ValueError if it is out of bounds."""

    @abstractmethod
    def _decode(self, data: bytes) -> Value:
        """Return the value that a peer's bytes encode. Raises Refused."""

    @property
    def row(self) -> list[str]:
        """Its row in the specification's table: the tag, the length of the value, the meaning."""
        return [f"0x{self.tag:04X}", self._length(), self.wire]

    @property
    def method(self) -> str:
        """The name of the builder's method; "" without one."""
        return self.call.partition("(")[0]

    def parameter(self, value: Value) -> LeaseParameter:
        """Return the lease parameter that gives a value. Raises ValueError if it is out of bounds."""
        return LeaseParameter(self.tag, self._encode(value))

    def read(self, parameters: Sequence[LeaseParameter]) -> Value | Default:
        """Return the value in a request, or the default. Raises Refused."""
        # Refuse an option that is given twice, because two readers could use different values.
        values = [parameter.value for parameter in parameters if parameter.tag == self.tag]
        if not values:
            return self.default
        if len(values) > 1:
            raise self._malformed()
        return self._decode(values[0])

    def _malformed(self, message: str = "") -> Refused:
        return Refused(Failure(Status.INVALID_REQUEST, message or self.rule))


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class NumberOption(LeaseOption[int, Default]):
    """An unsigned integer, big-endian.

    Attributes:
        size_bytes: Its width.
        least: The smallest one allowed; the width bounds the largest.
    """

    size_bytes: int
    least: int

    @property
    def most(self) -> int:
        """The largest number that the width holds; `least` is the other bound."""
        return (1 << 8 * self.size_bytes) - 1

    def _length(self) -> str:
        return str(self.size_bytes)

    def _encode(self, value: int) -> bytes:
        if not self.least <= value <= self.most:
            raise ValueError(f"{self.rule}: not {value}")

        return value.to_bytes(self.size_bytes, "big")

    def _decode(self, data: bytes) -> int:
        # The width bounds the largest number, so check only the smallest one.
        value = int.from_bytes(data, "big")
        if len(data) != self.size_bytes or value < self.least:
            raise self._malformed()
        return value


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ChoiceOption(LeaseOption[Choice, Default], Generic[Choice, Default]):
    """One byte, a member of an enumeration. Others are refused as unknown, because a later version may define them.

    Attributes:
        kind: The enumeration.
        noun: The word for a member in refusals.
        never: A byte that no version will know; None without one.
    """

    kind: type[Choice]
    noun: str
    never: int | None

    def _length(self) -> str:
        return "1"

    def _encode(self, value: Choice) -> bytes:
        return bytes([value])

    def _decode(self, data: bytes) -> Choice:
        if len(data) != 1:
            raise self._malformed()
        # The order of the checks decides the status: a byte that is never valid is the tenant's mistake; an unknown one
        # may be a newer client's.
        number = data[0]
        if number == self.never:
            raise self._malformed(f"{self.noun} {number} is never valid")
        try:
            return self.kind(number)
        except ValueError:
            choices = ", ".join(f"{member.value} ({member.name.lower()})" for member in self.kind)
            message = f"this daemon does not support {self.noun} {number}"
            raise Refused(Failure(Status.UNSUPPORTED, message, hint=f"Use {choices}.")) from None


class FlagOption(LeaseOption[bool, bool]):
    """One byte: 0 for False, 1 for True; any other is refused."""

    __slots__ = ()

    def _length(self) -> str:
        return "1"

    def _encode(self, value: bool) -> bytes:
        return bytes([value])

    # Any other byte is reserved for a later version, which would announce its meaning.
    def _decode(self, data: bytes) -> bool:
        if data not in (b"\0", b"\1"):
            raise self._malformed()
        return data == b"\1"


class NameOption(LeaseOption[str, str]):
    """A name in UTF-8, by the rule of `lease_names`; at most MAX_NAME_CHARS bytes, because NAME is ASCII."""

    __slots__ = ()

    def _length(self) -> str:
        return f"1 to {MAX_NAME_CHARS}"

    def _encode(self, value: str) -> bytes:
        if not NAME.fullmatch(value):
            raise ValueError(f"{self.rule}: not {value!r}")
        return value.encode()

    def _decode(self, data: bytes) -> str:
        # Bytes that are not UTF-8 become a character that no name has, so they are refused like a wrong name.
        name = data.decode(errors="replace")
        if not NAME.fullmatch(name):
            raise self._malformed()
        return name


class LabelsOption(LeaseOption[Mapping[str, str], Mapping[str, str]]):
    """Labels, `KEY=VALUE,KEY=VALUE`: at most MAX_LABELS, each key once, both parts a name."""

    __slots__ = ()

    def _length(self) -> str:
        return "…"

    def _encode(self, value: Mapping[str, str]) -> bytes:
        # Nothing needs quotes: a name contains neither "=" nor ",".
        return ",".join(f"{key}={item}" for key, item in value.items()).encode()

    def _decode(self, data: bytes) -> dict[str, str]:
        # Split once more than allowed: a text of a thousand commas is cut into MAX_LABELS + 1 parts, not a thousand.
        pairs = data.decode(errors="replace").split(",", MAX_LABELS)
        if len(pairs) > MAX_LABELS:
            raise self._malformed(f"a lease may request at most {MAX_LABELS} labels")
        labels: dict[str, str] = {}
        for pair in pairs:
            key, equals, value = pair.partition("=")
            if not equals or key in labels or not NAME.fullmatch(key) or not NAME.fullmatch(value):
                raise self._malformed(f"a label is KEY=VALUE, each key once, and key and value are {NAME_RULE}")
            labels[key] = value
        return labels


class RequestIdOption(LeaseOption[str, str]):
    """A request id: 16 bytes, not all zero; its value is their hexadecimal digits."""

    __slots__ = ()

    def _length(self) -> str:
        return str(REQUEST_ID_BYTES)

    def _encode(self, value: str) -> bytes:
        data = bytes.fromhex(value)
        if len(data) != REQUEST_ID_BYTES or not any(data):
            raise ValueError(f"{self.rule}: not {value!r}")
        return data

    def _decode(self, data: bytes) -> str:
        # A client that forgot to make an id sends zeros, which must not join different acquires.
        if len(data) != REQUEST_ID_BYTES or not any(data):
            raise self._malformed()
        return data.hex()


# Tags, rules and texts of the options. A tag keeps its meaning forever, because older workers and journals have it.
EXCLUSIVITY: Final = ChoiceOption(
    tag=0x0903,
    kind=Exclusivity,
    noun="exclusivity class",
    never=255,
    default=Exclusivity.SESSION_EXCLUSIVE,
    rule="the exclusivity class must be one byte, and given once",
    wire="the exclusivity class, see below; the whole parameter is `09 03 00 01 <class>`; absent: 1",
    call="exclusivity(GpuExclusivityClass...)",
    effect="let [other tenants](#sharing-a-lease) open sessions on the lease (`SHARED`), or keep all other leases off "
    "its card (`DEVICE_EXCLUSIVE`)",
    in_submits=None,
    before=JournalRow.ALWAYS,
    report_key="exclusivity",
)

MAX_KERNEL: Final = NumberOption(
    tag=0x0904,
    size_bytes=4,
    least=1,
    default=0,
    rule="a kernel's longest time must be a u32 of milliseconds, at least 1, and given once",
    wire="how many milliseconds one kernel may run, a `u32` of at least 1; absent: until the lease ends",
    call="max_kernel_secs(seconds)",
    effect="end the lease if one of its kernels runs for longer; without it a kernel may run until the lease ends",
    in_submits=True,
    before=JournalRow.ALWAYS,
    report_key="",
)

WAITING: Final = ChoiceOption(
    tag=0x0905,
    kind=Waiting,
    noun="way of waiting",
    never=None,
    default=None,
    rule="the way of waiting must be one byte, and given once",
    wire="how client and worker wait for each other: 0 spin, 1 yield, 2 block; others: UNSUPPORTED; absent: the daemon "
    "chooses",
    call="waiting(GpuWaiting.SPIN)",
    effect="choose how the client and the session's worker process wait for each other. `SPIN` polls for a bounded "
    "time before it sleeps, `YIELD` lets other threads run between polls, `BLOCK` sleeps at once. By default they poll "
    "only on a host with at least four cores. An idle session uses no CPU in any of these modes",
    in_submits=True,
    before=JournalRow.ALWAYS,
    report_key="",
)

SUBMIT: Final = NumberOption(
    tag=0x0906,
    size_bytes=8,
    least=1,
    default=0,
    rule="the memory reserved for submits must be a u64 of bytes, at least 1, and given once",
    wire="how many of the lease's bytes are reserved for [submits](#submits), a `u64` of at least 1, less than "
    "`size_bytes`; absent: none",
    call="submits(size_bytes)",
    effect="reserve this much of the lease's memory for [submits](#submits)",
    in_submits=None,
    before=0,
    report_key="",
)

ORPHAN: Final = NumberOption(
    tag=0x0907,
    size_bytes=4,
    least=0,
    default=None,
    rule="the longest time without a connection must be a u32 of milliseconds, and given once",
    wire="how many milliseconds the lease may be without a connection before it ends, a `u32`; 0: no limit; absent: "
    "the daemon's default",
    call="orphan_secs(seconds)",
    effect="end the lease this many seconds after its last connection closes without a free, for example when the "
    "client was killed. A connection or a renewal before then keeps the lease. The cause of the end is `orphaned`. "
    "The operator's setting `orphan_s` is the default; 0 means never",
    in_submits=None,
    before=0,
    report_key="orphan_ms",
)

REGIONS_REQUIRED: Final = FlagOption(
    tag=0x0908,
    default=False,
    rule="the option that launches must name regions must be one byte, 0 or 1, and given once",
    wire="1: the session refuses LAUNCH, LAUNCH_WITH and GRAPH_LAUNCH that name no [region set](#regions); 0 or "
    "absent: it accepts them",
    call="regions_required()",
    effect="refuse every launch that names no [region](#regions)",
    in_submits=False,
    before=False,
    report_key="",
)

LEASE_NAME: Final = NameOption(
    tag=0x0909,
    default="",
    rule=f"a lease's name must be given once, and consist of {NAME_RULE}",
    wire="the lease's [name](#fleets): letters, digits, dots, dashes and underscores, the first a letter or digit; "
    "absent: none",
    call='name("model-a")',
    effect="give the lease a name, which no other active lease of the [fleet](#names) has",
    in_submits=None,
    before="",
    report_key="name",
)

LABELS: Final = LabelsOption(
    tag=0x090A,
    default=MappingProxyType({}),
    rule="the labels that the node must have must be given once",
    wire=f"labels that the node must have, `KEY=VALUE,KEY=VALUE`, {MAX_LABELS} at most; keys and values have the same "
    "form as a name; a node without them refuses the request with UNSUPPORTED",
    call='labels(zone="a")',
    effect="acquire the lease on a node to which its operator has given these labels",
    in_submits=None,
    before=JournalRow.NEVER,
    report_key="",
)

REQUEST_ID: Final = RequestIdOption(
    tag=0x090B,
    default="",
    rule="a request id must be 16 bytes, not all zero, and given once",
    wire="the request id: the tenant's number for this acquire, the same in all its attempts, not 0; absent: none",
    call="",
    effect="",
    in_submits=None,
    before="",
    report_key="",
)

WEIGHT: Final = NumberOption(
    tag=0x090C,
    size_bytes=2,
    least=1,
    default=1,
    rule="a lease's weight must be a u16 of at least 1, and given once",
    wire="the lease's weight when the time of its card is shared, a `u16` of at least 1; absent: 1",
    call="weight(n)",
    effect="give the tenant this share of the card's time while other tenants want it: a tenant of weight 3 gets three "
    "times as much as one of weight 1. A tenant's weight on a card is the largest weight of its leases there, so "
    "further leases do not increase its share. "
    "The operator sets the largest weight (`max_weight`)",
    in_submits=None,
    before=1,
    report_key="weight",
)

LATENCY: Final = FlagOption(
    tag=0x090D,
    default=False,
    rule="the latency class must be one byte, 0 or 1, and given once",
    wire="1: while the session has work outstanding, other sessions of the card hold back; 0 or absent: they do not",
    call="latency()",
    effect="hold back the launches of the card's other sessions while this one has work outstanding. The operator "
    "must allow it (`may_latency`)",
    in_submits=False,
    before=False,
    report_key="latency",
)

PARKABLE: Final = NumberOption(
    tag=0x090E,
    size_bytes=4,
    least=0,
    default=None,
    rule="the idle time before a park must be a u32 of milliseconds, and given once",
    wire="the session may be [parked](#parking), by itself after this many milliseconds without an operation, a `u32`; "
    "0: never by itself; absent: it is not parkable",
    call="parkable(idle_secs=30)",
    effect="let the session's bytes leave the card while it is idle: when its tenant or an operator parks it, when "
    "another lease needs the room, and with `idle_secs` after that many seconds without an operation. Its next "
    "operation brings them back, at the same addresses",
    in_submits=None,
    before=None,
    report_key="park",
)


@fast_dataclass.dataclass(frozen=True, slots=True, kw_only=True)
class WorkerOptions:
    """The options in a worker's description.

    The worker applies them, or the broker enforces them by observing the worker.

    Attributes:
        max_kernel_ms: Longest run of one kernel; 0 for as long as the lease lasts.
        waiting: How both ends of the session wait for each other; None for the hosts' default.
        regions_required: Whether the session refuses a launch that names no region set.
        latency: Whether the card's other sessions hold back while this one has work outstanding.
    """

    max_kernel_ms: Annotated[int, MAX_KERNEL] = MAX_KERNEL.default
    waiting: Annotated[Waiting | None, WAITING] = WAITING.default
    regions_required: Annotated[bool, REGIONS_REQUIRED] = REGIONS_REQUIRED.default
    latency: Annotated[bool, LATENCY] = LATENCY.default


@fast_dataclass.dataclass(frozen=True, slots=True, kw_only=True)
class LeaseOptions(WorkerOptions):
    """The options that a lease keeps.

    Attributes:
        exclusivity: Which other leases the card may have at the same time.
        submit_bytes: The part of the lease's bytes that is reserved for submits. If 0, a submit runs in place of a
            session that was never opened.
        orphan_ms: Longest time without a connection before the lease ends; 0 for no bound, None for the node's default.
        name: A name that is unique in the node's fleet; "" for a lease without a name.
        request_id: The tenant's number of this acquire, the same in all its tries, in 32 hexadecimal digits; "" if it
          has none.
        weight: Its weight when its card's time is shared.
        park_idle_ms: Time without an operation after which the session is parked; 0 if idleness does not park it; None
            if the session can't be parked.
    """

    exclusivity: Annotated[Exclusivity, EXCLUSIVITY] = EXCLUSIVITY.default
    submit_bytes: Annotated[int, SUBMIT] = SUBMIT.default
    orphan_ms: Annotated[int | None, ORPHAN] = ORPHAN.default
    name: Annotated[str, LEASE_NAME] = LEASE_NAME.default
    request_id: Annotated[str, REQUEST_ID] = REQUEST_ID.default
    weight: Annotated[int, WEIGHT] = WEIGHT.default
    park_idle_ms: Annotated[int | None, PARKABLE] = PARKABLE.default


def _by_field(options: type[WorkerOptions]) -> Mapping[str, LeaseOption[Any, Any]]:
    hints = get_type_hints(options, include_extras=True)
    # Read the annotations with their metadata, where each option is declared next to its field. The annotation holds
    # the declaration, so no field can be without one.
    by_field = {item.name: hints[item.name].__metadata__[0] for item in fields(options)}
    return dict(sorted(by_field.items(), key=lambda item: item[1].tag))


WORKER_OPTIONS: Final = _by_field(WorkerOptions)
"""The options that a worker applies, by their fields, in the order of their tags."""

KEPT_OPTIONS: Final = _by_field(LeaseOptions)
"""The options that a lease keeps, by their fields, in the order of their tags."""

OPTIONS: Final[tuple[LeaseOption[Any, Any], ...]] = tuple(
    # Collect the declarations from this module, so that none can be missing in a list.
    sorted((value for value in list(globals().values()) if isinstance(value, LeaseOption)), key=lambda one: one.tag)
)
"""All options, in the order of their tags."""


def _mistakes() -> Iterator[str]:
    """Yield the contradictions in the declarations above."""
    # Each check names the option and the rule for its declaration. All mistakes are reported together. If two options
    # had the same tag, each would read the other's value.
    if len({option.tag for option in OPTIONS}) < len(OPTIONS):
        yield "each option must have a tag of its own"
    kept_tags = list(KEPT_OPTIONS.values())
    for option in OPTIONS:
        location = f"option 0x{option.tag:04x}"
        # An option is either stored in the lease or used only for the acquire.
        if kept_tags.count(option) != (option.before is not JournalRow.NEVER):
            yield f"{location} must be in one field of LeaseOptions, or have before=Row.NEVER"
        # `in_submits` makes sense only for an option that a worker applies.
        if (option in WORKER_OPTIONS.values()) != (option.in_submits is not None):
            yield f"{location} must say with in_submits whether a submit's worker applies it, if it is in WorkerOptions"
        # A bar would end the table's cell. If only one of `call` and `effect` were given, a cell would stay empty.
        if (
            not option.wire
            or "|" in option.wire + option.call + option.effect
            or bool(option.call) != bool(option.effect)
        ):
            yield f"{location}: what it does must be a sentence for a table's cell"
    # A request without the option, and a lease that was made without it, must have the same meaning.
    for item in fields(LeaseOptions):
        if item.default != KEPT_OPTIONS[item.name].default:
            yield f"{item.name} must have the default of its option, {KEPT_OPTIONS[item.name].default!r}"


if _found := list(_mistakes()):
    raise TypeError("; ".join(_found))


def read_options(parameters: Sequence[LeaseParameter]) -> dict[str, Any]:
    """Return the arguments of `LeaseOptions` that a request gives. Raises Refused."""
    return {name: option.read(parameters) for name, option in KEPT_OPTIONS.items()}


_OF_SESSIONS: Final = tuple(WORKER_OPTIONS)
_OF_SUBMITS: Final = tuple(name for name, option in WORKER_OPTIONS.items() if option.in_submits)


def options_for_worker(lease: WorkerOptions, *, is_submit: bool) -> dict[str, Any]:
    """Return the arguments of `WorkerOptions` for the worker of a lease's session, or of one of its submits."""
    return {name: getattr(lease, name) for name in (_OF_SUBMITS if is_submit else _OF_SESSIONS)}
