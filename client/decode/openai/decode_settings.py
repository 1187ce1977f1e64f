"""The settings of a decode server, from a TOML file. `ServerTable` and its tables declare each setting."""

import os
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Final

from gpulease.client.decode.decode_requests import (
    DEFAULT_MAX_WAITING,
    DEFAULT_WEIGHT,
    MAX_BLOCKS_PER_TENANT,
    MAX_POSITIONS,
    MAX_WAIT_S,
    TenantConfig,
)
from gpulease.client.decode.openai.api_keys import MAX_KEY_BYTES, ApiKeys, distinct_keys, key_digest
from gpulease.client.decode.openai.served_models import DEFAULT_LOAD_WAIT_S
from gpulease.client.decode.row_records import PAGE
from gpulease.client.decode.scheduler.model_residency import ResidencyLimits
from gpulease.client.decode.supervisor.decoder import DecoderSettings
from gpulease.client.decode.supervisor.model_pool import STREAM_WAIT_S, ModelSpec
from gpulease.client.decode.text.named_prefixes import NamedPrefix
from gpulease.client.errors import InvalidRequest
from gpulease.client.http.settings_file import MAX_MODELS, open_regular, read_file, settings_of
from gpulease.protocol.settings_reader import BadSetting, Setting, must_be, read_size

MAX_TENANTS: Final = 256
"""Maximum number of tenants. Each has a region on the card and its own series in the metrics."""

MAX_PREFIXES: Final = 64
"""Maximum number of shared prefixes. Each has a region on the card, and is computed at every load."""

MAX_ALIASES: Final = 16
"""Maximum number of further names of a model. `/v1/models` has an entry for each of them."""

MAX_ORIGINS: Final = 64
"""Maximum number of origins of web pages. The server compares each request's origin with all of them."""

MAX_MODEL_QUEUE: Final = 4096
"""Upper bound of `max_waiting` in the table `[pool]`. Each waiting request has its body, up to 4 MiB, in memory."""

DEFAULT_LISTEN: Final = "tcp:127.0.0.1:8082"
DEFAULT_WAIT_S: Final = 30.0
"""Default for the maximum seconds that a request waits for its admission. Clients give up or retry after a few minutes.
"""

DEFAULT_CHAT_TOKENS: Final = 256
"""Default for the maximum number of tokens of a chat's answer. It is much less than the context length, because blocks
are reserved for this many tokens."""

MAX_HTTP_PROCESSES: Final = 64
"""Maximum number of processes that serve HTTP. Each loads its own copy of the tokenizer, about 100 MB."""

MIN_CORES_FOR_FRONTS: Final = 4
DEFAULT_MOST_FRONTS: Final = 8

EXAMPLE: Final = Path(__file__).with_name("example") / "decode.toml"

_DIGEST: Final = re.compile(r"[0-9a-f]{64}")
_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}")
_ALIAS: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.:/@+-]{0,127}")
_ALIASES_TEXT: Final = "a list of at most 16 names, each of 1 to 128 letters, digits and ._:/@+-"
_ORIGIN: Final = re.compile(r"https?://[A-Za-z0-9.-]{1,253}(?::[0-9]{1,5})?")
_ORIGINS_TEXT: Final = f"a list of at most {MAX_ORIGINS} origins, each http(s)://HOST[:PORT] or *"
_NAMES_TEXT: Final = "a list of the names of models"
_TOKENS_TEXT: Final = "a list of tokens"
_NAME_TEXT: Final = "1 to 64 letters, digits and .-_"


def _read_name(value: Any) -> str:
    if not isinstance(value, str) or not _NAME.fullmatch(value):
        raise must_be(_NAME_TEXT, value)
    return value


def _read_origins(value: Any) -> tuple[str, ...]:
    if not isinstance(value, list | tuple) or len(value) > MAX_ORIGINS:
        raise must_be(_ORIGINS_TEXT, value)
    if not all(isinstance(origin, str) and (origin == "*" or _ORIGIN.fullmatch(origin)) for origin in value):
        raise must_be(_ORIGINS_TEXT, value)
    return tuple(value)


def _read_digest(value: Any) -> bytes:
    if not isinstance(value, str) or not _DIGEST.fullmatch(value):
        raise ValueError
    return bytes.fromhex(value)


def _read_tables(value: Any, *, kind: str, max_entries: int) -> Mapping[str, Any]:
    """Return the tables `[kind.NAME]` by name. Raises BadSetting if there are none or more than `max_entries`."""
    if not isinstance(value, dict) or not 0 < len(value) <= max_entries:
        raise BadSetting(f"{{}} must be 1 to {max_entries} tables [{kind}.NAME]")
    return value


def _read_names(value: Any) -> tuple[str, ...]:
    if not isinstance(value, list | tuple) or not all(isinstance(name, str) for name in value):
        raise must_be(_NAMES_TEXT, value)
    return tuple(value)


def _read_aliases(value: Any) -> tuple[str, ...]:
    if not isinstance(value, list | tuple) or len(value) > MAX_ALIASES:
        raise must_be(_ALIASES_TEXT, value)
    if not all(isinstance(name, str) and _ALIAS.fullmatch(name) for name in value):
        raise must_be(_ALIASES_TEXT, value)
    return tuple(value)


def _read_tokens(value: Any) -> tuple[int, ...]:
    if not isinstance(value, list | tuple) or not all(type(token) is int for token in value):
        raise must_be(_TOKENS_TEXT, value)
    return tuple(value)


def _read_engine(value: Any) -> Mapping[str, Any]:
    """Return the table of a model's own engine settings, which `_models` checks together with `[engine]`."""
    if not isinstance(value, dict):
        raise must_be("a table", value)
    return value


@dataclass(frozen=True, slots=True, kw_only=True)
class KeyTable:
    """The table `[operator]`, and the settings of a tenant's key."""

    key_sha256: Annotated[
        bytes | None,
        Setting(
            "The key's sha256. `openssl rand -hex 32` makes a key.",
            what="64 hexadecimal digits, as `printf %s KEY | sha256sum` prints them",
            read=_read_digest,
            instead=("key_file",),
            # The value is secret, because an operator may have written the key itself here by mistake.
            is_secret=True,
        ),
    ] = None
    key_file: Annotated[
        str | None,
        Setting(
            "A file with the key itself, which only its owner may read.",
            instead=("key_sha256",),
            example='"bob.key"',
        ),
    ] = None

    def __post_init__(self) -> None:
        # Exactly one of the two must be set.
        if (self.key_sha256 is None) is (self.key_file is None):
            raise ValueError("set either key_sha256 or key_file")


@dataclass(frozen=True, slots=True, kw_only=True)
class TenantTable(KeyTable):
    """The table `[tenants.NAME]` of one tenant."""

    max_concurrent: Annotated[
        int,
        Setting(
            "Maximum number of this tenant's sequences that are in progress at the same time.", least=1, example="8"
        ),
    ]
    max_blocks: Annotated[
        int | None,
        Setting(
            f"The size of the tenant's region: it has room for the keys and values of this many blocks of {PAGE}"
            " positions.",
            least=1,
            most=MAX_BLOCKS_PER_TENANT,
            instead=("context_tokens",),
            example="64",
        ),
    ] = None
    context_tokens: Annotated[
        int | None,
        Setting(
            "The size of the tenant's region in positions: the most that all of its sequences may have together.",
            least=1,
            most=MAX_BLOCKS_PER_TENANT * PAGE,
            instead=("max_blocks",),
            example="1024",
        ),
    ] = None
    weight: Annotated[float, Setting("The tenant's share among tenants with waiting requests.", over=0)] = (
        DEFAULT_WEIGHT
    )
    max_waiting: Annotated[
        int, Setting("Maximum number of this tenant's requests that may wait; further ones get 429.", least=0)
    ] = DEFAULT_MAX_WAITING
    models: Annotated[
        tuple[str, ...] | None,
        Setting(
            "The models of [models.NAME] that the tenant may use; the tenant can't see others. Without it, all.",
            what=_NAMES_TEXT,
            read=_read_names,
            example='["small"]',
        ),
    ] = None

    def __post_init__(self) -> None:
        KeyTable.__post_init__(self)
        if (self.max_blocks is None) is (self.context_tokens is None):
            raise ValueError("set either max_blocks or context_tokens")

    @property
    def blocks(self) -> int:
        """The number of blocks of the tenant's region, from `max_blocks` or `context_tokens`."""
        return self.max_blocks or -(-(self.context_tokens or 0) // PAGE)


@dataclass(frozen=True, slots=True)
class EngineTable(DecoderSettings):
    """The table `[engine]`: the decoder's limits, and the server's limits for requests."""

    wait_s: Annotated[
        float,
        Setting(
            "Seconds that a request may wait to be admitted; then it gets 429 or 503.",
            key="wait_secs",
            least=0,
            most=MAX_WAIT_S,
        ),
    ] = DEFAULT_WAIT_S
    chat_tokens: Annotated[
        int,
        Setting(
            "Maximum number of tokens of a chat's answer if its request sets no limit; fewer if the prompt"
            " leaves less room.",
            least=1,
            most=MAX_POSITIONS,
        ),
    ] = DEFAULT_CHAT_TOKENS

    def decoder(self) -> DecoderSettings:
        """Return the settings that the decoder itself takes."""
        return DecoderSettings(**{item.name: getattr(self, item.name) for item in fields(DecoderSettings)})


@dataclass(frozen=True, slots=True, kw_only=True)
class PooledModelTable:
    """The table `[models.NAME]` of one of several models. Its `engine` overrides settings of `[engine]`."""

    model: Annotated[
        str,
        Setting(
            "A folder with config.json and safetensors, or a .gguf file; a relative path starts from this file's"
            " folder.",
            example='"../../tiny"',
        ),
    ]
    aliases: Annotated[
        tuple[str, ...],
        Setting(
            "Further names of the model in requests, which no other model may have.",
            what=_ALIASES_TEXT,
            read=_read_aliases,
            example='["org/model"]',
        ),
    ] = ()
    preload: Annotated[bool, Setting("Whether the model is loaded at the start, rather than by its first request.")] = (
        False
    )
    engine: Annotated[
        Mapping[str, Any],
        Setting(
            "Settings of [engine] that differ for this model.",
            what="a table",
            read=_read_engine,
            example="{ max_sequences = 8 }",
        ),
    ] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefixTable:
    """The table `[prefixes.NAME]` of one prefix that all tenants share."""

    text: Annotated[
        str | None,
        Setting(
            "The text with which prompts of completions begin. Only full blocks of 16 tokens are shared, so it must"
            " have at least 16 tokens.",
            instead=("system", "tokens"),
            example='"You are ..."',
        ),
    ] = None
    system: Annotated[
        str | None,
        Setting("The system message with which chats begin.", instead=("text", "tokens"), example='"You are ..."'),
    ] = None
    tokens: Annotated[
        tuple[int, ...] | None,
        Setting(
            "The tokens with which prompts begin.",
            what=_TOKENS_TEXT,
            read=_read_tokens,
            instead=("text", "system"),
        ),
    ] = None
    models: Annotated[
        tuple[str, ...] | None,
        Setting(
            "The models of [models.NAME] that have the prefix, at least one; by default, all.",
            what=_NAMES_TEXT,
            read=_read_names,
            example='["small"]',
        ),
    ] = None

    def __post_init__(self) -> None:
        if sum(bool(member) for member in (self.text, self.system, self.tokens)) != 1:
            raise ValueError("set either text, system or tokens")

    def named(self, name: str) -> NamedPrefix:
        return NamedPrefix(name, self.text or "", self.system or "", self.tokens or ())


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolTable:
    """The table `[pool]` of a server with several models."""

    memory_bytes: Annotated[
        int,
        Setting(
            'Memory of the card for all models that are loaded, such as "40GiB". Each takes the memory of its lease:'
            " weights, buffers and the regions of its tenants.",
            key="memory",
            what='a size, such as "40GiB"',
            read=read_size,
            example='"40GiB"',
        ),
    ]
    parked_bytes: Annotated[
        int | None,
        Setting(
            "Memory of the host for models that are parked, which should have room for those that are not on the card"
            " and for one more. The daemon must have `limits.park_memory` and `limits.overcommit`. Without this"
            " setting, models are unloaded instead.",
            key="parked_memory",
            what='a size, such as "200GiB"',
            read=read_size,
            example='"200GiB"',
        ),
    ] = None
    idle_s: Annotated[
        float | None,
        Setting(
            "Seconds without a request after which a model is parked, so that other leases can have its memory. Without"
            " this setting, a model is parked only when another model needs the room.",
            key="idle_secs",
            least=0.1,
            most=MAX_WAIT_S,
            example="600",
        ),
    ] = None
    min_stay_s: Annotated[
        float,
        Setting(
            "Seconds for which a model that was loaded or has returned is not evicted, so that two models do not evict"
            " each other all the time.",
            key="min_stay_secs",
            least=0,
            most=MAX_WAIT_S,
        ),
    ] = 5.0
    max_waiting: Annotated[
        int,
        Setting(
            "Maximum number of requests that may wait for one model; further ones get 503.",
            least=1,
            most=MAX_MODEL_QUEUE,
        ),
    ] = 256
    load_wait_s: Annotated[
        float,
        Setting(
            "Seconds that a request without `stream` waits for its model, before 503. Streams wait for up to"
            f" {STREAM_WAIT_S:g} s, and get comments meanwhile.",
            key="load_wait_secs",
            least=0,
            most=MAX_WAIT_S,
        ),
    ] = DEFAULT_LOAD_WAIT_S

    def limits(self) -> ResidencyLimits:
        return ResidencyLimits(
            self.memory_bytes, self.parked_bytes or 0, self.min_stay_s, self.idle_s, self.max_waiting
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerTable:
    """The declaration of a whole settings file."""

    model: Annotated[
        str | None,
        Setting(
            "A folder with config.json and safetensors, or a .gguf file; a relative path starts from this file's"
            " folder.",
            instead=("[models.NAME]",),
            example='"../../tiny"',
        ),
    ] = None
    name: Annotated[
        str | None,
        Setting(
            "The model's name in requests; without it, the name of its file or folder.",
            what=_NAME_TEXT,
            read=_read_name,
            example='"tiny"',
        ),
    ] = None
    aliases: Annotated[
        tuple[str, ...],
        Setting(
            "Further names of the model in requests, such as the name that clients of another server use. Replies have"
            " the model's own name.",
            what=_ALIASES_TEXT,
            read=_read_aliases,
            example='["org/model"]',
        ),
    ] = ()
    listen: Annotated[
        str,
        Setting(
            "The address of the HTTP server: tcp:127.0.0.1:PORT or unix:PATH. For other hosts, put a TLS proxy"
            " in front."
        ),
    ] = DEFAULT_LISTEN
    http_processes: Annotated[
        int | None,
        Setting(
            "Number of processes that serve HTTP, so that the engine's process only computes. With 0, "
            "the engine's process serves HTTP as well. Without it: half of the cores, at most 8, and 0 "
            "with fewer than 4 cores.",
            least=0,
            most=MAX_HTTP_PROCESSES,
            example="4",
        ),
    ] = None
    address: Annotated[
        str | None,
        Setting(
            "The address of the daemon, or of a fleet (fleet:tls:HOST:PORT,...), if it is not the default.",
            example='"unix:/run/gpulease/gpulease.sock"',
        ),
    ] = None
    cors_origins: Annotated[
        tuple[str, ...],
        Setting(
            'Origins of web pages that may call the server from a browser, such as "https://chat.example"; "*"'
            " for all.",
            what=_ORIGINS_TEXT,
            read=_read_origins,
            example='["https://chat.example"]',
        ),
    ] = ()
    audit: Annotated[bool, Setting("Whether each finished request is recorded in the daemon's audit log.")] = False
    engine: Annotated[EngineTable, Setting("The decode engine.")] = field(default_factory=EngineTable)
    operator: Annotated[
        KeyTable | None,
        Setting(
            "The operator's key, with which the page at GET / shows every tenant's counts and revokes regions. Without"
            " it the server has no page."
        ),
    ] = None
    pool: Annotated[
        PoolTable | None, Setting("The memory of all models together, and the times after which they move.")
    ] = None
    models: Annotated[
        Mapping[str, Any] | None,
        Setting(
            "Many models, by their names in requests.",
            what="tables",
            read=partial(_read_tables, kind="models", max_entries=MAX_MODELS),
        ),
    ] = None
    prefixes: Annotated[
        Mapping[str, Any] | None,
        Setting(
            "Prefixes of prompts that all tenants share, by their names. Their blocks are computed when the model is"
            " loaded.",
            what="tables",
            read=partial(_read_tables, kind="prefixes", max_entries=MAX_PREFIXES),
        ),
    ] = None
    tenants: Annotated[
        Mapping[str, Any],
        Setting(
            "The tenants, by their names.",
            what="tables",
            read=partial(_read_tables, kind="tenants", max_entries=MAX_TENANTS),
        ),
    ]


@dataclass(frozen=True, slots=True)
class DecodeSettings:
    """The validated settings of a decode server, which serves either one model or several.

    Attributes:
        model: The model's path; with several models, the settings file's folder.
        name: The model's name in requests; "" with several models.
        listen: The address on which the server listens.
        address: The daemon's address; None for the default.
        cors_origins: Origins of web pages that may call the server from a browser.
        audit: Whether the daemon's audit log gets a record of each finished request.
        decoder: The decoder's limits.
        wait_s: Seconds that a request may wait for its admission.
        chat_tokens: Default for the maximum number of tokens of a chat's answer; fewer if the prompt leaves less room.
        tenants: The tenants with their limits.
        keys: The tenants' keys.
        operator_digest: The sha256 of the operator's key; None for a server without the page.
        http_processes: Number of processes that serve HTTP; 0 if the decoder's process does.
        pool: The table `[pool]`; None with one model.
        models: The models by name; empty with one model.
        prefixes: The prefixes that all tenants share; empty with several models, whose entries in `models` have them.
        aliases: Further names of the only model; empty with several models.
    """

    model: Path
    name: str
    listen: str
    address: str | None
    cors_origins: tuple[str, ...]
    audit: bool
    decoder: DecoderSettings
    wait_s: float
    chat_tokens: int
    tenants: tuple[TenantConfig, ...]
    keys: ApiKeys
    operator_digest: bytes | None = None
    http_processes: int = 0
    pool: PoolTable | None = None
    models: Mapping[str, ModelSpec] = field(default_factory=dict)
    prefixes: tuple[NamedPrefix, ...] = ()
    aliases: tuple[str, ...] = ()


def default_http_processes() -> int:
    """Return the default number of processes that serve HTTP."""
    cores = len(os.sched_getaffinity(0))
    # On a small host, fronts would take cores from the engine's process.
    return 0 if cores < MIN_CORES_FOR_FRONTS else min(DEFAULT_MOST_FRONTS, cores // 2)


def load_decode_settings(path: Path) -> DecodeSettings:
    """Read a settings file. Raises InvalidRequest, which names the line or the setting that is wrong."""
    # Unknown keys and wrong types are refused here, with the key's path.
    document = read_file(path)
    file = settings_of(path, ServerTable, document)
    if (file.model is None) is (file.models is None):
        tables = (
            "must be given, or tables [models.NAME]" if file.model is None else "and [models.NAME] can't both be given"
        )
        raise InvalidRequest(f"{path}: model {tables}")
    if (file.models is None) is not (file.pool is None):
        raise InvalidRequest(f"{path}: [pool] must be given with [models.NAME], and only then")
    model, name = path.parent, ""
    if file.model is not None:
        # A relative path is relative to the settings file's folder.
        model = path.parent / file.model
        name = model.stem if file.name is None else file.name
        if not _NAME.fullmatch(name):
            raise InvalidRequest(f"{path}: the model's name must be {_NAME_TEXT}, not {name!r}", "Set `name`.")
        if len({name, *file.aliases}) <= len(file.aliases):
            raise InvalidRequest(f"{path}: aliases must differ from each other, and from the model's name, {name}")
    elif file.name is not None:
        raise InvalidRequest(f"{path}: name can't be given with [models.NAME], which have their own")
    elif file.aliases:
        raise InvalidRequest(f"{path}: aliases can't be given with [models.NAME], which have their own")
    tenants, digests, permitted = [], {}, {}
    for tenant_id, table in file.tenants.items():
        if not _NAME.fullmatch(tenant_id):
            raise InvalidRequest(f"{path}: a tenant's name must be {_NAME_TEXT}, not {tenant_id!r}")
        # Tables of tenants are named freely, so read each table separately.
        tenant = settings_of(path, TenantTable, table, "tenants", tenant_id)
        tenants.append(TenantConfig(tenant_id, tenant.max_concurrent, tenant.blocks, tenant.weight, tenant.max_waiting))
        digests[tenant_id] = _digest(path, f"tenants.{tenant_id}", tenant)
        if tenant.models is not None:
            permitted[tenant_id] = tenant.models
            if unknown := [model for model in tenant.models if model not in (file.models or {})]:
                raise InvalidRequest(f"{path}: tenants.{tenant_id}.models: there is no [models.{unknown[0]}]")
    prefixes = _prefixes(path, file.prefixes or {}, file.models)
    return DecodeSettings(
        model=model,
        name=name,
        listen=file.listen,
        address=file.address,
        cors_origins=file.cors_origins,
        audit=file.audit,
        decoder=file.engine.decoder(),
        wait_s=file.engine.wait_s,
        chat_tokens=file.engine.chat_tokens,
        tenants=tuple(tenants),
        keys=distinct_keys(digests),
        operator_digest=None if file.operator is None else _digest(path, "operator", file.operator),
        http_processes=default_http_processes() if file.http_processes is None else file.http_processes,
        pool=file.pool,
        models=_models(path, file.models or {}, document.get("engine", {}), tenants, permitted, prefixes),
        prefixes=tuple(prefix for prefix, _ in prefixes) if file.models is None else (),
        aliases=file.aliases,
    )


def _prefixes(
    path: Path, tables: Mapping[str, Any], models: Mapping[str, Any] | None
) -> list[tuple[NamedPrefix, Sequence[str]]]:
    """Return the shared prefixes, each with the names of its models, sorted by the prefix's name."""
    prefixes: list[tuple[NamedPrefix, Sequence[str]]] = []
    for name, values in tables.items():
        if not _NAME.fullmatch(name):
            raise InvalidRequest(f"{path}: a prefix's name must be {_NAME_TEXT}, not {name!r}")
        table = settings_of(path, PrefixTable, values, "prefixes", name)
        if table.models is not None and not table.models:
            # A prefix for no model is probably a mistake.
            raise InvalidRequest(
                f"{path}: prefixes.{name}.models must name at least one model, not []", "Leave it out for all models"
            )
        if unknown := [model for model in table.models or () if model not in (models or {})]:
            raise InvalidRequest(f"{path}: prefixes.{name}.models: there is no [models.{unknown[0]}]")
        prefixes.append((table.named(name), tuple(models or ()) if table.models is None else table.models))
    # Sort the prefixes, so that the same prefixes in another order do not count as a change of the model.
    return sorted(prefixes, key=lambda entry: entry[0].name)


def _models(
    path: Path,
    tables: Mapping[str, Any],
    engine: Mapping[str, Any],
    tenants: Sequence[TenantConfig],
    permitted: Mapping[str, Sequence[str]],
    prefixes: Sequence[tuple[NamedPrefix, Sequence[str]]],
) -> dict[str, ModelSpec]:
    """Return the models of a server with several models, by name. Each lists the tenants that may use it."""
    models, names = {}, Counter(tables.keys())
    for name, values in tables.items():
        if not _NAME.fullmatch(name):
            raise InvalidRequest(f"{path}: a model's name must be {_NAME_TEXT}, not {name!r}")
        table = settings_of(path, PooledModelTable, values, "models", name)
        # The model's own settings override those of [engine].
        engine_table = settings_of(path, EngineTable, {**engine, **table.engine}, "models", name, "engine")
        names.update(table.aliases)
        if twice := [alias for alias in table.aliases if names[alias] > 1]:
            raise InvalidRequest(f"{path}: models.{name}.aliases: {twice[0]} must be the name of one model alone")
        its_tenants = tuple(tenant for tenant in tenants if name in permitted.get(tenant.id, tables))
        if not its_tenants:
            raise InvalidRequest(f"{path}: no tenant may use the model {name}")
        models[name] = ModelSpec(
            path.parent / table.model,
            its_tenants,
            engine_table.decoder(),
            engine_table.wait_s,
            engine_table.chat_tokens,
            tuple(prefix for prefix, users in prefixes if name in users),
            table.aliases,
            is_preloaded=table.preload,
        )
    return models


def _digest(path: Path, name: str, table: KeyTable) -> bytes:
    """Return the digest of a table's key, which may be in a separate file."""
    if table.key_sha256 is not None:
        return table.key_sha256
    # Keep only the digest in memory.
    return key_digest(_read_key(f"{path}: {name}", path.parent / str(table.key_file)))


def _read_key(where: str, file: Path) -> str:
    """Return the key in a file. Raises InvalidRequest unless root or this user owns it, and nobody else can read it."""
    try:
        with open_regular(file) as opened:
            # Check the open file, because the file at the path may be replaced meanwhile.
            status = os.fstat(opened.fileno())
            if status.st_mode & 0o077 or status.st_uid not in (0, os.geteuid()):
                raise InvalidRequest(f"{where}: other users can access key_file {file}", f"chmod 600 {file}")
            key = opened.read(MAX_KEY_BYTES + 2).decode("ascii").strip()
    except OSError as error:
        raise InvalidRequest(f"{where}: key_file {file}: {error.strerror}") from None
    except UnicodeDecodeError:
        key = ""
    # A short key could be guessed.
    if not 16 <= len(key) <= MAX_KEY_BYTES or not key.isprintable():
        raise InvalidRequest(f"{where}: key_file {file} must contain a key of 16 to {MAX_KEY_BYTES} characters")
    return key
