"""What a tenant may be called, and whose name is another's from now on.

What a setting's value may be, as people write it; which setting is read how is said in `config`.

Each function raises ValueError, with a clause that says what is wrong.

The part of the settings that is about single tenants.

The part of the settings that is about contexts that serve their tenant's next lease, and within what bounds.

The part of the settings that is about remote tenants: whose certificates are taken, and for whom.

What settings say of each other, and of the host: tables for nobody's leases, cards and users that are not there.

Whoever writes limits for a tenant or a card that nothing is called believes that they hold: the daemon does not start.

What the operator wants: command line over file over defaults, checked once, in sentences.
"""

import pwd
import re
import tomllib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, fields, replace
from enum import Enum
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final, TypeVar

from gpulease.daemon.capabilities.claims import Demand
from gpulease.daemon.drivers.ptx.architecture import Architecture, parse_architecture
from gpulease.daemon.leases import Card, Cause, CoreLimits, Recycling
from gpulease.daemon.leases.rules import DEFAULT_GRACE_MS, TenantLimits, TenantRules
from gpulease.daemon.log.writer import FORMATS, LEVELS, LogStyle
from gpulease.daemon.sandbox.measures import ALWAYS_ON, MODES, Measure, SandboxSettings
from gpulease.daemon.web.settings import HttpSettings, parse_http
from gpulease.protocol.address import DEFAULT_ADDRESS, Address, TcpAddress, TlsAddress, parse_address
from gpulease.protocol.origin import parse_host_names
from gpulease.protocol.sizes import parse_size

OVER_TCP: Final = "tcp"
"""All peers over plain TCP."""

RESERVED_TENANTS: Final = (OVER_TCP, "default", "gpuleased")
"""Names with a meaning of their own: all peers over TCP, every tenant that has no rules of its own, and the daemon
itself in the audit log."""

_TENANT: Final = re.compile(r"[A-Za-z0-9._-]{1,64}")


def check_tenant(name: object) -> str:
    """The name, if an operator, or a certificate, may give it to a tenant. Raises ValueError.

    A local user without a name is `uid:N`, which nobody can be named.
    """
    if not isinstance(name, str) or not _TENANT.fullmatch(name) or name in RESERVED_TENANTS:
        raise ValueError(f"{name!r} is no name for a tenant: use letters, digits, dots, dashes and underscores")
    return name


def changed_hands(
    of_uid: tuple[Mapping[int, str], Mapping[int, str]], of_certificate: tuple[Mapping[str, str], Mapping[str, str]]
) -> frozenset[str]:
    """The names that may be other people's than before; each argument is what an operator said before, and says now.

    Without a table, certificates say themselves whose they are: any name could be one's.
    """
    tables = (*of_uid, *of_certificate)
    if bool(of_certificate[0]) != bool(of_certificate[1]):
        return frozenset(name for table in tables for name in table.values())
    moved = (of_uid[0].items() ^ of_uid[1].items()) | (of_certificate[0].items() ^ of_certificate[1].items())
    return frozenset(name for _, name in moved)


MAX_UID: Final = 2**32 - 2
"""The largest number of a user (credentials(7)); the one above says "none"."""

MAX_WHOLE: Final = 2**31 - 1
"""Of a count, of seconds or of milliseconds: more is a typing mistake, and as nanoseconds could be past what a clock,
a page or a socket option holds."""

_UID: Final = re.compile(r"0|[1-9]\d{0,9}", re.ASCII)
_OCTAL: Final = re.compile("(?:0o?)?[0-7]{3}", re.ASCII)

Choice = TypeVar("Choice", bound=Enum)


def whole(name: str, value: Any) -> int:
    """A number of something, called `name` in what is said of it."""
    if not isinstance(value, int) or isinstance(value, bool):
        raise ValueError(f"{name} is {value!r}; it must be a whole number")
    if value > MAX_WHOLE:
        raise ValueError(f"{name} is {value}; it must be at most {MAX_WHOLE}")
    return value


def truth(value: Any) -> bool:
    """True or false."""
    if not isinstance(value, bool):
        raise ValueError(f"{value!r} is neither true nor false")
    return value


def texts(value: Any) -> list[str]:
    """Some strings, or one."""
    if not isinstance(value, str | list):
        raise ValueError("it must be a string or a list of strings")
    found = [value] if isinstance(value, str) else list(value)
    if not all(isinstance(text, str) for text in found):
        raise ValueError("it must be a string or a list of strings")
    return found


def member(kind: type[Choice], value: Any) -> Choice:
    """One of an enumeration's values."""
    if value not in {choice.value for choice in kind}:
        raise ValueError(f"{value!r} is none of {', '.join(choice.value for choice in kind)}")
    return kind(value)


def measure(text: str) -> Measure:
    """A measure of the sandbox that can be done without."""
    known = [measure.value for measure in Measure if measure not in ALWAYS_ON]
    if text not in known:
        raise ValueError(f"{text!r} is none of {', '.join(known)}")
    return Measure(text)


def file_mode(value: Any) -> int:
    """Permission bits, of text or of a number."""
    is_octal = isinstance(value, str) and _OCTAL.fullmatch(value) is not None
    mode = int(value, 8) if is_octal else -1 if isinstance(value, str) else whole("socket_mode", value)
    if not 0 <= mode <= 0o777:
        raise ValueError(f'{value!r} is not a file mode: write it as "0660" or 0o660')
    return mode


def absolute_path(value: Any) -> Path:
    """A file's or folder's."""
    if not isinstance(value, str) or not Path(value).is_absolute() or "\0" in value:
        raise ValueError(f"{value!r} is not an absolute path")
    return Path(value)


def user_name(value: Any) -> str:
    """A local user's; whether there is one is seen when it is used."""
    if not isinstance(value, str) or not value:
        raise ValueError(f"{value!r} is not the name of a user")
    return value


def tenants_of_users(table: Any) -> Mapping[int, str]:
    """Tenants by the numbers of local users."""
    if not isinstance(table, dict):
        raise ValueError("it must be a table")
    for uid, tenant in table.items():
        if _UID.fullmatch(uid) is None or int(uid) > MAX_UID:
            raise ValueError(f"{uid!r} is not a user's number")
        check_tenant(tenant)
    return MappingProxyType({int(uid): tenant for uid, tenant in table.items()})


def core_limits(table: Any) -> CoreLimits:
    """The lease table's bounds, those that are not given as they are by default."""
    if not isinstance(table, dict):
        raise ValueError("it must be a table")
    settings = dict(table)
    _check_names(settings, [item.name for item in fields(CoreLimits) if item.name != "tenants"])
    graces = settings.pop("grace_ms", {})
    if not isinstance(graces, dict):
        raise ValueError("grace_ms must be a table")
    _check_names(graces, [cause.value for cause in Cause])
    graces = {Cause(cause): whole(f"grace_ms.{cause}", ms) for cause, ms in graces.items()}
    bounds: dict[str, Any] = {name: whole(name, bound) for name, bound in settings.items()}
    if graces:
        bounds["grace_ms"] = {**DEFAULT_GRACE_MS, **graces}
    return CoreLimits(**bounds)


def _check_names(table: dict[str, Any], known: list[str]) -> None:
    for name in table:
        if name not in known:
            raise ValueError(f"there is no {name!r}; known are {', '.join(known)}")


DEFAULT: Final = "default"
"""The table for all tenants that have none of their own; the others take from it what they do not say."""

_LOCAL: Final = re.compile(r"uid:(?:0|[1-9]\d{0,9})", re.ASCII)
"""A local user without a name of its own."""


@dataclass(frozen=True, slots=True)
class Setting:
    """What a key of a tenant's table becomes."""

    field: str
    convert: Callable[[Any], Any]


def parse_rules(tables: Any) -> TenantRules:
    """The rules of a `[tenants]` table of tables. Raises ValueError."""
    if not isinstance(tables, dict) or not all(isinstance(table, dict) for table in tables.values()):
        raise ValueError('it must be a table of tables, such as [tenants.default] and [tenants."uid:1000"]')
    known = {
        "max_vram": Setting("max_vram_bytes", lambda value: parse_size(_text(value))),
        "max_leases": Setting("max_leases", _whole),
        "max_ttl_s": Setting("max_ttl_s", _whole),
        "acquires_per_minute": Setting("acquires_per_minute", _whole),
        "acquire_burst": Setting("acquire_burst", _whole),
        "devices": Setting("devices", _devices),
    }
    for name in tables:
        _check_name(name)
    parsed = {name: _parse(name, table, known) for name, table in tables.items()}
    default = TenantLimits().but(parsed.pop(DEFAULT, {}))
    return TenantRules(default, MappingProxyType({name: default.but(table) for name, table in parsed.items()}))


def _parse(tenant: str, table: Mapping[str, Any], known: Mapping[str, Setting]) -> dict[str, Any]:
    values = {}
    for key, value in table.items():
        if key not in known:
            raise ValueError(f"{tenant!r} has an unknown key {key!r}; known are {', '.join(known)}")
        try:
            values[known[key].field] = known[key].convert(value)
        except ValueError as error:
            raise ValueError(f"{key} of {tenant!r}: {error}") from None
    return values


def _check_name(tenant: str) -> None:
    """A table of nobody's would be limits that are never applied. Raises ValueError."""
    if tenant not in (DEFAULT, OVER_TCP) and _LOCAL.fullmatch(tenant) is None:
        check_tenant(tenant)


def _whole(value: Any) -> int:
    if not isinstance(value, int) or isinstance(value, bool):
        raise ValueError(f"{value!r} is not a whole number")
    return value


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise ValueError(f"{value!r} is not a string")
    return value


def _devices(value: Any) -> tuple[str, ...]:
    if not isinstance(value, list):
        raise ValueError("it must be a list of cards' uuids or indexes")
    return tuple(str(_whole(item)) if isinstance(item, int) else _text(item) for item in value)


RECYCLE: Final = ("off", "same-tenant")

MAX_RECYCLE_IDLE_S: Final = 3600
"""A context that is kept for longer for one tenant is a mistyped unit."""


def recycling_of(recycle: str, idle_s: int, leases: int) -> Recycling | None:
    """Within what bounds contexts serve again; None if they never do."""
    return None if recycle == RECYCLE[0] else Recycling(idle_s=idle_s, max_leases=leases)


def check_recycling(recycle: str, idle_s: int, leases: int, warm_contexts: int) -> None:
    """Raises ValueError for what can't be meant."""
    if recycle not in RECYCLE:
        raise ValueError(f"recycle is {recycle!r}; it must be {' or '.join(RECYCLE)}")
    if recycle != RECYCLE[0] and not warm_contexts:
        raise ValueError("recycle needs warm_contexts: only contexts that were made ahead serve again")
    if not 1 <= idle_s <= MAX_RECYCLE_IDLE_S:
        raise ValueError(f"recycle_idle_s is {idle_s}; it must be between 1 and {MAX_RECYCLE_IDLE_S}")
    if leases < 1:
        raise ValueError(f"recycle_leases is {leases}; it must be at least 1")


NAME_KINDS: Final = ("URI:", "DNS:")
"""The names of a certificate that can be a tenant's: its subjectAltName's URIs and DNS names (RFC 5280, 4.2.1.6)."""


@dataclass(frozen=True, slots=True)
class TlsSettings:
    """The `[tls]` table.

    Attributes:
        certificate: This node's certificate, and behind it those between it and its CA, as PEM.
        key: Its private key.
        client_ca: The CAs that tenants' certificates come from. Not the host's own: nobody else's CA makes a tenant.
        crl: Lists of revoked certificates, one for each of those CAs; None to do without.
        operators: Tenants who are operators when they come by TLS.
        max_connections: Relays at a time, sessions' among them: each is a process.
        max_connections_per_tenant: The same for one tenant, operators too.
    """

    certificate: Path
    key: Path
    client_ca: Path
    crl: Path | None = None
    operators: frozenset[str] = frozenset()
    max_connections: int = 512
    max_connections_per_tenant: int = 128


def parse_tls(table: Any) -> TlsSettings:
    """The settings of a `[tls]` table. Raises ValueError."""
    if not isinstance(table, dict):
        raise ValueError("it must be a table")
    known = {"certificate": _path, "key": _path, "client_ca": _path, "crl": _path, "operators": _operators}
    known |= {"max_connections": _count, "max_connections_per_tenant": _count}
    values: dict[str, Any] = {}
    for name, value in table.items():
        if name not in known:
            raise ValueError(f"there is no {name!r}; known are {', '.join(known)}")
        try:
            values[name] = known[name](value)
        except ValueError as error:
            raise ValueError(f"{name}: {error}") from None
    if missing := [name for name in ("certificate", "key", "client_ca") if name not in values]:
        raise ValueError(f"{' and '.join(missing)} must be given")
    settings = TlsSettings(**values)
    if "max_connections_per_tenant" not in values:
        fitting = min(settings.max_connections, settings.max_connections_per_tenant)
        return TlsSettings(**values, max_connections_per_tenant=fitting)
    if settings.max_connections_per_tenant > settings.max_connections:
        raise ValueError("max_connections_per_tenant is more than max_connections")
    return settings


def parse_certificate_names(table: Any) -> Mapping[str, str]:
    """Tenants by the names of their certificates, of `[tenant_of_certificate]`. Raises ValueError."""
    if not isinstance(table, dict):
        raise ValueError("it must be a table")
    if not table:
        # It would read as nobody, and be as if it were not there: everybody with a name of their own.
        raise ValueError("it is empty: name a certificate, or leave the table out to take the names they have")
    for name, tenant in table.items():
        if not name.startswith(NAME_KINDS) or "*" in name:
            raise ValueError(f'{name!r} is no name of a certificate: write "URI:..." or "DNS:...", without wildcards')
        check_tenant(tenant)
    return MappingProxyType(dict(table))


def _path(value: Any) -> Path:
    if not isinstance(value, str) or not Path(value).is_absolute() or "\0" in value:
        raise ValueError(f"{value!r} is not an absolute path")
    return Path(value)


def _operators(value: Any) -> frozenset[str]:
    if not isinstance(value, list):
        raise ValueError("it must be a list of tenants")
    return frozenset(check_tenant(tenant) for tenant in value)


def _count(value: Any) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ValueError(f"{value!r} is not a number of connections")
    return value


_LOCAL_PREFIX: Final = "uid:"
MAX_CARDS_NAMED: Final = 8
"""In one sentence."""


def check_tenants(
    rules: TenantRules, of_uid: Mapping[int, str], of_certificate: Mapping[str, str], tls: TlsSettings | None
) -> None:
    """That each tenant who is spoken of can come. Raises ValueError with a sentence about one who can't."""
    if of_certificate and tls is None:
        raise ValueError("tenant_of_certificate needs a [tls] table: without it nobody shows a certificate")
    for name in rules.by_name:
        if name == OVER_TCP:
            continue
        if name.startswith(_LOCAL_PREFIX):
            named = of_uid.get(int(name.removeprefix(_LOCAL_PREFIX)))
            if named is not None:
                raise ValueError(f"tenants: {name!r} is nobody, because [tenant_of_uid] calls that user {named!r}")
        elif name not in of_uid.values() and not _has_certificate(name, of_certificate, tls):
            raise ValueError(
                f"tenants: nobody is {name!r}; name a user or a certificate so, in [tenant_of_uid] or"
                " [tenant_of_certificate]"
            )
    for name in sorted(tls.operators if tls is not None else ()):
        if not _has_certificate(name, of_certificate, tls):
            raise ValueError(f"tls: operators has {name!r}, and no certificate of [tenant_of_certificate] is {name!r}")


def _has_certificate(name: str, of_certificate: Mapping[str, str], tls: TlsSettings | None) -> bool:
    """Without the table a certificate may name any tenant by itself."""
    return tls is not None and (not of_certificate or name in of_certificate.values())


def check_bounds(rules: TenantRules, limits: CoreLimits) -> None:
    """That no tenant's bound is one that can't be reached. Raises ValueError with a sentence about one that is."""
    for name, bounds in {"default": rules.default, **rules.by_name}.items():
        if bounds.max_ttl_s is not None and bounds.max_ttl_s > limits.max_ttl_s:
            raise ValueError(
                f"tenants: max_ttl_s of {name!r} is {bounds.max_ttl_s}, and that of [limits], for all tenants, is"
                f" {limits.max_ttl_s}"
            )


def check_devices(rules: TenantRules, cards: Iterable[Card]) -> None:
    """That each card that a tenant may use is one of these. Raises ValueError with a sentence about one that is not."""
    there = list(cards)
    for name, bounds in {"default": rules.default, **rules.by_name}.items():
        for selector in bounds.devices or ():
            if not any(card.answers_to(selector) for card in there):
                known = ", ".join(f"{card.index} ({card.uuid})" for card in there[:MAX_CARDS_NAMED])
                raise ValueError(f"tenants: devices of {name!r} has {selector!r}; the cards of this host are {known}")


def check_worker_user(name: str) -> None:
    """That workers can be this user, and that it is not the one they are kept from being. Raises ValueError."""
    try:
        user = pwd.getpwnam(name)
    except KeyError:
        raise ValueError(
            f"worker_user: there is no user {name!r}; make it, as systemd-sysusers makes that of install-service, or"
            " name another"
        ) from None
    if user.pw_uid == 0:
        raise ValueError(f"worker_user: {name!r} is root; name a user who may do nothing")


DRIVERS: Final = ("auto", "cuda", "cpu")

MIN_AUDIT_FILE_BYTES: Final = 64 << 10
"""A smaller file would hold a few records: a size mistyped by a unit."""

MAX_AUDIT_FILE_BYTES: Final = 1 << 30
"""Of which the last one is looked through when the daemon starts."""

MIN_VRAM_BYTES: Final = 1 << 20
"""Of a card: less is a number whose unit was forgotten, and a daemon that starts, and refuses every lease."""

MAX_EMBEDDED_CARDS: Final = 64
"""More pretended cards than any host has real ones is a typing mistake."""

MAX_WARM_CONTEXTS: Final = 64
"""More for one card is a typing mistake: each is a process, and half a gigabyte of a real card."""

_FIELDS: Final = {"vram": "vram_bytes", "audit_file_size": "audit_file_bytes"}
"""Settings that people write in another unit than the daemon keeps them."""


class OnStop(Enum):
    """What becomes of sessions when the daemon is stopped (SIGTERM): they end, or are left to the next daemon."""

    END = "end"
    KEEP = "keep"


class ConfigError(Exception):
    """A setting that can't be used; the message says which and why."""


@dataclass(frozen=True, slots=True)
class Config:
    """The daemon's settings.

    Attributes:
        listen: Where to listen.
        driver: "auto", "cuda" or "cpu".
        arch: For cpu: the architecture it has, "sm_90" if None.
        vram_bytes: For cpu: one pretended card of each size. For cuda: at most one, how much of each card to lease.
        socket_mode: Permission bits of a Unix socket: whoever may write to it may ask for leases.
        warm_contexts: How many contexts each card has ready for leases to come, each of which holds its overhead.
        recycle: "same-tenant" if a context serves its tenant's next lease too, "off" if each serves one lease.
        recycle_idle_s: How long it waits for that.
        recycle_leases: How many leases it serves at most.
        max_connections: Control connections at a time, all tenants together.
        max_connections_per_tenant: The same for one tenant; operators are not counted.
        state: The folder of what survives the daemon; None to keep nothing.
        on_stop: What becomes of sessions when it is stopped.
        audit: The folder of the audit log; None to keep none.
        audit_head: Where the log's head is written, for a place apart from it; None for the log's folder.
        audit_required: Whether no lease is granted unless its record is on the disk.
        audit_file_bytes: The size at which the log goes on in another file.
        audit_keep_files: How many of the log's files are kept; 0 for all.
        require_token: What tenants need a token of an operator's for: "alloc", "renew", and "attach", which takes any.
        token_key_file: Where the keys that sign tokens are kept; None: in `state`, or without one in this process
            alone, so that a restart ends every token.
        tenant_of_uid: Whose leases a local user's are; users that are not named are tenants of their own, `uid:N`.
        sandbox: "available" for every measure that the host has, "required" for all or no start.
        worker_user: Who workers are; None for nobody if the daemon is root, else for the daemon's own user.
        sandbox_without: Measures that the operator does without.
        log_format: How it logs: "auto", "human" or "json".
        log_level: From which level on: "debug", "info", "warning" or "error".
        max_load_s: How long an image may compile before its lease ends.
        tls: What it takes to be reached by remote tenants; None to listen for none.
        tenant_of_certificate: Whose leases those of a certificate's holder are. If it is empty, a certificate says so
            itself; see `gpulease.daemon.remote.identity`.
        http: Where the web page and the metrics are served; None to serve none.
        http_hosts: Names besides that address that they are asked for by.
        http_token_file: What opens tenants' names there, and lets revoke; None to let nobody.
        limits: The lease table's bounds, those of single tenants among them.
    """

    listen: tuple[Address, ...] = field(default_factory=lambda: (parse_address(DEFAULT_ADDRESS),))
    driver: str = "auto"
    arch: Architecture | None = None
    vram_bytes: tuple[int, ...] = ()
    socket_mode: int = 0o660
    warm_contexts: int = 0
    recycle: str = "off"
    recycle_idle_s: int = 10
    recycle_leases: int = 1000
    max_connections: int = 1024
    max_connections_per_tenant: int = 512
    state: Path | None = None
    on_stop: OnStop = OnStop.END
    audit: Path | None = None
    audit_head: Path | None = None
    audit_required: bool = False
    audit_file_bytes: int = 64 << 20
    audit_keep_files: int = 0
    require_token: frozenset[Demand] = frozenset()
    token_key_file: Path | None = None
    tenant_of_uid: Mapping[int, str] = field(default_factory=lambda: MappingProxyType({}))
    sandbox: str = "available"
    worker_user: str | None = None
    sandbox_without: frozenset[Measure] = frozenset()
    log_format: str = "auto"
    log_level: str = "info"
    max_load_s: int = 120
    tls: TlsSettings | None = None
    tenant_of_certificate: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))
    http: TcpAddress | None = None
    http_hosts: frozenset[str] = frozenset()
    http_token_file: Path | None = None
    limits: CoreLimits = field(default_factory=CoreLimits)

    def driver_of_workers(self, driver: str) -> str:
        """How workers are told which driver they have; see `gpulease.daemon.drivers.registry`."""
        return driver if driver != "cpu" or self.arch is None else f"{driver}:{self.arch}"

    @property
    def of_http(self) -> HttpSettings | None:
        """What is said of the web page, in one."""
        return None if self.http is None else HttpSettings(self.http, self.http_hosts, self.http_token_file)

    @property
    def of_log(self) -> LogStyle:
        """What is said of the log, in one."""
        return LogStyle(self.log_format, self.log_level)

    @property
    def of_sandbox(self) -> SandboxSettings:
        """What is said of the workers' sandbox, in one."""
        return SandboxSettings(self.sandbox == "required", self.worker_user, self.sandbox_without)

    @property
    def recycling(self) -> Recycling | None:
        """Within what bounds contexts serve their tenant again; None if they never do."""
        return recycling_of(self.recycle, self.recycle_idle_s, self.recycle_leases)


def load_config(path: Path | None, overrides: dict[str, Any]) -> Config:
    """The settings of a file, if any, with what the command line says instead. Raises ConfigError."""
    settings: dict[str, Any] = {} if path is None else _from_file(path)
    settings |= {key: value for key, value in overrides.items() if value not in (None, [])}
    tenants = settings.pop("tenants", None)
    values = {_field(key): _convert(key, value) for key, value in settings.items()}
    config = replace(Config(), **values)
    if tenants is not None:
        config = replace(config, limits=replace(config.limits, tenants=_convert("tenants", tenants)))
    if "max_connections_per_tenant" not in values:
        fitting = min(config.max_connections, config.max_connections_per_tenant)
        config = replace(config, max_connections_per_tenant=fitting)
    _check(config)
    return config


def _from_file(path: Path) -> dict[str, Any]:
    try:
        with path.open("rb") as file:
            return tomllib.load(file)
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        # TOMLDecodeError, bytes that are not UTF-8, or a thousand brackets.
        raise ConfigError(f"{path} is not TOML: {error}") from None


def _field(key: str) -> str:
    name = _FIELDS.get(key, key)
    if name not in {item.name for item in fields(Config)} or key in _FIELDS.values():
        keys = {name: key for key, name in _FIELDS.items()}
        known = ", ".join(keys.get(item.name, item.name) for item in fields(Config)) + ", tenants"
        raise ConfigError(f"unknown setting {key!r}; known are: {known}")
    return name


def _convert(key: str, value: Any) -> Any:
    try:
        read = _READ_BY.get(key)
        return whole(key, value) if read is None else read(value)
    except (ValueError, TypeError) as error:
        raise ConfigError(f"setting {key}: {error}") from None


_READ_BY: Final[Mapping[str, Callable[[Any], Any]]] = {
    "listen": lambda value: tuple(parse_address(text) for text in texts(value)),
    "driver": str,
    "arch": lambda value: parse_architecture(str(value)),
    "vram": lambda value: tuple(parse_size(text) for text in texts(value)),
    "socket_mode": file_mode,
    "recycle": str,
    "state": absolute_path,
    "on_stop": lambda value: member(OnStop, value),
    "audit": absolute_path,
    "audit_head": absolute_path,
    "audit_required": truth,
    "audit_file_size": lambda value: parse_size(str(value)),
    "require_token": lambda value: frozenset(member(Demand, text) for text in texts(value)),
    "token_key_file": absolute_path,
    "tenant_of_uid": tenants_of_users,
    "sandbox": str,
    "worker_user": user_name,
    "sandbox_without": lambda value: frozenset(measure(text) for text in texts(value)),
    "log_format": str,
    "log_level": str,
    "tls": parse_tls,
    "tenant_of_certificate": parse_certificate_names,
    "http": parse_http,
    "http_hosts": lambda value: parse_host_names(texts(value)),
    "http_token_file": absolute_path,
    "limits": core_limits,
    "tenants": parse_rules,
}
"""What makes a setting's value of what the file has; the others are whole numbers."""


def _check(config: Config) -> None:
    if config.driver not in DRIVERS:
        raise ConfigError(f"unknown driver {config.driver!r}; there are {', '.join(DRIVERS)}")
    if config.arch is not None and config.driver == "cuda":
        raise ConfigError("arch is the embedded driver's; a card has the architecture it has")
    if not config.listen:
        raise ConfigError("nothing to listen on")
    if len(set(config.listen)) < len(config.listen):
        raise ConfigError("an address stands twice in listen")
    if config.http in config.listen:
        raise ConfigError("http and listen have the same address")
    if len(config.vram_bytes) > MAX_EMBEDDED_CARDS:
        raise ConfigError(f"{len(config.vram_bytes)} cards; at most {MAX_EMBEDDED_CARDS} can be pretended")
    for size in config.vram_bytes:
        if size < MIN_VRAM_BYTES:
            raise ConfigError(f"vram is {size} bytes, which is too little to lease any of: write it as 48GiB or 512MiB")
    if config.max_connections < 1:
        raise ConfigError(f"max_connections is {config.max_connections}; it must be at least 1")
    if not 1 <= config.max_connections_per_tenant <= config.max_connections:
        raise ConfigError("max_connections_per_tenant must be between 1 and max_connections")
    if not 0 <= config.warm_contexts <= MAX_WARM_CONTEXTS:
        raise ConfigError(f"warm_contexts is {config.warm_contexts}; it must be between 0 and {MAX_WARM_CONTEXTS}")
    if config.log_format not in FORMATS:
        raise ConfigError(f"log_format is {config.log_format!r}; it must be one of {', '.join(FORMATS)}")
    if config.log_level not in LEVELS:
        raise ConfigError(f"log_level is {config.log_level!r}; it must be one of {', '.join(LEVELS)}")
    if config.sandbox not in MODES:
        raise ConfigError(f"sandbox is {config.sandbox!r}; it must be {' or '.join(MODES)}")
    if config.max_load_s < 1:
        raise ConfigError(f"max_load_s is {config.max_load_s}; it must be at least 1")
    if config.tls is None and any(isinstance(address, TlsAddress) for address in config.listen):
        raise ConfigError("to listen on tls: addresses, the settings need a [tls] table: certificate, key, client_ca")
    if config.on_stop is OnStop.KEEP and config.state is None:
        raise ConfigError('on_stop = "keep" needs state, the folder of what outlives the daemon')
    if config.http is None and (config.http_hosts or config.http_token_file is not None):
        raise ConfigError("http_hosts and http_token_file need http, the address of the web page")
    _check_audit(config)
    tenants = config.limits.tenants
    try:
        check_tenants(tenants, config.tenant_of_uid, config.tenant_of_certificate, config.tls)
        check_bounds(tenants, config.limits)
        check_recycling(config.recycle, config.recycle_idle_s, config.recycle_leases, config.warm_contexts)
    except ValueError as error:
        raise ConfigError(f"setting {error}") from None


def _check_audit(config: Config) -> None:
    if config.audit is None and (config.audit_required or config.audit_head is not None):
        raise ConfigError("audit_required and audit_head need audit, the folder of the audit log")
    if not MIN_AUDIT_FILE_BYTES <= config.audit_file_bytes <= MAX_AUDIT_FILE_BYTES:
        raise ConfigError(
            f"audit_file_size is {config.audit_file_bytes} bytes;"
            f" it must be between {MIN_AUDIT_FILE_BYTES} and {MAX_AUDIT_FILE_BYTES}"
        )
    if config.audit_keep_files < 0 or config.audit_keep_files == 1:
        raise ConfigError("audit_keep_files must be 0, for all, or at least 2")
