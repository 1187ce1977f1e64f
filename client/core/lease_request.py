"""A tenant's request for a lease: the builder that both faces inherit from."""

import math
import os
from enum import IntEnum
from typing import TYPE_CHECKING, Any, Final, NoReturn, Self

from gpulease.client.core.fleet_acquire import Fleet
from gpulease.client.errors import InvalidRequest
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
from gpulease.protocol.limits import MAX_LABELS, MAX_TEXT_BYTES
from gpulease.protocol.messages import LeaseAlloc
from gpulease.protocol.opcodes import (
    EXCLUSIVITY_TAG,
    GPU_RESOURCE_TYPE,
    LABELS_TAG,
    MAX_KERNEL_TAG,
    NAME_TAG,
    ORPHAN_TAG,
    REGIONS_REQUIRED_TAG,
    SUBMIT_TAG,
    WAITING_TAG,
)
from gpulease.protocol.primitives import LeaseParameter
from gpulease.protocol.sizes import parse_size

LEASE_ID_VARIABLE: Final = "GPULEASE_LEASE_ID"
"""Environment variable by which `gpulease run` names a program's lease: 32 hex digits."""

DEFAULT_LEASE_S: Final = 60.0
"""Life of a lease if the tenant names none: long enough to try things by hand, short enough to forget."""

MAX_WIRE_MS: Final = 2**32 - 1
"""Longest time that fits the wire's u32 of milliseconds, 49.7 days."""

MAX_CARD_INDEX: Final = 2**32 - 1
"""Largest index of a card: more than any host has, and short to write."""

MAX_WIRE_BYTES: Final = 2**64 - 1
"""Largest size that fits the wire's u64."""


ASK_FIRST: Final = "Ask for one: lease = GpuBuilder().min_vram(...).acquire()"
"""What to do where a builder, or nothing, stands for a lease."""


def address_of(text: str | None, files: TlsFiles = TlsFiles()) -> Address:  # noqa: B008  # it can't be changed
    """The address given, else GPULEASE_ADDRESS, else the default socket. Raises InvalidRequest.

    A tls: address comes with the files that it takes, from `files` or the environment.
    """
    try:
        if text is not None:
            utf8(text, "the daemon's address")
        address = parse_address(text or os.environ.get(ADDRESS_VARIABLE) or DEFAULT_ADDRESS)
    except ValueError as error:
        raise InvalidRequest(f"the daemon's address: {error}") from None
    return with_files(address, files)


def fleet_of(text: str | None, files: TlsFiles = TlsFiles()) -> Fleet | None:  # noqa: B008  # it can't be changed
    """The fleet that the address given, else GPULEASE_ADDRESS, names; None for a daemon. Raises InvalidRequest."""
    named = text or os.environ.get(ADDRESS_VARIABLE) or ""
    if not isinstance(named, str) or not named.startswith(FLEET_SCHEME):
        return None  # `address_of` refuses what is no text
    try:
        utf8(named, "the fleet's address")
        return Fleet.of(parse_fleet_address(named), files)
    except ValueError as error:
        raise InvalidRequest(f"the fleet's address: {error}") from None


def milliseconds(seconds: float, what: str, *, least_ms: int) -> int:
    """Convert seconds to the wire's milliseconds. Raises InvalidRequest for a time that does not fit."""
    if isinstance(seconds, bool) or not isinstance(seconds, int | float) or not math.isfinite(seconds):
        hint = "Give seconds as a number: 600 for ten minutes" if isinstance(seconds, str) else ""
        raise InvalidRequest(f"{what}: {quoted(seconds)} is not a number of seconds", hint)
    value = math.ceil(seconds * 1000)
    if not least_ms <= value <= MAX_WIRE_MS:
        raise InvalidRequest(f"{what}: {seconds!r} s is not between {least_ms / 1000:g} s and {MAX_WIRE_MS // 1000} s")
    return value


class LeaseRequest:
    """Describes the lease to ask for; every public method returns the builder itself."""

    def __init__(self, address: str | None = None) -> None:
        """Args: address: The daemon's or the fleet's address; None for GPULEASE_ADDRESS, else the default socket."""
        self._address = address
        self._min_vram_bytes = 0
        self._submit_bytes = 0
        self._ttl_ms = milliseconds(DEFAULT_LEASE_S, "lease_secs", least_ms=1)
        self._wait_ms = 0
        self._device: str | None = None
        self._parameters: dict[int, bytes] = {}
        self._labels: dict[str, str] = {}
        self._tls_files = TlsFiles()

    if not TYPE_CHECKING:
        # Only for who takes it for the lease, and has no type checker to say so.

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
        """Name the PEM files that prove this tenant to a remote daemon, and the daemon to this tenant.

        A file that is not given is taken from GPULEASE_TLS_CERTIFICATE, GPULEASE_TLS_KEY or GPULEASE_TLS_CA.
        """
        self._tls_files = TlsFiles(certificate, key, ca)
        return self

    def min_vram(self, size_bytes: int | str) -> Self:
        """Set the device memory, all of it for the tenant: bytes, or a text such as "4GiB"."""
        self._min_vram_bytes = size_of(size_bytes, "min_vram")
        return self

    def submits(self, size_bytes: int | str) -> Self:
        """Set the device memory for `lease.submit`, besides `min_vram`: for its image and arguments on the card."""
        self._submit_bytes = size_of(size_bytes, "submits")
        self._parameters[SUBMIT_TAG] = self._submit_bytes.to_bytes(8, "big")
        return self

    def lease_secs(self, seconds: float) -> Self:
        """Set the seconds that the lease lasts unless it is renewed; the daemon has a maximum."""
        self._ttl_ms = milliseconds(seconds, "lease_secs", least_ms=1)
        return self

    def exclusivity(self, exclusivity: Exclusivity | int) -> Self:
        """Set the rule for other leases on the same card."""
        self._parameters[EXCLUSIVITY_TAG] = bytes([_member(Exclusivity, exclusivity, "exclusivity")])
        return self

    def waiting(self, waiting: Waiting | int) -> Self:
        """Set how session and worker wait: SPIN for the soonest answer, YIELD on a busy host, BLOCK to sleep at once.

        If this is not called, they spin for a bounded time where the host has cores for both of them.
        """
        self._parameters[WAITING_TAG] = bytes([_member(Waiting, waiting, "waiting")])
        return self

    def max_kernel_secs(self, seconds: float) -> Self:
        """Set the seconds that one kernel may run; a longer one ends the lease. No bound if this is not called."""
        value = milliseconds(seconds, "max_kernel_secs", least_ms=1)
        self._parameters[MAX_KERNEL_TAG] = value.to_bytes(4, "big")
        return self

    def orphan_secs(self, seconds: float) -> Self:
        """Set the seconds that the lease may be without a connection before it ends, orphaned; 0: as long as it lasts.

        Its connections are the lease object's own, those of its session, also by a token, and its submits'. A renewal
        begins the wait anew. The daemon's operator has a default if this is not called.
        """
        self._parameters[ORPHAN_TAG] = milliseconds(seconds, "orphan_secs", least_ms=0).to_bytes(4, "big")
        return self

    def regions_required(self) -> Self:
        """Have the session refuse every launch that names no region set: no launch site can forget it."""
        self._parameters[REGIONS_REQUIRED_TAG] = b"\x01"
        return self

    def name(self, name: str) -> Self:
        """Set the name that the daemon's fleet serves once: while this lease lives, no other one has it.

        The lease's `epoch` tells it from every earlier one of the name. A node that is cut off from its fleet ends the
        lease.
        """
        encoded = utf8(name, "name")
        if not NAME.fullmatch(name):
            raise InvalidRequest(f"name: {quoted(name)} is not a valid name", f"A name is {NAME_RULE}")
        self._parameters[NAME_TAG] = encoded
        return self

    def labels(self, **labels: str) -> Self:
        """Set what the node must be labelled with, such as zone="a"; its operator has given it labels."""
        for key, value in labels.items():
            utf8(value, f"labels: {quoted(key)}")
            if not NAME.fullmatch(key) or not NAME.fullmatch(value):
                raise InvalidRequest(
                    f"labels: {quoted(key)}={quoted(value)} is not a valid label",
                    f"Its key and its value are each {NAME_RULE}",
                )
        if len(self._labels | labels) > MAX_LABELS:
            raise InvalidRequest(f"labels: a lease asks for {MAX_LABELS} labels at the most")
        self._labels |= labels
        if self._labels:
            self._parameters[LABELS_TAG] = ",".join(f"{key}={value}" for key, value in self._labels.items()).encode()
        return self

    def device(self, uuid_or_index: str | int) -> Self:
        """Choose the card, by its UUID or its index. Any card that fits if this is not called."""
        if isinstance(uuid_or_index, str):
            self._device = bounded(uuid_or_index, "device: a card's name", MAX_TEXT_BYTES)
        else:
            self._device = str(whole(uuid_or_index, "device", least=0, most=MAX_CARD_INDEX))
        return self

    def timeout(self, seconds: float) -> Self:
        """Set the seconds to wait for room; 0, the default: do not wait."""
        self._wait_ms = milliseconds(seconds, "timeout", least_ms=0)
        return self

    def _where(self) -> Address | Fleet:
        return fleet_of(self._address, self._tls_files) or address_of(self._address, self._tls_files)

    def _request(self) -> LeaseAlloc:
        if not self._min_vram_bytes:
            raise InvalidRequest("acquire: the lease's size is missing", 'Set it with GpuBuilder().min_vram("4GiB")')
        parameters = tuple(LeaseParameter(tag, value) for tag, value in self._parameters.items())
        size_bytes = self._min_vram_bytes + self._submit_bytes
        return LeaseAlloc(GPU_RESOURCE_TYPE, size_bytes, self._ttl_ms, self._wait_ms, self._device, parameters)


def _member(kind: type[IntEnum], given: int, what: str) -> int:
    try:
        return kind(given)
    except ValueError:
        names = ", ".join(f"{item.name} ({item.value})" for item in kind)
        raise InvalidRequest(f"{what}: {quoted(given)} is none of {names}") from None


def size_of(size: Any, what: str) -> int:
    """Convert a size as people write it, "4GiB" or 4 << 30, to bytes. Raises InvalidRequest."""
    if isinstance(size, str):
        try:
            size = parse_size(bounded(size, what, MAX_TEXT_BYTES))
        except ValueError as error:
            raise InvalidRequest(f"{what}: {error}") from None
    return whole(size, what, least=1, most=MAX_WIRE_BYTES)


def whole(value: Any, what: str, *, least: int, most: int) -> int:
    """Check an integer's range; numpy's integers are integers too. Raises InvalidRequest."""
    try:
        number = value.__index__()
    except (AttributeError, TypeError):
        raise InvalidRequest(f"{what}: {quoted(value)} is not an integer") from None
    if not least <= number <= most:
        raise InvalidRequest(f"{what}: {number} is not between {least} and {most}")
    return int(number)
