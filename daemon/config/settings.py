"""The daemon's settings, from the command line, else a file, else the defaults; and their checks as a whole.

`SettingsFile` declares every setting with its default, its bounds and its meaning; the classes of its tables declare
theirs. `systemd/gpuleased.toml` and the table in `daemon/manual/settings.md` are generated from these declarations.
"""

import pwd
import re
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import field, replace
from enum import Enum
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Any, Final

from gpulease.daemon.capabilities.claims import Demand
from gpulease.daemon.drivers.interface import ONE_BY_ONE
from gpulease.daemon.fleet.records.fleet_settings import FleetSettings
from gpulease.daemon.host.absolute_paths import path_setting
from gpulease.daemon.host.cannot_start import Misconfigured
from gpulease.daemon.host.memory_limit import MemoryLimit
from gpulease.daemon.host.regular_files import open_regular
from gpulease.daemon.leases.devices import Card, PlacementOrder
from gpulease.daemon.leases.model import Recycling
from gpulease.daemon.leases.quotas import CoreLimits, TenantLimits, TenantRules
from gpulease.daemon.log.writer import FORMATS, LEVELS, LogStyle
from gpulease.daemon.ptx.architecture import Architecture, parse_architecture
from gpulease.daemon.remote.tls_settings import (
    OVER_TCP,
    TlsSettings,
    check_tenant,
    fitting_connections,
    parse_certificate_names,
    parse_tls,
)
from gpulease.daemon.sandbox.measures import ALWAYS_ON, SANDBOX_MODES, Measure, SandboxSettings
from gpulease.daemon.web.http_settings import HttpSettings, parse_http
from gpulease.protocol.address import DEFAULT_ADDRESS, Address, TcpAddress, TlsAddress, parse_address
from gpulease.protocol.fast_dataclass import dataclass
from gpulease.protocol.http_origin import parse_host_names
from gpulease.protocol.settings_reader import (
    BadSetting,
    Setting,
    any_of,
    must_be,
    read_choice,
    read_size,
    read_text,
    read_texts,
    read_values,
)
from gpulease.protocol.sizes import size_text

DRIVERS: Final = ("auto", "cuda", "cpu")

MAX_SETTINGS_BYTES: Final = 1 << 20
"""Maximum size of the settings file in bytes, so that a wrong file can't fill the daemon's memory at a reload."""

RECYCLE: Final = ("off", "same-tenant")

MIN_AUDIT_FILE_BYTES: Final = 64 << 10
"""Smallest size of a file in bytes. A smaller one would hold only a few records, so the operator forgot the unit."""

MAX_AUDIT_FILE_BYTES: Final = 1 << 30
"""Largest size of a file in bytes. The daemon reads the whole last file when it starts."""

MIN_VRAM_BYTES: Final = 1 << 20
"""Smallest memory of a card. A smaller number lacks its unit: the daemon would start and then refuse every lease."""

MAX_EMBEDDED_CARDS: Final = 64
"""Maximum number of emulated cards. No host has more real cards, so a larger number is a typing mistake."""

MAX_WARM_CONTEXTS: Final = 64
"""Maximum number of contexts for one card. A larger number is a typing mistake, because each context is a process and
takes half a gigabyte of a real card."""

MAX_SHUFFLE_SEED: Final = (1 << 31) - 1
"""Largest seed. Generated code counts up from it in 32 bits, so a larger one would repeat a smaller seed's order."""

MAX_RECYCLE_IDLE_S: Final = 3600
"""Longest time for which a context is kept for its tenant. A longer time has the wrong unit."""

MAX_UID: Final = 2**32 - 2
"""The largest user ID (credentials(7)); 2**32 - 1 means "none"."""

MAX_CARDS_NAMED: Final = 8
"""Maximum number of cards that one error message names."""


DEFAULT: Final = "default"
"""Name of the `[tenants]` table for tenants without a table. The other tables inherit the settings that they omit."""

_LOCAL_PREFIX: Final = "uid:"
_LOCAL_TENANT: Final = re.compile(r"uid:(?:0|[1-9]\d{0,9})", re.ASCII)
"""A local user whom `[tenant_of_uid]` does not name."""

_UID: Final = re.compile(r"0|[1-9]\d{0,9}", re.ASCII)
_OCTAL: Final = re.compile("(?:0o?)?[0-7]{3}", re.ASCII)
_FILE_MODE: Final = 'a file mode such as "0660" or 0o660'


class OnStop(Enum):
    """What happens to sessions when the daemon is stopped (SIGTERM): they end, or the next daemon takes them over."""

    END = "end"
    KEEP = "keep"


class ConfigError(Misconfigured):
    """A setting that can't be used; the message names it and the reason."""


# --- readers of values in the file ---


def _read_addresses(value: Any) -> tuple[Address, ...]:
    return tuple(parse_address(text) for text in read_texts(value))


def _read_architecture(value: Any) -> Architecture:
    return parse_architecture(read_text(value))


def _read_cards(value: Any) -> tuple[int, ...]:
    """Return the sizes of cards in bytes. Raises BadSetting if a card is too small to lease or there are too many."""
    sizes = tuple(read_size(text) for text in read_texts(value))
    if len(sizes) > MAX_EMBEDDED_CARDS:
        raise BadSetting(f"{{}} must be at most {MAX_EMBEDDED_CARDS} cards, not {len(sizes)}")
    for size in sizes:
        if size < MIN_VRAM_BYTES:
            raise must_be("enough to lease, such as 48GiB or 512MiB", size, "did you forget the unit?")
    return sizes


def _read_file_mode(value: Any) -> int:
    """Return permission bits, given as octal text or as a number."""
    # TOML has octal numbers (0o660); as text, "660" means octal too, as in chmod(1).
    mode = int(value, 8) if isinstance(value, str) and _OCTAL.fullmatch(value) else value
    if type(mode) is not int or not 0 <= mode <= 0o777:
        raise must_be(_FILE_MODE, value)
    return mode


def _read_demands(value: Any) -> frozenset[Demand]:
    return frozenset(read_choice(Demand, text) for text in read_texts(value))


def _read_measures(value: Any) -> frozenset[Measure]:
    """Return the sandbox measures that the host may lack."""
    return frozenset(read_choice(Measure, text, without=ALWAYS_ON) for text in read_texts(value))


def _read_user(value: Any) -> str:
    """Return a local user's name. `check_worker_user` checks that the user exists."""
    if not isinstance(value, str) or not value:
        raise must_be("the name of a user", value)
    return value


def _read_host_names(value: Any) -> frozenset[str]:
    return parse_host_names(read_texts(value))


def _read_tenants_of_users(table: Any) -> Mapping[int, str]:
    """Return tenants by user ID."""
    if not isinstance(table, dict):
        raise must_be("a table", table)
    # Keys of a TOML table are strings, so user IDs are checked and converted here.
    for uid, tenant in table.items():
        if _UID.fullmatch(uid) is None or int(uid) > MAX_UID:
            raise ValueError(f"{uid!r} is not a user's number")
        check_tenant(tenant)
    return MappingProxyType({int(uid): tenant for uid, tenant in table.items()})


def parse_rules(tables: Any) -> TenantRules:
    """Return the rules of a `[tenants]` table of tables. Raises BadSetting."""
    if not isinstance(tables, dict) or not all(isinstance(table, dict) for table in tables.values()):
        raise must_be('a table of tables, such as [tenants.default] and [tenants."uid:1000"]', tables)
    for name in tables:
        # Limits for a name that no tenant can have would never apply.
        if name not in (DEFAULT, OVER_TCP) and _LOCAL_TENANT.fullmatch(name) is None:
            check_tenant(name)

    def limits_of(name: str, of_all: TenantLimits) -> TenantLimits:
        try:
            return of_all.with_settings(read_values(TenantLimits, tables[name]))
        except BadSetting as error:
            raise error.within(name) from None

    # Read the default first, because each other table inherits the settings that it leaves out.
    default = limits_of(DEFAULT, TenantLimits()) if DEFAULT in tables else TenantLimits()
    by_name = {name: limits_of(name, default) for name in tables if name != DEFAULT}
    return TenantRules(default, MappingProxyType(by_name))


# --- the settings ---


@dataclass(frozen=True, slots=True)
class Config:
    """The daemon's settings. `[tenants]` is a part of `limits`."""

    # --- where tenants connect, and on which cards they compute ---
    listen: Annotated[
        tuple[Address, ...],
        Setting(
            "The addresses at which tenants connect: local tenants through a Unix socket, remote ones through TLS"
            " (see [tls]). Under systemd these must be the addresses of gpuleased.socket and gpulease-tls.socket,"
            " if those units are enabled.",
            what="an address, or a list of addresses",
            read=_read_addresses,
        ),
    ] = field(default_factory=lambda: (parse_address(DEFAULT_ADDRESS),))
    driver: Annotated[
        str,
        Setting(
            'The driver. "auto" is cuda if an NVIDIA driver is present when the daemon starts; on a GPU host set'
            ' "cuda", because a driver that is loaded late may not be present yet. "cpu" emulates cards.',
            choices=DRIVERS,
        ),
    ] = "auto"
    arch: Annotated[
        Architecture | None,
        Setting(
            'With driver = "cpu", the architecture of the emulated cards, which refuse images for newer '
            "architectures, as a real card does. Without it, sm_90.",
            what="an architecture",
            read=_read_architecture,
            example='"sm_90"',
        ),
    ] = None
    shuffle_warps: Annotated[
        int | None,
        Setting(
            'With driver = "cpu", a seed for running warps and blocks in another order, to expose races. '
            "The same seed gives the same order.",
            least=0,
            most=MAX_SHUFFLE_SEED,
            example="1",
            added_later=True,
        ),
    ] = None
    launch_chains: Annotated[
        bool,
        Setting(
            "Whether up to 16 consecutive waiting launches are queued by one call of the CUDA driver. "
            "With false, each launch is a separate call.",
            added_later=True,
        ),
    ] = True
    vram_bytes: Annotated[
        tuple[int, ...],
        Setting(
            "The most memory of each card that may be leased. With the cpu driver, a list gives the "
            "sizes of the emulated cards.",
            key="vram",
            what="a size, or a list of sizes",
            read=_read_cards,
            example='["48GiB"]',
        ),
    ] = ()
    socket_mode: Annotated[
        int,
        Setting(
            "The mode of Unix sockets: everyone who may write to the socket may request leases. For a socket made"
            " by systemd, gpuleased.socket sets the mode.",
            what=_FILE_MODE,
            read=_read_file_mode,
            example='"0660"',
        ),
    ] = 0o660
    # --- pre-created contexts, and the choice of a card ---
    warm_contexts: Annotated[
        int,
        Setting(
            "Contexts kept ready on each card, so that a lease begins in milliseconds. Each holds half a gigabyte"
            " until a lease needs that memory.",
            least=0,
            most=MAX_WARM_CONTEXTS,
        ),
    ] = 0
    recycle: Annotated[
        str,
        Setting(
            '"same-tenant": after a lease, its context is scrubbed and also serves the same tenant\'s next lease.',
            choices=RECYCLE,
        ),
    ] = "off"
    recycle_idle_s: Annotated[
        int,
        Setting(
            'With recycle = "same-tenant", seconds that a context waits for its tenant\'s next lease.',
            least=1,
            most=MAX_RECYCLE_IDLE_S,
        ),
    ] = 10
    recycle_leases: Annotated[
        int, Setting('With recycle = "same-tenant", the maximum number of leases that a context serves.', least=1)
    ] = 1000
    placement: Annotated[
        PlacementOrder,
        Setting(
            'The card that a lease gets if its tenant names none: with "spread" the emptiest; with "pack" the'
            " fullest that has room, so that other cards have room for large leases. In a fleet, use the same value"
            " as the --placement of its directories.",
            added_later=True,
        ),
    ] = PlacementOrder.SPREAD
    # --- bounds of control connections; tenants' own bounds are in [tenants] ---
    max_connections: Annotated[
        int,
        Setting(
            "Maximum number of control connections at a time: each costs memory and a descriptor.",
            least=1,
            is_reloaded=True,
        ),
    ] = 1024
    max_connections_per_tenant: Annotated[
        int,
        Setting(
            "Maximum number of control connections of one tenant at a time, operators excepted.",
            least=1,
            is_reloaded=True,
        ),
    ] = 512
    # --- what outlives the daemon ---
    state: Annotated[
        Path | None,
        path_setting(
            "The folder in which the daemon keeps leases, fences and keys, so that sessions survive a restart of"
            " the daemon.",
            "/var/lib/gpulease",
        ),
    ] = None
    on_stop: Annotated[
        OnStop,
        Setting(
            'The effect of a stop (SIGTERM, `systemctl stop` and `restart`): "keep" leaves sessions to the next daemon,'
            ' "end" ends them.'
        ),
    ] = OnStop.END
    # --- the audit log ---
    audit: Annotated[
        Path | None,
        path_setting("The folder of the audit log; without it the daemon keeps no audit log.", "/var/log/gpulease"),
    ] = None
    audit_head: Annotated[
        Path | None,
        path_setting(
            "A second file for the audit log's head. Users who can change the log should not be able to change this"
            " file.",
            "/mnt/apart/head.json",
        ),
    ] = None
    audit_required: Annotated[
        bool,
        Setting(
            "Whether leases are granted only once their audit records are on disk. With false, missing "
            "records are only counted."
        ),
    ] = False
    audit_file_bytes: Annotated[
        int,
        Setting(
            "The size at which the audit log continues in another file.",
            key="audit_file_size",
            what="a size",
            read=lambda value: read_size(str(value)),
            least=MIN_AUDIT_FILE_BYTES,
            most=MAX_AUDIT_FILE_BYTES,
            unit="bytes",
            example='"64MiB"',
        ),
    ] = 64 << 20
    audit_keep_files: Annotated[
        int, Setting("How many files of the audit log are kept; 0: all.", least=2, or_zero=True)
    ] = 0
    # --- who is who, and who needs a token ---
    require_token: Annotated[
        frozenset[Demand],
        Setting(
            'The requests for which tenants need a token: for "alloc" (acquiring a lease) and "renew", a '
            'token of the operator; for "attach" (opening a session), one of any tenant.',
            what=f"a list of {any_of(demand.value for demand in Demand)}",
            read=_read_demands,
        ),
    ] = frozenset()
    token_key_file: Annotated[
        Path | None,
        path_setting(
            "The file with the keys that sign tokens, by default in the folder `state`. Without `state` "
            "the keys are only in memory, so a restart of the daemon invalidates every token.",
            "/etc/gpulease/token.key",
        ),
    ] = None
    tenant_of_uid: Annotated[
        Mapping[int, str],
        Setting(
            "Tenants' names for local users, by the user's number; a user without one is the tenant \"uid:N\".",
            what="a table of tenants by users' numbers",
            read=_read_tenants_of_users,
            example='1000 = "ann"',
            is_reloaded=True,
        ),
    ] = field(default_factory=lambda: MappingProxyType({}))
    # --- the workers' sandbox ---
    sandbox: Annotated[
        str,
        Setting(
            'The workers\' sandbox: "available" uses every measure that this host supports; with "required" the'
            " daemon does not start unless the host supports all of them.",
            choices=SANDBOX_MODES,
        ),
    ] = "available"
    worker_user: Annotated[
        str | None,
        Setting(
            "The user that workers run as, which should own no files and have no rights. By default it is `nobody`"
            " if the daemon is root, else the daemon's own user. The service's sysusers.d file creates the user"
            " gpulease-worker.",
            what="the name of a user",
            read=_read_user,
            example='"gpulease-worker"',
        ),
    ] = None
    sandbox_without: Annotated[
        frozenset[Measure],
        Setting(
            "Measures of the sandbox to leave out, by their names in `gpulease info --sandbox`.",
            what="a list of measures of the sandbox",
            read=_read_measures,
        ),
    ] = frozenset()
    # --- the log ---
    log_format: Annotated[
        str,
        Setting(
            'The log\'s format: "auto" is "human" on a terminal and "json" elsewhere, with priorities for the journal.',
            choices=FORMATS,
        ),
    ] = "auto"
    log_level: Annotated[str, Setting("The lowest level that is logged.", choices=LEVELS)] = "info"
    max_load_s: Annotated[
        int,
        Setting(
            "Maximum number of seconds that a module may take to compile. If it takes longer, its lease "
            "ends, because a compiler can't be interrupted.",
            least=1,
        ),
    ] = 120
    # --- tenants and operators from elsewhere: TLS, the web page, a fleet ---
    tls: Annotated[
        TlsSettings | None,
        Setting(
            "Remote tenants: this node's certificate and key, the CA of their certificates, and its revocation list.",
            read=parse_tls,
        ),
    ] = None
    tenant_of_certificate: Annotated[
        Mapping[str, str],
        Setting(
            "Tenants' names by the names in their certificates. With this table, only names listed in it are"
            " accepted; without it, each certificate names its tenant itself.",
            what="a table of tenants by certificates' names",
            read=parse_certificate_names,
            example='"DNS:build.example" = "build"',
            is_reloaded=True,
        ),
    ] = field(default_factory=lambda: MappingProxyType({}))
    http: Annotated[
        TcpAddress | None,
        Setting(
            "The address of the web page, health checks and metrics, only on loopback; under systemd the address of"
            " gpulease-http.socket.",
            what="an address on loopback",
            read=parse_http,
            example='"127.0.0.1:9400"',
        ),
    ] = None
    http_hosts: Annotated[
        frozenset[str],
        Setting(
            "Additional host names that requests to the web page may have, such as a proxy's.",
            what="a host name, or a list of them",
            read=_read_host_names,
            example='["gpu1.example"]',
        ),
    ] = frozenset()
    http_token_file: Annotated[
        Path | None,
        path_setting(
            "The file with the token that lets operators see tenants' names on the web page and revoke leases;"
            " without this file neither is possible. A reload rereads the file.",
            "/etc/gpulease/http.token",
            is_reloaded=True,
        ),
    ] = None
    fleet: Annotated[
        FleetSettings | None,
        Setting(
            "The fleet that this node belongs to: one etcd for all of its nodes. If this node can't reach etcd for"
            " horizon_s, its named leases end; `isolated` determines whether other leases are still granted meanwhile.",
            added_later=True,
        ),
    ] = None
    # --- the node's bounds ---
    limits: Annotated[CoreLimits, Setting("Limits for all tenants.")] = field(default_factory=CoreLimits)

    def driver_of_workers(self, driver: str) -> str:
        """Return the driver's name in the form that `gpulease.daemon.zygote.driver_registry` parses for workers."""
        if driver == "cuda" and not self.launch_chains:
            return f"{driver}:{ONE_BY_ONE}"
        # The zygote gets one word on its command line, so the driver's own settings are appended to its name.
        if driver != "cpu" or (self.arch is None and self.shuffle_warps is None):
            return driver
        seed = "" if self.shuffle_warps is None else f":{self.shuffle_warps}"
        return f"{driver}:{self.arch or ''}{seed}"

    @property
    def of_http(self) -> HttpSettings | None:
        return None if self.http is None else HttpSettings(self.http, self.http_hosts, self.http_token_file)

    @property
    def of_log(self) -> LogStyle:
        return LogStyle(self.log_format, self.log_level)

    @property
    def of_sandbox(self) -> SandboxSettings:
        return SandboxSettings(self.sandbox == "required", self.worker_user, self.sandbox_without)

    @property
    def recycling(self) -> Recycling | None:
        """The bounds within which contexts serve their tenant again; None if they never do."""
        if self.recycle == "off":
            return None
        return Recycling(idle_s=self.recycle_idle_s, max_leases=self.recycle_leases)


@dataclass(frozen=True, slots=True)
class SettingsFile(Config):
    """The settings of a file: all of `Config`, and the `[tenants]` table, which becomes a part of `limits`."""

    tenants: Annotated[
        TenantRules,
        Setting(
            "Tenants' limits, in addition to the node's own. \"default\" applies to all tenants without a table, and to"
            " settings that a tenant's table leaves out.",
            what="a table of tables",
            read=parse_rules,
            is_reloaded=True,
        ),
    ] = field(default_factory=TenantRules)


def load_config(path: Path | None, overrides: dict[str, Any]) -> Config:
    """Return the settings of a file, if any, overridden by the command line. Raises ConfigError.

    Args:
        path: A TOML file.
        overrides: Settings of the command line, by their names in the file; None and [] override nothing.
    """
    # Step 1: read the file; the command line overrides it. --fleet sets only etcd's addresses, not the rest of [fleet].
    settings: dict[str, Any] = {} if path is None else _read_file(path)
    settings |= {key: value for key, value in overrides.items() if value not in (None, []) and key != "fleet"}
    if (etcd := overrides.get("fleet")) is not None:
        fleet = settings.get("fleet", {})
        settings["fleet"] = {**fleet, "etcd": etcd} if isinstance(fleet, dict) else fleet
    if "tenants" in settings:
        # Check `tenants` last, so that faults of the node's own settings are reported first.
        settings["tenants"] = settings.pop("tenants")
    try:
        # Step 2: read each setting by itself. The first that is wrong is reported.
        values = read_values(SettingsFile, settings)
    except BadSetting as error:
        raise ConfigError(str(error)) from None
    # Step 3: combine them. `[tenants]` becomes a part of the limits, although it is a separate table in the file.
    tenants = values.pop("tenants", None)
    config = replace(Config(), **values)
    if tenants is not None:
        config = replace(config, limits=replace(config.limits, tenants=tenants))
    # A default must not contradict a smaller max_connections that the operator set.
    if "max_connections_per_tenant" not in values:
        config = fitting_connections(config)
    # Step 4: check that settings do not contradict each other.
    _check(config)
    return config


def _read_file(path: Path) -> dict[str, Any]:
    try:
        with open_regular(path) as file:
            # Read one byte more than allowed, to notice a file that is too large.
            data = file.read(MAX_SETTINGS_BYTES + 1)
        if len(data) > MAX_SETTINGS_BYTES:
            raise ConfigError(f"{path}: a settings file must have at most {MAX_SETTINGS_BYTES} bytes")
        return tomllib.loads(data.decode())
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}") from None
    except RecursionError:
        raise ConfigError(f"{path}: it is nested too deeply") from None
    except ValueError as error:
        # The file is not valid TOML, or not UTF-8.
        raise ConfigError(f"{path} is not TOML: {error}") from None


# --- checks of settings against each other ---


def _check(config: Config) -> None:
    """Raise ConfigError for settings that contradict each other."""
    _check_driver(config)
    _check_addresses(config)
    # Check the node's addresses first and its tenants last; the first contradiction is reported.
    if config.max_connections_per_tenant > config.max_connections:
        raise ConfigError("max_connections_per_tenant must be at most max_connections")
    # Without a state folder, the next daemon would find neither leases nor keys.
    if config.on_stop is OnStop.KEEP and config.state is None:
        raise ConfigError('on_stop = "keep" needs state, the folder for what must survive a restart')
    _check_audit(config)
    tenants = config.limits.tenants
    try:
        check_tenants(tenants, config.tenant_of_uid, config.tenant_of_certificate, config.tls)
        check_bounds(tenants, config.limits)
        check_fleet_quotas(tenants, config.fleet)
    except ValueError as error:
        raise ConfigError(str(error)) from None
    if config.recycle != "off" and not config.warm_contexts:
        raise ConfigError("recycle needs warm_contexts: only pre-created contexts are reused")


def _check_driver(config: Config) -> None:
    if config.arch is not None and config.driver == "cuda":
        raise ConfigError("arch is only for the embedded driver: a card's architecture can't be chosen")
    if config.shuffle_warps is not None and config.driver == "cuda":
        raise ConfigError("shuffle_warps is only for the embedded driver: a card's order of warps can't be chosen")
    if not config.launch_chains and config.driver == "cpu":
        raise ConfigError("launch_chains is for cards; the embedded driver has no chains")


def _check_addresses(config: Config) -> None:
    if not config.listen:
        raise ConfigError("listen must name at least one address")
    # The kernel would refuse the second socket, with a sentence that does not name the setting.
    if len(set(config.listen)) < len(config.listen):
        raise ConfigError("listen has the same address twice")
    if config.http in config.listen:
        raise ConfigError("http and listen have the same address")
    if config.tls is None and any(isinstance(address, TlsAddress) for address in config.listen):
        raise ConfigError("tls: addresses in listen need a [tls] table with certificate, key and client_ca")
    # These settings have no effect without `http`, and the operator would not notice.
    if config.http is None and (config.http_hosts or config.http_token_file is not None):
        raise ConfigError("http_hosts and http_token_file need http, the address of the web page")


def _check_audit(config: Config) -> None:
    if config.audit is None and (config.audit_required or config.audit_head is not None):
        raise ConfigError("audit_required and audit_head need audit, the folder of the audit log")
    if config.audit is not None and config.audit == config.state:
        raise ConfigError("audit and state must be different folders: each is locked as a whole")


def check_tenants(
    rules: TenantRules, of_uid: Mapping[int, str], of_certificate: Mapping[str, str], tls: TlsSettings | None
) -> None:
    """Check that each tenant that the settings name can exist. Raises ValueError, which names the first that can't.

    Limits for a name that no tenant has would never apply, and the operator would not notice. So the daemon does not
    start.
    """
    if of_certificate and tls is None:
        raise ValueError("tenant_of_certificate needs a [tls] table: without it no tenant presents a certificate")
    # There are three kinds of names: all tenants over TCP, a local user by ID, and a name that the settings give to a
    # user or a certificate.
    for name in rules.by_name:
        if name == OVER_TCP:
            continue
        if name.startswith(_LOCAL_PREFIX):
            # [tenant_of_uid] renames the user, so no tenant has the ID as its name any more.
            named = of_uid.get(int(name.removeprefix(_LOCAL_PREFIX)))
            if named is not None:
                raise ValueError(
                    f"tenants: {name!r} matches no user, because [tenant_of_uid] gives that user the name {named!r}"
                )
        elif name not in of_uid.values() and not _has_certificate(name, of_certificate, tls):
            raise ValueError(
                f"tenants: {name!r} matches no tenant; give a user or a certificate this name, in [tenant_of_uid] or "
                "[tenant_of_certificate]"
            )
    # An operator whose name is on no certificate would be locked out without notice.
    for name in sorted(tls.operators if tls is not None else ()):
        if not _has_certificate(name, of_certificate, tls):
            raise ValueError(
                f"tls: operators contains {name!r}, but no certificate in [tenant_of_certificate] has that name"
            )


def _has_certificate(name: str, of_certificate: Mapping[str, str], tls: TlsSettings | None) -> bool:
    # Without the table a certificate may name any tenant by itself.
    return tls is not None and (not of_certificate or name in of_certificate.values())


def _named_bounds(rules: TenantRules) -> Iterable[tuple[str, TenantLimits]]:
    """Return the name and bounds of each table under `[tenants]`, the default first."""
    return {DEFAULT: rules.default, **rules.by_name}.items()


def check_bounds(rules: TenantRules, limits: CoreLimits) -> None:
    """Check that `[limits]` allows every tenant to reach its bounds. Raises ValueError for the first it can't."""
    for name, bounds in _named_bounds(rules):
        if bounds.max_ttl_s is not None and bounds.max_ttl_s > limits.max_ttl_s:
            raise ValueError(
                f"tenants: max_ttl_s of {name!r} must be at most {limits.max_ttl_s}, the value in "
                f"[limits], not {bounds.max_ttl_s}"
            )


def check_fleet_quotas(rules: TenantRules, fleet: FleetSettings | None) -> None:
    """Check that a node is in a fleet if any of its tenants has a quota in the fleet. Raises ValueError."""
    for name, bounds in _named_bounds(rules):
        if bounds.fleet_quota and fleet is None:
            raise ValueError(
                f"tenants: fleet_quota of {name!r} needs a [fleet] table: this node does not belong to a fleet"
            )


def missing_devices(rules: TenantRules, cards: Iterable[Card]) -> list[str]:
    """Return a sentence for each tenant's card that this host does not have now.

    The settings may be right: a card can be missing because it failed, and be back after the next boot.
    """
    card_list = list(cards)
    listed = ", ".join(f"{card.index} ({card.uuid})" for card in card_list[:MAX_CARDS_NAMED])
    return [
        f"tenants: devices of {name!r} contains {selector!r}; the cards of this host are {listed}"
        for name, bounds in _named_bounds(rules)
        for selector in bounds.devices or ()
        if not any(card.answers_to(selector) for card in card_list)
    ]


def check_worker_user(name: str) -> None:
    """Check that the user exists and is not root. Raises ValueError."""
    try:
        # The user is looked up on this host, so check it when the daemon starts, not when the file is read.
        user = pwd.getpwnam(name)
    except KeyError:
        raise ValueError(
            f"worker_user: the user {name!r} does not exist; create it (install-service installs a "
            "sysusers.d file that does), or name another user"
        ) from None
    if user.pw_uid == 0:
        raise ValueError(f"worker_user: {name!r} is root; name a user without rights")


def check_park_memory(limits: CoreLimits, most: MemoryLimit | None) -> None:
    """Check that the daemon's control groups allow the bytes that sessions may park. Raises ValueError.

    Args:
        limits: The settings.
        most: The lowest limit of those groups, which only an operator changes; None if there is no limit.
    """
    if most is not None and limits.park_memory_bytes > most.size_bytes:
        raise ValueError(
            f"limits.park_memory must be at most {size_text(most.size_bytes)}, {most.source}, not "
            f"{size_text(limits.park_memory_bytes)}; leave some memory for the host's programs"
        )


def park_memory_problem(limits: CoreLimits, host: MemoryLimit) -> str:
    """Return a sentence if sessions may park more bytes than the host has now, else "".

    The settings may be right: the memory of a virtual machine may grow as it is used.
    """
    if limits.park_memory_bytes <= host.size_bytes:
        return ""
    return (
        f"limits.park_memory is {size_text(limits.park_memory_bytes)}, but {host.source} is only "
        f"{size_text(host.size_bytes)}"
    )


def changed_hands(
    of_uid: tuple[Mapping[int, str], Mapping[int, str]], of_certificate: tuple[Mapping[str, str], Mapping[str, str]]
) -> frozenset[str]:
    """Return the tenants' names that may belong to other people after a reload.

    Args:
        of_uid: `[tenant_of_uid]` before and after.
        of_certificate: `[tenant_of_certificate]` before and after. Without that table, certificates name their tenants
            themselves, so anyone may have any name. If the table is added or removed, all names count as changed.
    """
    tables = (*of_uid, *of_certificate)
    if bool(of_certificate[0]) != bool(of_certificate[1]):
        return frozenset(name for table in tables for name in table.values())
    # Take the pairs that are in only one of the two tables: names that were assigned, withdrawn, or assigned to another
    # person.
    moved = (of_uid[0].items() ^ of_uid[1].items()) | (of_certificate[0].items() ^ of_certificate[1].items())
    return frozenset(name for _, name in moved)
