"""The settings of a decode server: a TOML file, read once. The example beside this module explains each."""

import os
import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from gpulease.client.decode.checked_file import open_regular
from gpulease.client.decode.decode_requests import MAX_POSITIONS, MAX_WAIT_S, TenantConfig
from gpulease.client.decode.openai.api_keys import MAX_KEY_BYTES, ApiKeys, distinct_keys, key_digest
from gpulease.client.decode.row_records import PAGE
from gpulease.client.decode.supervisor.decoder import MAX_TEXT_PROCESSES, MIN_REGION_LIFE_S, DecoderSettings
from gpulease.client.errors import InvalidRequest
from gpulease.client.http.model_file import check_complete, check_kind, check_table, kind_of

MAX_TENANTS: Final = 256
"""Most tenants: each has a region on the card, and series in the metrics."""

MAX_SETTINGS_BYTES: Final = 1 << 20
"""Most bytes of the file. Stops a wrong path from filling memory."""

MAX_REGION_LIFE_S: Final = 86_400.0
"""Longest life of a region that is not renewed: daemons' own bound of a lease's time, unless they say another."""

MAX_REBINDS_AT_ONCE: Final = 1000
"""Most regions of a tenant that are opened anew at once: more are no bound of what their replays cost the others."""

MAX_REBIND_INTERVAL_S: Final = MAX_WAIT_S
"""Longest time for one more: nobody's request waits for longer."""

DEFAULT_LISTEN: Final = "tcp:127.0.0.1:8082"
DEFAULT_WAIT_S: Final = 30.0
"""Seconds that a request waits for its admission; clients give up, or ask again, at some minutes."""

DEFAULT_CHAT_TOKENS: Final = 256
"""Tokens of a chat's answer whose request does not say: blocks for all are reserved, so few is better than all."""

EXAMPLE: Final = Path(__file__).with_name("example") / "decode.toml"

_DIGEST: Final = re.compile(r"[0-9a-f]{64}")
_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}")
_TOP: Final[dict[str, type[Any]]] = {
    "model": str,
    "name": str,
    "listen": str,
    "address": str,
    "audit": bool,
    "engine": dict,
    "tenants": dict,
    "operator": dict,
}
_OPERATOR: Final[dict[str, type[Any]]] = {"key_sha256": str, "key_file": str}
_ENGINE: Final[dict[str, type[Any]]] = {
    "max_rows": int,
    "prefill_rows": int,
    "max_sequences": int,
    "positions": int,
    "packed": bool,
    "wait_secs": float,
    "chat_tokens": int,
    "preempts": bool,
    "region_life_secs": float,
    "rebinds_at_once": int,
    "rebind_interval_secs": float,
    "text_processes": int,
}
_TENANT: Final[dict[str, type[Any]]] = {
    "key_sha256": str,
    "key_file": str,
    "max_concurrent": int,
    "max_blocks": int,
    "context_tokens": int,
    "weight": float,
    "max_waiting": int,
}
_ENGINE_RANGES: Final = {
    "max_rows": (1, 1024),
    "prefill_rows": (1, 1024),
    "max_sequences": (1, 4096),
    "positions": (1, 1 << 20),
    "wait_secs": (0, MAX_WAIT_S),
    "chat_tokens": (1, MAX_POSITIONS),
    "region_life_secs": (MIN_REGION_LIFE_S, MAX_REGION_LIFE_S),
    "rebinds_at_once": (1, MAX_REBINDS_AT_ONCE),
    "rebind_interval_secs": (0, MAX_REBIND_INTERVAL_S),
    "text_processes": (1, MAX_TEXT_PROCESSES),
}

_SECONDS: Final = {"region_life_secs": "region_life_s", "rebind_interval_secs": "rebind_interval_s"}
"""Settings of the engine in seconds, and the decoder's names of them."""


@dataclass(frozen=True, slots=True)
class DecodeSettings:
    """Settings of a decode server.

    Attributes:
        model: The model's path.
        name: Its name in requests.
        listen: Where to listen.
        address: The daemon's address; None for the usual one.
        audit: Whether each request becomes a record of the daemon's audit log.
        decoder: What the engine makes room for.
        wait_s: Seconds that a request may wait for its admission.
        chat_tokens: Tokens of a chat's answer whose request does not say; fewer where its prompt leaves less room.
        tenants: Who may ask.
        keys: Their keys.
        operator_digest: The sha256 of the key that the page takes; None for no page.
    """

    model: Path
    name: str
    listen: str
    address: str | None
    audit: bool
    decoder: DecoderSettings
    wait_s: float
    chat_tokens: int
    tenants: tuple[TenantConfig, ...]
    keys: ApiKeys
    operator_digest: bytes | None = None


def load_decode_settings(path: Path) -> DecodeSettings:
    """Read a file. Raises InvalidRequest that names the line, or the setting, that is wrong."""
    said = _read(path)
    where = str(path)
    _check_kinds(where, said, _TOP)
    check_complete(where, said, ("model", "tenants"))
    model = path.parent / said["model"]
    name = said.get("name", model.stem)
    if not _NAME.fullmatch(name):
        raise InvalidRequest(f"{where}: name = {name!r} is none of 1 to 64 letters, digits and .-_", "Set `name`")
    engine = said.get("engine", {})
    _check_engine(f"{where}: engine", engine)
    wait_s = float(engine.pop("wait_secs", DEFAULT_WAIT_S))
    chat_tokens = engine.pop("chat_tokens", DEFAULT_CHAT_TOKENS)
    tables = said["tenants"]
    if not 0 < len(tables) <= MAX_TENANTS:
        raise InvalidRequest(f"{where}: there must be 1 to {MAX_TENANTS} tables [tenants.NAME]")
    tenants = [_tenant(path, tenant_id, table) for tenant_id, table in tables.items()]
    return DecodeSettings(
        model=model,
        name=name,
        listen=said.get("listen", DEFAULT_LISTEN),
        address=said.get("address"),
        audit=said.get("audit", False),
        decoder=DecoderSettings(**{_SECONDS.get(key, key): value for key, value in engine.items()}),
        wait_s=wait_s,
        chat_tokens=chat_tokens,
        tenants=tuple(config for config, _ in tenants),
        keys=distinct_keys({config.id: digest for config, digest in tenants}),
        operator_digest=_operator_digest(path, said),
    )


def _read(path: Path) -> dict[str, Any]:
    try:
        with open_regular(path) as file:
            data = file.read(MAX_SETTINGS_BYTES + 1)
        if len(data) > MAX_SETTINGS_BYTES:
            raise InvalidRequest(f"{path} has more than {MAX_SETTINGS_BYTES} bytes, so it can't be a settings file")
        return tomllib.loads(data.decode())
    except OSError as error:
        raise InvalidRequest(f"{path}: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise InvalidRequest(f"{path}: {error}") from None


def _check_kinds(where: str, table: Mapping[str, Any], kinds: Mapping[str, type[Any]]) -> None:
    for key, value in table.items():
        check_kind(where, key, value, kind_of(where, key, kinds))


def _check_engine(where: str, table: Mapping[str, Any]) -> None:
    _check_kinds(where, table, _ENGINE)
    for key, (least, most) in _ENGINE_RANGES.items():
        if key in table and not least <= table[key] <= most:
            raise InvalidRequest(f"{where}: {key} is {table[key]}; {least:g} to {most:g} is taken")


def _tenant(path: Path, tenant_id: str, table: Any) -> tuple[TenantConfig, bytes]:
    where = f"{path}: tenants.{tenant_id}"
    if not _NAME.fullmatch(tenant_id):
        raise InvalidRequest(f"{where}: a name has 1 to 64 letters, digits and .-_")
    check_table(where, table)
    _check_kinds(where, table, _TENANT)
    check_complete(where, table, ("max_concurrent",))
    digest = _digest(path, where, table)
    if ("max_blocks" in table) is ("context_tokens" in table):
        raise InvalidRequest(f"{where}: set either max_blocks or context_tokens")
    blocks = table.get("max_blocks", -(-table.get("context_tokens", 0) // PAGE))
    options = {key: table[key] for key in ("weight", "max_waiting") if key in table}
    try:
        return TenantConfig(tenant_id, table["max_concurrent"], blocks, **options), digest
    except ValueError as error:
        raise InvalidRequest(f"{path}: tenants: {error}") from None


def _operator_digest(path: Path, said: Mapping[str, Any]) -> bytes | None:
    if "operator" not in said:
        return None
    where = f"{path}: operator"
    _check_kinds(where, said["operator"], _OPERATOR)
    return _digest(path, where, said["operator"])


def _digest(path: Path, where: str, table: Mapping[str, Any]) -> bytes:
    if ("key_sha256" in table) is ("key_file" in table):
        raise InvalidRequest(f"{where}: set either key_sha256 or key_file")
    if "key_file" in table:
        return key_digest(_read_key(where, path.parent / table["key_file"]))
    digest = table["key_sha256"]
    if not _DIGEST.fullmatch(digest):
        # It may be a key by mistake, so it is not repeated.
        raise InvalidRequest(f"{where}: key_sha256 must have 64 hexadecimal digits", "printf %s KEY | sha256sum")
    return bytes.fromhex(digest)


def _read_key(where: str, file: Path) -> str:
    """Read a key's file, which must be closed to everybody but its owner."""
    try:
        with open_regular(file) as opened:
            found = os.fstat(opened.fileno())
            if found.st_mode & 0o077 or found.st_uid not in (0, os.geteuid()):
                raise InvalidRequest(f"{where}: key_file {file} is open to others", f"chmod 600 {file}")
            key = opened.read(MAX_KEY_BYTES + 2).decode("ascii").strip()
    except OSError as error:
        raise InvalidRequest(f"{where}: key_file {file}: {error.strerror}") from None
    except UnicodeDecodeError:
        key = ""
    if not 16 <= len(key) <= MAX_KEY_BYTES or not key.isprintable():
        raise InvalidRequest(f"{where}: key_file {file} must contain a key of 16 to {MAX_KEY_BYTES} characters")
    return key
