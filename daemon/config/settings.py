"""The daemon's settings: the command line over a file over the defaults, checked once, refused in sentences.

`TABLES` lists every setting of every section. The file, the command line and the check of the documentation all go
through these tables. `Config` holds the values and their defaults.
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
from gpulease.daemon.drivers.interface import ONE_BY_ONE
from gpulease.daemon.fleet.records.fleet_settings import (
    FleetSettings,
    parse_addresses,
    parse_etcd,
    parse_isolated,
    parse_labels,
    parse_node,
)
from gpulease.daemon.leases import Card, Cause, CoreLimits, PlacementOrder, Recycling
from gpulease.daemon.leases.quotas import DEFAULT_GRACE_MS, TenantLimits, TenantRules
from gpulease.daemon.log.writer import FORMATS, LEVELS, LogStyle
from gpulease.daemon.ptx.architecture import Architecture, parse_architecture
from gpulease.daemon.remote.tls_settings import OVER_TCP, TlsSettings, check_tenant, parse_certificate_names
from gpulease.daemon.sandbox.measures import ALWAYS_ON, MODES, Measure, SandboxSettings
from gpulease.daemon.web.http_settings import HttpSettings, parse_http
from gpulease.protocol.address import DEFAULT_ADDRESS, Address, TcpAddress, TlsAddress, parse_address
from gpulease.protocol.did_you_mean import did_you_mean
from gpulease.protocol.http_origin import parse_host_names
from gpulease.protocol.sizes import parse_size

DRIVERS: Final = ("auto", "cuda", "cpu")

RECYCLE: Final = ("off", "same-tenant")

MIN_AUDIT_FILE_BYTES: Final = 64 << 10
"""A smaller file would hold a few records: the operator forgot the unit."""

MAX_AUDIT_FILE_BYTES: Final = 1 << 30
"""The daemon reads the last file through when it starts."""

MIN_VRAM_BYTES: Final = 1 << 20
"""A smaller number lacks its unit. The daemon would start and then refuse every lease."""

MAX_EMBEDDED_CARDS: Final = 64
"""More emulated cards than any host has real ones is a typing mistake."""

MAX_WARM_CONTEXTS: Final = 64
"""More for one card is a typing mistake: each is a process, and half a gigabyte of a real card."""

MAX_SHUFFLE_SEED: Final = (1 << 31) - 1
"""Generated code counts on in 32 bits from it: a larger seed would be another one's order."""

MAX_RECYCLE_IDLE_S: Final = 3600
"""An operator who wants a context kept longer for one tenant mistyped the unit."""

MAX_UID: Final = 2**32 - 2
"""The largest number of a user (credentials(7)); 2**32 - 1 means "none"."""

MAX_WHOLE: Final = 2**31 - 1
"""The largest count, number of seconds or number of milliseconds. A larger one is a typing mistake; as nanoseconds it
could exceed what a clock, a control page or a socket option holds."""

MAX_CARDS_NAMED: Final = 8
"""In one error sentence."""


DEFAULT: Final = "default"
"""The `[tenants]` table for tenants without one. The other tables inherit what they leave out."""

_LOCAL_PREFIX: Final = "uid:"
_LOCAL: Final = re.compile(r"uid:(?:0|[1-9]\d{0,9})", re.ASCII)
"""A local user whom `[tenant_of_uid]` does not name."""

_UID: Final = re.compile(r"0|[1-9]\d{0,9}", re.ASCII)
_OCTAL: Final = re.compile("(?:0o?)?[0-7]{3}", re.ASCII)

Choice = TypeVar("Choice", bound=Enum)


class OnStop(Enum):
    """The choice for sessions when the daemon is stopped (SIGTERM): they end, or the next daemon takes them over."""

    END = "end"
    KEEP = "keep"


class ConfigError(Exception):
    """A setting that can't be used; the message says which and why."""


@dataclass(frozen=True, slots=True)
class Config:
    """The daemon's settings. `SETTINGS` has one entry for each attribute, in the same order.

    Attributes:
        listen: The addresses to listen on.
        driver: "auto", "cuda" or "cpu".
        arch: The architecture of the cpu driver; None for "sm_90".
        shuffle_warps: The seed of the order in which the cpu driver runs warps and blocks; None for their numbers'.
        launch_chains: Whether cards' drivers get launches that wait in a row by one call for several.
        vram_bytes: For cpu: one emulated card of each size. For cuda: at most one size, how much of each card to lease.
        socket_mode: Permission bits of a Unix socket. Everybody who may write to it may ask for leases.
        warm_contexts: Contexts that each card holds ready for later leases; each occupies its overhead.
        recycle: "same-tenant" if a context serves its tenant's next lease too, "off" if each serves one lease.
        recycle_idle_s: Seconds that a context waits for its tenant's next lease.
        recycle_leases: Leases that a context serves at most.
        placement: The card that a lease gets if its tenant names none: the emptiest that fits, or the fullest.
        max_connections: Control connections at a time, all tenants together.
        max_connections_per_tenant: Control connections at a time of one tenant; operators are not counted.
        state: The folder of what survives the daemon; None to keep nothing.
        on_stop: Whether sessions end when the daemon is stopped.
        audit: The folder of the audit log; None to keep none.
        audit_head: The file for the log's head, in a place apart from the log; None for the log's folder.
        audit_required: Whether a lease is granted only once its record is on the disk.
        audit_file_bytes: The size at which the log goes on in another file.
        audit_keep_files: How many of the log's files are kept; 0 for all.
        require_token: Requests for which tenants need an operator's token: "alloc", "renew" and "attach". For "attach"
            any tenant's token will do.
        token_key_file: The file of the keys that sign tokens. None: they are kept in `state`; without `state` they
            live in this process alone, and a restart ends every token.
        tenant_of_uid: The tenants of local users, by number. A user who is not named is the tenant `uid:N`.
        sandbox: "available" for every measure that the host has, "required" for all or no start.
        worker_user: The user that workers run as. None: nobody if the daemon is root, else the daemon's own user.
        sandbox_without: Measures that the operator does without.
        log_format: "auto", "human" or "json".
        log_level: The least level that is logged: "debug", "info", "warning" or "error".
        max_load_s: Seconds that an image may compile before its lease ends.
        tls: How remote tenants reach the daemon; None to listen for none.
        tenant_of_certificate: The tenants of certificates, by a name in each. If it is empty, a certificate names its
            tenant itself; `gpulease.daemon.remote.node_identity` has the rule.
        http: The address of the web page and the metrics; None to serve none.
        http_hosts: Host names besides that address that clients may ask for.
        http_token_file: The file of the token that shows tenants' names and allows revocation; None to let nobody.
        fleet: The fleet that the node belongs to; None for none.
        limits: The lease table's bounds, with those of single tenants.
    """

    listen: tuple[Address, ...] = field(default_factory=lambda: (parse_address(DEFAULT_ADDRESS),))
    driver: str = "auto"
    arch: Architecture | None = None
    shuffle_warps: int | None = None
    launch_chains: bool = True
    vram_bytes: tuple[int, ...] = ()
    socket_mode: int = 0o660
    warm_contexts: int = 0
    recycle: str = "off"
    recycle_idle_s: int = 10
    recycle_leases: int = 1000
    placement: PlacementOrder = PlacementOrder.SPREAD
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
    fleet: FleetSettings | None = None
    limits: CoreLimits = field(default_factory=CoreLimits)

    def driver_of_workers(self, driver: str) -> str:
        """Return the driver's name as workers get it; `gpulease.daemon.zygote.driver_registry` reads it."""
        if driver == "cuda" and not self.launch_chains:
            return f"{driver}:{ONE_BY_ONE}"
        if driver != "cpu" or (self.arch is None and self.shuffle_warps is None):
            return driver
        seed = "" if self.shuffle_warps is None else f":{self.shuffle_warps}"
        return f"{driver}:{self.arch or ''}{seed}"

    @property
    def of_http(self) -> HttpSettings | None:
        """The settings of the web page."""
        return None if self.http is None else HttpSettings(self.http, self.http_hosts, self.http_token_file)

    @property
    def of_log(self) -> LogStyle:
        """The settings of the log."""
        return LogStyle(self.log_format, self.log_level)

    @property
    def of_sandbox(self) -> SandboxSettings:
        """The settings of the workers' sandbox."""
        return SandboxSettings(self.sandbox == "required", self.worker_user, self.sandbox_without)

    @property
    def recycling(self) -> Recycling | None:
        """The bounds within which contexts serve their tenant again; None if they never do."""
        if self.recycle == "off":
            return None
        return Recycling(idle_s=self.recycle_idle_s, max_leases=self.recycle_leases)


def load_config(path: Path | None, overrides: dict[str, Any]) -> Config:
    """Return the settings of a file, if any, overridden by the command line. Raises ConfigError.

    Args:
        path: A TOML file.
        overrides: Settings of the command line, by the names that the file uses; None and [] override nothing.
    """
    settings: dict[str, Any] = {} if path is None else _read_file(path)
    settings |= {key: value for key, value in overrides.items() if value not in (None, []) and key != "fleet"}
    if (etcd := overrides.get("fleet")) is not None:
        settings["fleet"] = {**settings.get("fleet", {}), "etcd": etcd}
    if "tenants" in settings:
        # An operator mends the node's own settings first.
        settings["tenants"] = settings.pop("tenants")
    try:
        values = parse_table(
            settings, SETTINGS, unknown="unknown setting {key!r}; {known}", wrong="setting {key}: {error}"
        )
    except ValueError as error:
        raise ConfigError(str(error)) from None
    tenants = values.pop("tenants", None)
    config = replace(Config(), **values)
    if tenants is not None:
        config = replace(config, limits=replace(config.limits, tenants=tenants))
    if "max_connections_per_tenant" not in values:
        fitting = min(config.max_connections, config.max_connections_per_tenant)
        config = replace(config, max_connections_per_tenant=fitting)
    _check(config)
    return config


def _read_file(path: Path) -> dict[str, Any]:
    try:
        with path.open("rb") as file:
            return tomllib.load(file)
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        # TOMLDecodeError, bytes that are not UTF-8, or a thousand brackets.
        raise ConfigError(f"{path} is not TOML: {error}") from None


# --- the mechanism: one table of settings for each section ---


@dataclass(frozen=True, slots=True)
class Setting:
    """A section's key, with its default, its bounds and its sentence.

    Attributes:
        name: The key, as operators write it.
        parse: The function that turns the file's value into the daemon's; it raises ValueError or TypeError with a
            clause that says what is wrong. None for a whole number.
        field: The attribute that holds the value; "" if it has the key's name.
        least: The smallest value; None for no bound.
        most: The largest value; None for no bound.
        choices: The texts that are allowed; () for any.
    """

    name: str
    parse: Callable[[Any], Any] | None = None
    field: str = ""
    least: int | None = None
    most: int | None = None
    choices: tuple[str, ...] = ()

    @property
    def attribute(self) -> str:
        """The name of the attribute that holds the value."""
        return self.field or self.name

    def check_bounds(self, value: Any) -> None:
        """Raise ConfigError if a value is out of bounds."""
        if self.choices and value not in self.choices:
            choices = " or ".join(self.choices) if len(self.choices) == 2 else f"one of {', '.join(self.choices)}"
            hint = did_you_mean(value, self.choices, "")
            raise ConfigError(f"{self.name} is {value!r}; it must be {choices}{hint and f'; {hint}'}")
        if value is None:
            return
        if self.least is not None and self.most is not None and not self.least <= value <= self.most:
            raise ConfigError(f"{self.name} is {value}; it must be between {self.least} and {self.most}")
        if self.least is not None and value < self.least:
            raise ConfigError(f"{self.name} is {value}; it must be at least {self.least}")


def parse_table(table: Any, settings: Iterable[Setting], *, unknown: str, wrong: str) -> dict[str, Any]:
    """Return a section's values by attribute. Raises ValueError.

    Args:
        table: The section as TOML has it, or the command line.
        settings: The keys that may be there.
        unknown: The sentence about a key that is not known; it has {key}, and {known} for those that
            are, or for one that is close.
        wrong: The sentence about a value; it has {error} and may have {key}.
    """
    if not isinstance(table, dict):
        raise ValueError("it must be a table")
    by_name = {setting.name: setting for setting in settings}
    values: dict[str, Any] = {}
    for key, value in table.items():
        setting = by_name.get(key)
        if setting is None:
            raise ValueError(unknown.format(key=key, known=did_you_mean(key, by_name)))
        try:
            values[setting.attribute] = whole(key, value) if setting.parse is None else setting.parse(value)
        except (ValueError, TypeError) as error:
            raise ValueError(wrong.format(key=key, error=error)) from None
    return values


_NO_SUCH_KEY: Final = "there is no {key!r}; {known}"


# --- values: each function raises ValueError with a clause that says what is wrong ---


def whole(name: str, value: Any) -> int:
    """Return a whole number; the error calls it `name`."""
    if not isinstance(value, int) or isinstance(value, bool):
        raise ValueError(f"{name} is {value!r}; it must be a whole number")
    if value > MAX_WHOLE:
        raise ValueError(f"{name} is {value}; it must be at most {MAX_WHOLE}")
    return value


def _truth(value: Any) -> bool:
    if not isinstance(value, bool):
        raise ValueError(f"{value!r} is neither true nor false")
    return value


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise ValueError(f"{value!r} is not a string")
    return value


def _texts(value: Any) -> list[str]:
    """Return the strings of a list, or of one string."""
    found = [value] if isinstance(value, str) else value
    if not isinstance(found, list) or not all(isinstance(text, str) for text in found):
        raise ValueError("it must be a string or a list of strings")
    return list(found)


def _member(kind: type[Choice], value: Any) -> Choice:
    known = [choice.value for choice in kind]
    if value not in known:
        hint = did_you_mean(value, known, "")
        raise ValueError(f"{value!r} is none of {', '.join(known)}{hint and f'; {hint}'}")
    return kind(value)


def _measure(text: str) -> Measure:
    """Return a measure of the sandbox that the operator may do without."""
    known = [measure.value for measure in Measure if measure not in ALWAYS_ON]
    if text not in known:
        hint = did_you_mean(text, known, "")
        raise ValueError(f"{text!r} is none of {', '.join(known)}{hint and f'; {hint}'}")
    return Measure(text)


def _file_mode(value: Any) -> int:
    """Return permission bits, given as octal text or as a number."""
    is_octal = isinstance(value, str) and _OCTAL.fullmatch(value) is not None
    mode = int(value, 8) if is_octal else -1 if isinstance(value, str) else whole("socket_mode", value)
    if not 0 <= mode <= 0o777:
        raise ValueError(f'{value!r} is not a file mode: write it as "0660" or 0o660')
    return mode


def _absolute_path(value: Any) -> Path:
    if not isinstance(value, str) or not Path(value).is_absolute() or "\0" in value:
        raise ValueError(f"{value!r} is not an absolute path")
    return Path(value)


def _user_name(value: Any) -> str:
    """Return a local user's name; `check_worker_user` finds out whether there is one."""
    if not isinstance(value, str) or not value:
        raise ValueError(f"{value!r} is not the name of a user")
    return value


def _tenants_of_users(table: Any) -> Mapping[int, str]:
    """Return tenants by the numbers of local users."""
    if not isinstance(table, dict):
        raise ValueError("it must be a table")
    for uid, tenant in table.items():
        if _UID.fullmatch(uid) is None or int(uid) > MAX_UID:
            raise ValueError(f"{uid!r} is not a user's number")
        check_tenant(tenant)
    return MappingProxyType({int(uid): tenant for uid, tenant in table.items()})


# --- the sections ---


def parse_limits(table: Any) -> CoreLimits:
    """Return the bounds of `[limits]`, with the defaults for the rest. Raises ValueError."""
    return CoreLimits(**parse_table(table, LIMIT_SETTINGS, unknown=_NO_SUCH_KEY, wrong="{error}"))


def _graces(table: Any) -> Mapping[Cause, int]:
    if not isinstance(table, dict):
        raise ValueError("grace_ms must be a table")
    graces = parse_table(table, GRACE_SETTINGS, unknown=_NO_SUCH_KEY, wrong="grace_ms.{error}")
    return {**DEFAULT_GRACE_MS, **{Cause(cause): ms for cause, ms in graces.items()}}


def parse_rules(tables: Any) -> TenantRules:
    """Return the rules of a `[tenants]` table of tables. Raises ValueError."""
    if not isinstance(tables, dict) or not all(isinstance(table, dict) for table in tables.values()):
        raise ValueError('it must be a table of tables, such as [tenants.default] and [tenants."uid:1000"]')
    for name in tables:
        # A table for a name that nobody can have would be limits that never apply.
        if name not in (DEFAULT, OVER_TCP) and _LOCAL.fullmatch(name) is None:
            check_tenant(name)
    parsed = {
        tenant: parse_table(
            table,
            TENANT_SETTINGS,
            unknown=f"{tenant!r} has an unknown key {{key!r}}; {{known}}",
            wrong=f"{{key}} of {tenant!r}: {{error}}",
        )
        for tenant, table in tables.items()
    }
    default = TenantLimits().but(parsed.pop(DEFAULT, {}))
    return TenantRules(default, MappingProxyType({name: default.but(values) for name, values in parsed.items()}))


def _tenant_whole(value: Any) -> int:
    if not isinstance(value, int) or isinstance(value, bool):
        raise ValueError(f"{value!r} is not a whole number")
    return value


def _devices(value: Any) -> tuple[str, ...]:
    if not isinstance(value, list):
        raise ValueError("it must be a list of cards' uuids or indexes")
    return tuple(str(_tenant_whole(item)) if isinstance(item, int) else _text(item) for item in value)


def parse_tls(table: Any) -> TlsSettings:
    """Return the settings of a `[tls]` table. Raises ValueError."""
    values = parse_table(table, TLS_SETTINGS, unknown=_NO_SUCH_KEY, wrong="{key}: {error}")
    if missing := [name for name in ("certificate", "key", "client_ca") if name not in values]:
        raise ValueError(f"{' and '.join(missing)} must be given")
    settings = TlsSettings(**values)
    if "max_connections_per_tenant" not in values:
        fitting = min(settings.max_connections, settings.max_connections_per_tenant)
        return replace(settings, max_connections_per_tenant=fitting)
    if settings.max_connections_per_tenant > settings.max_connections:
        raise ValueError("max_connections_per_tenant is more than max_connections")
    return settings


def parse_fleet(table: Any) -> FleetSettings:
    """Return the settings of a `[fleet]` table. Raises ValueError."""
    values = parse_table(table, FLEET_SETTINGS, unknown=_NO_SUCH_KEY, wrong="{key}: {error}")
    if "etcd" not in values:
        raise ValueError("etcd must be given")
    return FleetSettings(**values)


def _operators(value: Any) -> frozenset[str]:
    if not isinstance(value, list):
        raise ValueError("it must be a list of tenants")
    return frozenset(check_tenant(tenant) for tenant in value)


def _connections(value: Any) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ValueError(f"{value!r} is not a number of connections")
    return value


SETTINGS: Final = (
    Setting("listen", lambda value: tuple(parse_address(text) for text in _texts(value))),
    Setting("driver", str),
    Setting("arch", lambda value: parse_architecture(str(value))),
    Setting("shuffle_warps", least=0, most=MAX_SHUFFLE_SEED),
    Setting("launch_chains", _truth),
    Setting("vram", lambda value: tuple(parse_size(text) for text in _texts(value)), field="vram_bytes"),
    Setting("socket_mode", _file_mode),
    Setting("warm_contexts", least=0, most=MAX_WARM_CONTEXTS),
    Setting("recycle", str),
    Setting("recycle_idle_s"),
    Setting("recycle_leases"),
    Setting("placement", lambda value: _member(PlacementOrder, value)),
    Setting("max_connections", least=1),
    Setting("max_connections_per_tenant"),
    Setting("state", _absolute_path),
    Setting("on_stop", lambda value: _member(OnStop, value)),
    Setting("audit", _absolute_path),
    Setting("audit_head", _absolute_path),
    Setting("audit_required", _truth),
    Setting("audit_file_size", lambda value: parse_size(str(value)), field="audit_file_bytes"),
    Setting("audit_keep_files"),
    Setting("require_token", lambda value: frozenset(_member(Demand, text) for text in _texts(value))),
    Setting("token_key_file", _absolute_path),
    Setting("tenant_of_uid", _tenants_of_users),
    Setting("sandbox", str, choices=MODES),
    Setting("worker_user", _user_name),
    Setting("sandbox_without", lambda value: frozenset(_measure(text) for text in _texts(value))),
    Setting("log_format", str, choices=FORMATS),
    Setting("log_level", str, choices=LEVELS),
    Setting("max_load_s", least=1),
    Setting("tls", parse_tls),
    Setting("tenant_of_certificate", parse_certificate_names),
    Setting("http", parse_http),
    Setting("http_hosts", lambda value: parse_host_names(_texts(value))),
    Setting("http_token_file", _absolute_path),
    Setting("fleet", parse_fleet),
    Setting("limits", parse_limits),
    Setting("tenants", parse_rules),
)
"""The keys outside of sections, and the sections. `tenants` becomes a part of `limits`."""

LIMIT_SETTINGS: Final = tuple(
    Setting(item.name, _graces if item.name == "grace_ms" else None)
    for item in fields(CoreLimits)
    if item.name != "tenants"
)
"""The keys of `[limits]`; `CoreLimits` has their defaults and checks their bounds."""

GRACE_SETTINGS: Final = tuple(Setting(cause.value) for cause in Cause if cause is not Cause.ISOLATED)
"""The keys of `[limits.grace_ms]`, in milliseconds."""

TLS_SETTINGS: Final = (
    Setting("certificate", _absolute_path),
    Setting("key", _absolute_path),
    Setting("client_ca", _absolute_path),
    Setting("crl", _absolute_path),
    Setting("operators", _operators),
    Setting("max_connections", _connections),
    Setting("max_connections_per_tenant", _connections),
)
"""The keys of `[tls]`; `TlsSettings` has their defaults."""

FLEET_SETTINGS: Final = (
    Setting("etcd", parse_etcd),
    Setting("ca", _absolute_path),
    Setting("certificate", _absolute_path),
    Setting("key", _absolute_path),
    Setting("node", parse_node),
    Setting("addresses", parse_addresses),
    Setting("labels", parse_labels),
    Setting("horizon_s"),
    Setting("isolated", parse_isolated),
    Setting("history_s"),
    Setting("etcd_quota", lambda value: parse_size(_text(value)), field="etcd_quota_bytes"),
)
"""The keys of `[fleet]`; `FleetSettings` has their defaults and checks their bounds."""

TENANT_SETTINGS: Final = (
    Setting("max_vram", lambda value: parse_size(_text(value)), field="max_vram_bytes"),
    Setting("max_leases", _tenant_whole),
    Setting("max_ttl_s", _tenant_whole),
    Setting("acquires_per_minute", _tenant_whole),
    Setting("acquire_burst", _tenant_whole),
    Setting("devices", _devices),
    Setting("fleet_quota", _truth),
)
"""The keys of `[tenants.NAME]`; `TenantLimits` has their defaults and checks their bounds."""

TABLES: Final[Mapping[str, tuple[Setting, ...]]] = MappingProxyType(
    {
        "": SETTINGS,
        "limits": LIMIT_SETTINGS,
        "limits.grace_ms": GRACE_SETTINGS,
        "tls": TLS_SETTINGS,
        "fleet": FLEET_SETTINGS,
        "tenants": TENANT_SETTINGS,
    }
)
"""Every setting, by section."""


# --- checks of settings against each other ---


def _check(config: Config) -> None:
    """Raise ConfigError for bounds that a value exceeds, and for settings that contradict each other."""
    _check_driver(config)
    _check_addresses(config)
    for setting in SETTINGS:
        if setting.name != "tenants":
            setting.check_bounds(getattr(config, setting.attribute))
    if not 1 <= config.max_connections_per_tenant <= config.max_connections:
        raise ConfigError("max_connections_per_tenant must be between 1 and max_connections")
    if config.on_stop is OnStop.KEEP and config.state is None:
        raise ConfigError('on_stop = "keep" needs state, the folder of what outlives the daemon')
    _check_audit(config)
    tenants = config.limits.tenants
    try:
        check_tenants(tenants, config.tenant_of_uid, config.tenant_of_certificate, config.tls)
        check_bounds(tenants, config.limits)
        check_fleet_quotas(tenants, config.fleet)
        check_recycling(config.recycle, config.recycle_idle_s, config.recycle_leases, config.warm_contexts)
    except ValueError as error:
        raise ConfigError(f"setting {error}") from None


def _check_driver(config: Config) -> None:
    if config.driver not in DRIVERS:
        hint = did_you_mean(config.driver, DRIVERS, "there are {known}")
        raise ConfigError(f"unknown driver {config.driver!r}; {hint}")
    if config.arch is not None and config.driver == "cuda":
        raise ConfigError("arch is the embedded driver's; a card has the architecture it has")
    if config.shuffle_warps is not None and config.driver == "cuda":
        raise ConfigError("shuffle_warps is the embedded driver's; a card runs warps in an order of its own")
    if not config.launch_chains and config.driver == "cpu":
        raise ConfigError("launch_chains is for cards; the embedded driver has no chains")
    if len(config.vram_bytes) > MAX_EMBEDDED_CARDS:
        raise ConfigError(f"{len(config.vram_bytes)} cards; at most {MAX_EMBEDDED_CARDS} can be emulated")
    for size in config.vram_bytes:
        if size < MIN_VRAM_BYTES:
            raise ConfigError(f"vram is {size} bytes, which is too little to lease: write it as 48GiB or 512MiB")


def _check_addresses(config: Config) -> None:
    if not config.listen:
        raise ConfigError("nothing to listen on")
    if len(set(config.listen)) < len(config.listen):
        raise ConfigError("an address stands twice in listen")
    if config.http in config.listen:
        raise ConfigError("http and listen have the same address")
    if config.tls is None and any(isinstance(address, TlsAddress) for address in config.listen):
        raise ConfigError("to listen on tls: addresses, the settings need a [tls] table: certificate, key, client_ca")
    if config.http is None and (config.http_hosts or config.http_token_file is not None):
        raise ConfigError("http_hosts and http_token_file need http, the address of the web page")


def _check_audit(config: Config) -> None:
    if config.audit is None and (config.audit_required or config.audit_head is not None):
        raise ConfigError("audit_required and audit_head need audit, the folder of the audit log")
    if config.audit is not None and config.audit == config.state:
        raise ConfigError("audit and state must be different folders: each is locked as a whole")
    if not MIN_AUDIT_FILE_BYTES <= config.audit_file_bytes <= MAX_AUDIT_FILE_BYTES:
        raise ConfigError(
            f"audit_file_size is {config.audit_file_bytes} bytes;"
            f" it must be between {MIN_AUDIT_FILE_BYTES} and {MAX_AUDIT_FILE_BYTES}"
        )
    if config.audit_keep_files < 0 or config.audit_keep_files == 1:
        raise ConfigError("audit_keep_files must be 0, for all, or at least 2")


def check_recycling(recycle: str, idle_s: int, leases: int, warm_contexts: int) -> None:
    """Check the settings of recycled contexts. Raises ValueError."""
    if recycle not in RECYCLE:
        raise ValueError(f"recycle is {recycle!r}; it must be {' or '.join(RECYCLE)}")
    if recycle != "off" and not warm_contexts:
        raise ValueError("recycle needs warm_contexts: only contexts that were made ahead serve again")
    if not 1 <= idle_s <= MAX_RECYCLE_IDLE_S:
        raise ValueError(f"recycle_idle_s is {idle_s}; it must be between 1 and {MAX_RECYCLE_IDLE_S}")
    if leases < 1:
        raise ValueError(f"recycle_leases is {leases}; it must be at least 1")


def check_tenants(
    rules: TenantRules, of_uid: Mapping[int, str], of_certificate: Mapping[str, str], tls: TlsSettings | None
) -> None:
    """Check that each tenant whom the settings name can come. Raises ValueError with a sentence about one who can't.

    An operator who writes limits for a name that nobody has believes that they hold, so the daemon does not start.
    """
    if of_certificate and tls is None:
        raise ValueError("tenant_of_certificate needs a [tls] table: without it no tenant presents a certificate")
    for name in rules.by_name:
        if name == OVER_TCP:
            continue
        if name.startswith(_LOCAL_PREFIX):
            named = of_uid.get(int(name.removeprefix(_LOCAL_PREFIX)))
            if named is not None:
                raise ValueError(
                    f"tenants: {name!r} matches no user, because [tenant_of_uid] calls that user {named!r}"
                )
        elif name not in of_uid.values() and not _has_certificate(name, of_certificate, tls):
            raise ValueError(
                f"tenants: {name!r} matches no tenant; give a user or a certificate this name, in [tenant_of_uid] or "
                "[tenant_of_certificate]"
            )
    for name in sorted(tls.operators if tls is not None else ()):
        if not _has_certificate(name, of_certificate, tls):
            raise ValueError(f"tls: operators has {name!r}, and no certificate of [tenant_of_certificate] is {name!r}")


def _has_certificate(name: str, of_certificate: Mapping[str, str], tls: TlsSettings | None) -> bool:
    # Without the table a certificate may name any tenant by itself.
    return tls is not None and (not of_certificate or name in of_certificate.values())


def _named_bounds(rules: TenantRules) -> Iterable[tuple[str, TenantLimits]]:
    """Return the bounds of each table under `[tenants]`, that of the default first."""
    return {DEFAULT: rules.default, **rules.by_name}.items()


def check_bounds(rules: TenantRules, limits: CoreLimits) -> None:
    """Check that `[limits]` leaves every tenant's bound within reach. Raises ValueError with a sentence about one."""
    for name, bounds in _named_bounds(rules):
        if bounds.max_ttl_s is not None and bounds.max_ttl_s > limits.max_ttl_s:
            raise ValueError(
                f"tenants: max_ttl_s of {name!r} is {bounds.max_ttl_s}, and that of [limits], for all tenants, is"
                f" {limits.max_ttl_s}"
            )


def check_fleet_quotas(rules: TenantRules, fleet: FleetSettings | None) -> None:
    """Check that a node with tenants who have a quota in the fleet is in one. Raises ValueError."""
    for name, bounds in _named_bounds(rules):
        if bounds.fleet_quota and fleet is None:
            raise ValueError(f"tenants: fleet_quota of {name!r} needs a [fleet] table: this node is in no fleet")


def check_devices(rules: TenantRules, cards: Iterable[Card]) -> None:
    """Check that this host has each card that a tenant may use. Raises ValueError with a sentence about one."""
    there = list(cards)
    for name, bounds in _named_bounds(rules):
        for selector in bounds.devices or ():
            if not any(card.answers_to(selector) for card in there):
                known = ", ".join(f"{card.index} ({card.uuid})" for card in there[:MAX_CARDS_NAMED])
                raise ValueError(f"tenants: devices of {name!r} has {selector!r}; the cards of this host are {known}")


def check_worker_user(name: str) -> None:
    """Check that the user exists and is not root. Raises ValueError."""
    try:
        user = pwd.getpwnam(name)
    except KeyError:
        raise ValueError(
            f"worker_user: there is no user {name!r}; create it, as systemd-sysusers creates that of "
            "install-service, or name another"
        ) from None
    if user.pw_uid == 0:
        raise ValueError(f"worker_user: {name!r} is root; name a user who may do nothing")


def changed_hands(
    of_uid: tuple[Mapping[int, str], Mapping[int, str]], of_certificate: tuple[Mapping[str, str], Mapping[str, str]]
) -> frozenset[str]:
    """Return the tenants' names that may belong to other people after a reload.

    Args:
        of_uid: `[tenant_of_uid]` before and after.
        of_certificate: `[tenant_of_certificate]` before and after. Without that table certificates name their tenants
            themselves, so any name could be one's; when it comes or goes, all names count as changed.
    """
    tables = (*of_uid, *of_certificate)
    if bool(of_certificate[0]) != bool(of_certificate[1]):
        return frozenset(name for table in tables for name in table.values())
    moved = (of_uid[0].items() ^ of_uid[1].items()) | (of_certificate[0].items() ^ of_certificate[1].items())
    return frozenset(name for _, name in moved)
