"""What the operator wants: command line over file over defaults, checked once, in sentences."""

import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace
from enum import Enum
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

from gpulease.daemon.agreement import check_bounds, check_tenants
from gpulease.daemon.capabilities.demands import Demand
from gpulease.daemon.core import CoreLimits, Recycling
from gpulease.daemon.drivers.cpu.architecture import Architecture, parse_architecture
from gpulease.daemon.logs.settings import FORMATS, LEVELS, LogStyle
from gpulease.daemon.recycling_settings import check_recycling, recycling_of
from gpulease.daemon.sandbox.measures import Measure
from gpulease.daemon.sandbox.settings import MODES, SandboxSettings
from gpulease.daemon.setting_values import (
    absolute_path,
    core_limits,
    file_mode,
    measure,
    member,
    tenants_of_users,
    texts,
    truth,
    user_name,
    whole,
)
from gpulease.daemon.tenant_settings import parse_rules
from gpulease.daemon.tls_settings import TlsSettings, parse_certificate_names, parse_tls
from gpulease.daemon.web.settings import HttpSettings, parse_http
from gpulease.protocol.address import DEFAULT_ADDRESS, Address, TcpAddress, TlsAddress, parse_address
from gpulease.protocol.origin import parse_host_names
from gpulease.protocol.sizes import parse_size

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
            itself; see `gpulease.daemon.relay.naming`.
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
