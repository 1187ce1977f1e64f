"""A tenant's request for a lease: the builder from which both APIs' builders inherit."""

import math
import os
from enum import IntEnum
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Final, NoReturn, Self, TypeVar

from gpulease.client.core.fleet_acquire import Fleet
from gpulease.client.errors import InvalidRequest
from gpulease.client.numbers import integer, is_number, whole
from gpulease.client.texts import bounded, quoted, utf8
from gpulease.client.transport.credentials import TlsFiles, with_files
from gpulease.protocol import Exclusivity, Waiting
from gpulease.protocol.address import (
    ADDRESS_VARIABLE,
    DEFAULT_ADDRESS,
    FLEET_SCHEME,
    Address,
    parse_address,
    parse_fleet_address,
)
from gpulease.protocol.lease_names import NAME, NAME_RULE
from gpulease.protocol.lease_options import (
    EXCLUSIVITY,
    LABELS,
    LATENCY,
    LEASE_NAME,
    MAX_KERNEL,
    OPTIONS,
    ORPHAN,
    PARKABLE,
    REGIONS_REQUIRED,
    SUBMIT,
    WAITING,
    WEIGHT,
    LeaseOption,
    NumberOption,
)
from gpulease.protocol.limits import MAX_LABELS, MAX_TEXT_BYTES
from gpulease.protocol.messages import LeaseAlloc
from gpulease.protocol.opcodes import GPU_RESOURCE_TYPE
from gpulease.protocol.primitives import LeaseParameter
from gpulease.protocol.sizes import parse_size

LEASE_ID_VARIABLE: Final = "GPULEASE_LEASE_ID"
"""Environment variable in which `gpulease run` names a program's lease: 32 hex digits."""

DEFAULT_LEASE_S: Final = 60.0
"""Default lifetime of a lease in seconds: long enough to try things by hand, and short if a lease is forgotten.
"""

MAX_WIRE_MS: Final = 2**32 - 1
"""Longest time that fits the wire's u32 of milliseconds, 49.7 days."""

MAX_CARD_INDEX: Final = 2**32 - 1
"""Largest card index: more than any host has, and short to print."""

MAX_WIRE_BYTES: Final = 2**64 - 1
"""Largest size that fits the wire's u64."""

Value = TypeVar("Value")
Member = TypeVar("Member", bound=IntEnum)

ASK_FIRST: Final = "Ask for one: lease = GpuBuilder().min_vram(...).acquire()"
"""Hint for a program that uses a builder, or nothing, as a lease."""


# Cached, because most programs use a single address.
_parse_address: Final = lru_cache(maxsize=16)(parse_address)


def address_of(text: str | None, files: TlsFiles = TlsFiles()) -> Address:  # noqa: B008  # it can't be changed
    """Parse the given address, else GPULEASE_ADDRESS, else the default socket's. Raises InvalidRequest.

    A tls: address includes the files that it needs, from `files` or the environment.
    """
    try:
        # Check now that UTF-8 can encode the text; otherwise it would fail only when the address is used.
        if text is not None:
            utf8(text, "the daemon's address")
        # The argument, else the environment, else the daemon of this host.
        address = _parse_address(text or os.environ.get(ADDRESS_VARIABLE) or DEFAULT_ADDRESS)
    except ValueError as error:
        raise InvalidRequest(f"the daemon's address: {error}") from None
    return with_files(address, files)


def fleet_of(text: str | None, files: TlsFiles = TlsFiles()) -> Fleet | None:  # noqa: B008  # it can't be changed
    """Return the fleet that `text`, or else GPULEASE_ADDRESS, names; None if that names a daemon.

    Raises InvalidRequest.
    """
    # The environment variable may name a fleet, too.
    named = text or os.environ.get(ADDRESS_VARIABLE) or ""
    if not isinstance(named, str) or not named.startswith(FLEET_SCHEME):
        return None  # `address_of` refuses anything but a string
    try:
        utf8(named, "the fleet's address")
        return Fleet.of(parse_fleet_address(named), files)
    except ValueError as error:
        raise InvalidRequest(f"the fleet's address: {error}") from None


def milliseconds(seconds: float, subject: str, *, least_ms: int) -> int:
    """Convert seconds to the wire's milliseconds, rounded up.

    Args:
        seconds: The program's value.
        subject: How messages name it.
        least_ms: Shortest time that is allowed.

    Raises InvalidRequest for a time that does not fit.
    """
    if not is_number(seconds):
        # A string of digits is a mistake with a hint of its own.
        hint = "Give seconds as a number, such as 600 for ten minutes" if isinstance(seconds, str) else ""
        raise InvalidRequest(f"{subject} must be a number of seconds, not {quoted(seconds)}", hint)
    # Round up: a lease of 0.0001 s must not become one of 0 ms. 1e308 s would be infinitely many milliseconds.
    value = math.ceil(seconds * 1000) if abs(seconds) <= MAX_WIRE_MS else MAX_WIRE_MS + 1
    if not least_ms <= value <= MAX_WIRE_MS:
        raise InvalidRequest(
            f"{subject} must be from {least_ms / 1000:g} s to {MAX_WIRE_MS // 1000} s, not {quoted(seconds)} s"
        )
    return value


def device_of(uuid_or_index: str | int, subject: str) -> str:
    """Return a card's UUID or index as text. Raises InvalidRequest, naming the argument `subject`."""
    if isinstance(uuid_or_index, str):
        return bounded(uuid_or_index, f"{subject}: a card's name", MAX_TEXT_BYTES)
    return str(whole(uuid_or_index, subject, least=0, most=MAX_CARD_INDEX))


class LeaseRequest:
    """Describes the lease to acquire. Every public method returns the builder itself."""

    def __init__(self, address: str | None = None) -> None:
        """Describe a lease.

        Args:
            address: The daemon's or the fleet's address; None for GPULEASE_ADDRESS, else the default socket.
        """
        self._address = address
        self._min_vram_bytes = 0
        self._submit_bytes = 0
        self._ttl_ms = milliseconds(DEFAULT_LEASE_S, "lease_secs", least_ms=1)
        self._wait_ms = 0
        self._device: str | None = None
        self._parameters: dict[int, LeaseParameter] = {}
        self._labels: dict[str, str] = {}
        self._tls_files = TlsFiles()

    if not TYPE_CHECKING:
        # Report the mistake in programs that use the builder as a lease and are not type-checked.

        def __getattr__(self, name: str) -> NoReturn:
            raise AttributeError(
                f"a GpuBuilder has no {name!r}, because it is not a lease yet. {ASK_FIRST}", name=name, obj=self
            )

        def __enter__(self) -> NoReturn:
            raise InvalidRequest("with: a GpuBuilder is not a lease", ASK_FIRST)

        def __exit__(self, *ended: object) -> None: ...

        async def __aenter__(self) -> NoReturn:
            raise InvalidRequest("async with: a GpuBuilder is not a lease", ASK_FIRST)

        async def __aexit__(self, *ended: object) -> None: ...

    def tls(self, certificate: str | None = None, key: str | None = None, ca: str | None = None) -> Self:
        """Set the PEM files with which this tenant proves itself to a remote daemon and verifies the daemon.

        Args:
            certificate: The tenant's certificate; None for GPULEASE_TLS_CERTIFICATE.
            key: Its private key; None for GPULEASE_TLS_KEY.
            ca: The CAs that issue nodes' certificates; None for GPULEASE_TLS_CA.
        """
        self._tls_files = TlsFiles(certificate, key, ca)
        return self

    def min_vram(self, size_bytes: int | str) -> Self:
        """Set how much device memory the tenant gets, all of it usable: bytes, or a string such as "4GiB"."""
        self._min_vram_bytes = size_of(size_bytes, "min_vram")
        return self

    def submits(self, size_bytes: int | str) -> Self:
        """Reserve device memory, in addition to `min_vram`, for the image and arguments of a `lease.submit` job.

        Args:
            size_bytes: Bytes, or a string such as "64MiB".
        """
        self._submit_bytes = size_of(size_bytes, "submits")
        return self._set(SUBMIT, self._submit_bytes)

    def lease_secs(self, seconds: float) -> Self:
        """Set the number of seconds that the lease lasts unless it is renewed.

        The daemon has a maximum; the default is 60.
        """
        self._ttl_ms = milliseconds(seconds, "lease_secs", least_ms=1)
        return self

    def exclusivity(self, exclusivity: Exclusivity | int) -> Self:
        """Set which other leases may be on the same card."""
        return self._set(EXCLUSIVITY, _member(Exclusivity, exclusivity, "exclusivity"))

    def waiting(self, waiting: Waiting | int) -> Self:
        """Set how session and worker wait: SPIN for the fastest replies, YIELD on a busy host, BLOCK to sleep at once.

        If this is not called, they spin for a bounded time if the host has enough cores for both.
        """
        return self._set(WAITING, _member(Waiting, waiting, "waiting"))

    def max_kernel_secs(self, seconds: float) -> Self:
        """Set the number of seconds that one kernel may run; a longer one ends the lease. The default is no limit."""
        return self._set_time(MAX_KERNEL, seconds)

    def orphan_secs(self, seconds: float) -> Self:
        """End the lease when it has had no connection for `seconds`; 0 for never.

        Its connections are the lease object's own, those of its sessions, including sessions by token, and those of its
        jobs. A renewal restarts the time. If this is not called, the daemon operator's default applies.
        """
        return self._set_time(ORPHAN, seconds)

    def regions_required(self) -> Self:
        """Make the session refuse every launch that names no region set, so that a forgotten set is an error."""
        return self._set(REGIONS_REQUIRED, value=True)

    def weight(self, weight: int) -> Self:
        """Set the lease's weight when the time of its card is shared; the daemon has a maximum. The default is 1.

        Tenants that compete for the card get time in proportion to their weights. A tenant's weight on a card is the
        largest weight of its leases there, and its leases share its time by their weights.
        """
        return self._set(WEIGHT, whole(weight, "weight", least=WEIGHT.least, most=WEIGHT.most))

    def latency(self) -> Self:
        """Make the card's other sessions hold back while this one has work outstanding. The operator must allow it."""
        return self._set(LATENCY, value=True)

    def parkable(self, idle_secs: float = 0) -> Self:
        """Let the session's bytes leave the card while it is idle; its next operation brings them back.

        Args:
            idle_secs: Seconds without an operation after which the session is parked; 0: only when `lease.park()`, an
                operator or another lease's need for room parks it.
        """
        return self._set(PARKABLE, milliseconds(idle_secs, "parkable: idle_secs", least_ms=0))

    def name(self, name: str) -> Self:
        """Set a name that is unique in the daemon's fleet: while this lease lives, no other lease has it.

        The lease's `epoch` distinguishes it from every earlier lease of that name. A node that is cut off from its
        fleet ends the lease.
        """
        utf8(name, "name")
        if not NAME.fullmatch(name):
            raise InvalidRequest(f"name must be {NAME_RULE}, not {quoted(name)}")
        return self._set(LEASE_NAME, name)

    def labels(self, **labels: str) -> Self:
        """Set labels that the node must have, such as zone="a"; its operator assigns them."""
        for key, value in labels.items():
            utf8(value, f"labels: {quoted(key)}")
            if not NAME.fullmatch(key) or not NAME.fullmatch(value):
                raise InvalidRequest(
                    f"labels: a key and a value must each be {NAME_RULE}, not {quoted(key)}={quoted(value)}"
                )
        # Repeated calls add labels, so count all of them.
        if len(self._labels | labels) > MAX_LABELS:
            raise InvalidRequest(f"labels: a lease has at most {MAX_LABELS}, not {len(self._labels | labels)}")
        self._labels |= labels
        return self._set(LABELS, self._labels) if self._labels else self

    def device(self, uuid_or_index: str | int) -> Self:
        """Choose the card by its UUID or its index. If this is not called, any card that fits is used."""
        self._device = device_of(uuid_or_index, "device")
        return self

    def timeout(self, seconds: float) -> Self:
        """Set the number of seconds to wait for room. The default, 0, is not to wait."""
        self._wait_ms = milliseconds(seconds, "timeout", least_ms=0)
        return self

    def _set(self, option: LeaseOption[Value, Any], value: Value) -> Self:
        # Store the value by tag, so that a second call of a method replaces the first one's value.
        self._parameters[option.tag] = option.parameter(value)
        return self

    def _set_time(self, option: NumberOption[Any], seconds: float) -> Self:
        return self._set(option, milliseconds(seconds, option.method, least_ms=option.least))

    def _where(self) -> Address | Fleet:
        # Check for a fleet first: its address does not name a daemon, and `address_of` would refuse it.
        return fleet_of(self._address, self._tls_files) or address_of(self._address, self._tls_files)

    def _request(self) -> LeaseAlloc:
        # Only the size has no sensible default.
        if not self._min_vram_bytes:
            raise InvalidRequest("acquire: the lease's size is missing", 'Set it with GpuBuilder().min_vram("4GiB")')
        # The two parts are granted together, as one slice of the card.
        size_bytes = size_of(self._min_vram_bytes + self._submit_bytes, "min_vram and submits together")
        return LeaseAlloc(
            GPU_RESOURCE_TYPE, size_bytes, self._ttl_ms, self._wait_ms, self._device, tuple(self._parameters.values())
        )


# Check this at import, so that an option without a method can't be released.
if _missing := [option.method for option in OPTIONS if option.method and option.method not in vars(LeaseRequest)]:
    raise TypeError(f"LeaseRequest must have the method of each lease option: {', '.join(_missing)}")


def _member(kind: type[Member], value: int, subject: str) -> Member:
    try:
        return kind(integer(value))
    except (TypeError, ValueError):
        names = ", ".join(f"{item.name} ({item.value})" for item in kind)
        raise InvalidRequest(f"{subject} must be one of {names}, not {quoted(value)}") from None


def size_of(size: Any, subject: str) -> int:
    """Convert a size such as "4GiB" or 4 << 30 to bytes. Raises InvalidRequest, naming it `subject`."""
    if isinstance(size, str):
        try:
            size = parse_size(bounded(size, subject, MAX_TEXT_BYTES))
        except ValueError as error:
            raise InvalidRequest(f"{subject}: {error}") from None
    return whole(size, subject, least=1, most=MAX_WIRE_BYTES)
