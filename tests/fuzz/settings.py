"""The daemon's settings: daemon/config/settings.py, protocol/address.py.

The invariant. Whatever a settings file or a word of the command line contains:

- it becomes settings, or a ConfigError that says in a sentence what is wrong; no other error is raised;
- accepted settings are within every limit. They have a digest for the audit log, which is the same if they are read
  again;
- an accepted address, written as text, gives the same address.
"""

import os
from collections.abc import Iterator
from ipaddress import ip_address
from pathlib import Path

from gpulease.daemon.broker.audit_setup import config_digest
from gpulease.daemon.config.settings import (
    DRIVERS,
    MAX_AUDIT_FILE_BYTES,
    MAX_EMBEDDED_CARDS,
    MAX_WARM_CONTEXTS,
    MIN_AUDIT_FILE_BYTES,
    MIN_VRAM_BYTES,
    Config,
    ConfigError,
    load_config,
)
from gpulease.daemon.leases.quotas import MAX_GRACE_MS
from gpulease.daemon.remote.tls_settings import RESERVED_TENANTS
from gpulease.protocol.address import parse_address
from gpulease.protocol.sizes import parse_size

from .draws import Draws

MAX_BYTES = 1024


def check(data: bytes) -> None:
    draws = Draws(data)
    match draws.below(8):
        case 0:
            check_words(draws.rest().decode("utf-8", "surrogateescape"))
        case 1:
            check_file(draws.rest())
        case _:
            check_file(written(draws).encode("utf-8", "replace"))


def check_words(text: str) -> None:
    try:
        assert parse_size(text) >= 1
    except ValueError as error:
        assert str(error)
    try:
        address = parse_address(text)
    except ValueError as error:
        assert str(error)
    else:
        assert parse_address(str(address)) == address
    for key in ("listen", "vram", "audit", "driver", "socket_mode", "http"):
        config = loaded(None, {key: [text] if key in ("listen", "vram") else text})
        if config is not None:
            assert config_digest(config)


def check_file(text: bytes) -> None:
    fd = os.memfd_create("settings")
    try:
        os.write(fd, text)
        path = Path(f"/proc/self/fd/{fd}")
        config = loaded(path, {})
        if config is not None:
            check_bounds(config)
            assert config_digest(config) == config_digest(load_config(path, {}))
    finally:
        os.close(fd)


def loaded(path: Path | None, overrides: dict[str, object]) -> Config | None:
    try:
        return load_config(path, overrides)
    except ConfigError as error:
        assert str(error)
        return None


def check_bounds(config: Config) -> None:
    limits = config.limits
    assert config.listen
    assert config.driver in DRIVERS
    assert len(config.vram_bytes) <= MAX_EMBEDDED_CARDS
    assert all(size >= MIN_VRAM_BYTES for size in config.vram_bytes)
    assert 0 <= config.socket_mode <= 0o777
    assert 0 <= config.warm_contexts <= MAX_WARM_CONTEXTS
    assert config.recycling is None or config.warm_contexts
    assert 1 <= config.max_connections_per_tenant <= config.max_connections
    assert MIN_AUDIT_FILE_BYTES <= config.audit_file_bytes <= MAX_AUDIT_FILE_BYTES
    assert config.audit_keep_files == 0 or config.audit_keep_files > 1
    assert config.audit is not None or not (config.audit_required or config.audit_head)
    assert config.http is None or ip_address(config.http.host).is_loopback
    assert config.http is not None or not (config.http_hosts or config.http_token_file)
    assert not set(config.tenant_of_uid.values()) & set(RESERVED_TENANTS)
    assert all(0 <= grace <= MAX_GRACE_MS for grace in limits.grace_ms.values())
    assert limits.max_leases >= 1
    for tenant in ("default", "ann", "uid:1000"):
        own = limits.tenants.of(tenant)
        assert own.max_ttl_s is None or own.max_ttl_s >= 1
        assert limits.max_leases_of(tenant) >= 0


# --- files that are nearly right ---

KEYS = (
    "listen",
    "driver",
    "vram",
    "socket_mode",
    "warm_contexts",
    "recycle",
    "recycle_idle_s",
    "recycle_leases",
    "placement",
    "max_connections",
    "max_connections_per_tenant",
    "audit",
    "audit_head",
    "audit_required",
    "audit_file_size",
    "audit_keep_files",
    "require_token",
    "token_key_file",
    "tenant_of_uid",
    "limits",
    "tenants",
    "vram_bytes",
    "nonsense",
    "http",
    "http_hosts",
    "http_token_file",
)
INNER = (
    "max_ttl_s",
    "max_leases",
    "max_vram",
    "acquires_per_minute",
    "acquire_burst",
    "devices",
    "grace_ms",
    "expired",
    "revoked",
    "1000",
    "4294967295",
    "default",
    "ann",
    "max_tombstones",
    "tenants",
    '"uid:1000"',
)
VALUES = (
    "0",
    "1",
    "-1",
    "7",
    "64",
    "100000",
    "99999999999999999999",
    "0o660",
    "1.5",
    "nan",
    "inf",
    "true",
    "false",
    '""',
    '"auto"',
    '"cpu"',
    '"6GiB"',
    '"1TiB"',
    '"0660"',
    '"/var/log/gpulease"',
    '"unix:/run/x.sock"',
    '"tcp:127.0.0.1:0"',
    '"127.0.0.1:9400"',
    '"0.0.0.0:9400"',
    '"[::1]:0"',
    '"alloc"',
    '"attach"',
    '"ann"',
    '"default"',
    '"tcp"',
    "[]",
    "{}",
    "2026-01-01",
    "07:00:00",
    '"999999999999999999999999999999999999999999999999999999999999999999999999999GiB"',
)


def written(draws: Draws) -> str:
    lines = []
    for _ in range(1 + draws.below(6)):
        key = draws.pick(KEYS) if not draws.chance(16) else draws.pick(INNER)
        lines.append(f"{key} = {value(draws, 0)}")
    return "\n".join(lines)


def value(draws: Draws, depth: int) -> str:
    way = draws.below(8) if depth < 4 else 7
    if way < 2:
        inside = ", ".join(f"{draws.pick(INNER)} = {value(draws, depth + 1)}" for _ in range(draws.below(4)))
        return f"{{{inside}}}"
    if way == 2:
        return "[" + ", ".join(value(draws, depth + 1) for _ in range(draws.below(4))) + "]"
    if way == 3:
        text = draws.sized(30).decode("utf-8", "replace").replace("'", "").replace("\n", "")
        return f"'{text}'"
    return draws.pick(VALUES)


def seeds() -> Iterator[bytes]:
    for key in range(len(KEYS)):
        for number in range(len(VALUES)):
            yield bytes([2, 0, key, 0, 7, number])
        for inner in range(len(INNER)):
            yield bytes([2, 0, key, 0, 0, 1, inner, 0, 7, 3])
            yield bytes([2, 0, key, 0, 0, 1, inner, 0, 1, inner, 0, 7, 3])
        yield bytes([2, 0, key, 0, 2, 2, 7, 9, 7, 20])
    for text in ("6 GiB", "0.1B", "tcp:[::1]:7", "unix:/x", "tcp:a:99999", "9" * 400, "1.5T"):
        yield b"\0" + text.encode()
    yield b"\1" + b'[tenants."uid:1000"]\nmax_vram = "6GiB"\ndevices = [0, "GPU-1"]\n[limits.grace_ms]\nexpired = 20\n'
    yield b"\1listen = " + b"[" * 500
