"""The part of the settings that is about single tenants."""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Final

from gpulease.daemon.core.tenants import TenantLimits, TenantRules
from gpulease.daemon.tenant_names import OVER_TCP, check_tenant
from gpulease.protocol.sizes import parse_size

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
