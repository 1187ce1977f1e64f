"""Writes the manuals' tables from the code: `PYTHONPATH=.dev python -m tests.protocol.generate_manuals`.

They list settings, metrics and log events. The example of the daemon's settings file is written, too. A test compares.
"""

import logging
import textwrap
from collections.abc import Callable, Iterator, Mapping
from dataclasses import MISSING
from enum import Enum
from pathlib import Path
from typing import Any, Final, get_origin

from gpulease.client.decode.openai.decode_settings import (
    EngineTable,
    KeyTable,
    PooledModelTable,
    PoolTable,
    PrefixTable,
    ServerTable,
    TenantTable,
)
from gpulease.client.serve.gateway.settings import ModelTable
from gpulease.client.serve.models.model_settings import ModelSettings
from gpulease.daemon.config.settings import SettingsFile
from gpulease.daemon.leases.model import Cause
from gpulease.daemon.leases.quotas import GRACES, TenantLimits, TenantRules
from gpulease.daemon.log.catalogue import LogEvent
from gpulease.daemon.record.metrics.families import FAMILIES, FamilyKind
from gpulease.protocol.settings_reader import Declared, declared

from .generated_tables import table, with_tables

ROOT: Final = Path(__file__).parents[2]

EXAMPLE: Final = ROOT / "systemd" / "gpuleased.toml"

COLUMNS: Final = 120

PACKAGED: Final = {
    "listen": '["unix:/run/gpulease/gpuleased.sock"]',
    "driver": '"cuda"',
    "socket_mode": '"0660"',
    "state": '"/var/lib/gpulease"',
    "on_stop": '"keep"',
    "worker_user": '"gpulease-worker"',
}
"""Settings that the service has, in TOML."""


def toml_of(value: Any) -> str:
    """Return a setting's value in TOML."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, int | float):
        return str(value)
    if isinstance(value, tuple | frozenset):
        return f"[{', '.join(map(toml_of, value))}]"
    return f'"{value.value if isinstance(value, Enum) else value}"'


def example_of(found: Declared) -> str:
    """Return a setting's example in TOML: its default, if it has one that can be written."""
    return found.setting.example or toml_of(found.default)


def comment(text: str) -> Iterator[str]:
    """Yield a text as lines of a comment."""
    yield from textwrap.wrap(text, COLUMNS, initial_indent="# ", subsequent_indent="# ", break_on_hyphens=False)


def entries(settings: Mapping[str, Declared]) -> Iterator[str]:
    """Yield the lines of settings, those of tables among them apart."""
    for key, found in settings.items():
        yield from comment(found.setting.does)
        yield f"{key} = {PACKAGED[key]}" if key in PACKAGED else f"#{key} = {example_of(found)}"


def tables_of(settings: Mapping[str, Declared]) -> dict[str, Mapping[str, Declared]]:
    """Return the settings of each table of the file by its name; none for a table with keys of the operator's own."""
    found: dict[str, Mapping[str, Declared]] = {}
    for key, each in settings.items():
        if each.kind is TenantRules:
            found[key] = declared(TenantLimits)
        elif each.table is not None:
            found[key] = declared(each.table)
        elif get_origin(each.kind) is Mapping:
            found[key] = {}
    return found


def example() -> str:
    """Return the example of a settings file."""
    top = declared(SettingsFile)
    tables = tables_of(top)
    reloaded = [f"[{key}]" if key in tables else key for key, found in top.items() if found.setting.is_reloaded]
    lines = [
        *comment(
            'Settings of gpuleased. A line that begins with "#" and no space is a setting that is not set: most show'
            " the default, the others an example. Paths are absolute. With an invalid setting the daemon does not"
            f" start, and says why. `systemctl reload gpuleased` reloads {', '.join(reloaded[:-1])} and {reloaded[-1]};"
            " everything else needs a restart, which sessions survive."
        ),
        "",
        *entries({key: found for key, found in top.items() if key not in tables}),
    ]
    for name, settings in tables.items():
        lines += ["", *comment(top[name].setting.does)]
        if name == "tenants":
            lines += ["#[tenants.default]", "#max_leases = 8", "#[tenants.ann]"]
        else:
            lines.append(f"#[{name}]")
        lines += [f"#{top[name].setting.example}"] if not settings else []
        lines += entries({key: found for key, found in settings.items() if key != "grace_ms"})
    grace = tables["limits"]["grace_ms"]
    lines += ["", *comment(grace.setting.does), "#[limits.grace_ms]"]
    lines += [f"#{cause} = {found.default}" for cause, found in GRACES.items() if found.default]
    return "\n".join(lines) + "\n"


def rows(settings: Mapping[str, Declared], prefix: str = "") -> Iterator[list[str]]:
    """Yield the rows of settings, whose keys stand behind a prefix."""
    for key, found in settings.items():
        cells = [f"`{prefix}{key}`", found.what, default_text(found), found.setting.does]
        yield [cell.replace("|", "\\|") for cell in cells]


def default_text(found: Declared) -> str:
    """Return a setting's default for a cell."""
    if found.default is MISSING:
        return "must be given"
    if found.setting.instead:
        return f"must be given, or {' or '.join(f'`{key}`' for key in found.setting.instead)}"
    if found.default is None or found.default == "" or (not found.default and found.setting.read is not None):
        return "—"
    is_written_so = found.kind is int and found.setting.read is not None
    return f"`{found.setting.example if is_written_so else toml_of(found.default)}`"


def metrics_table() -> str:
    """Return the table of the daemon's metrics, by the names that they have in the exposition."""
    made = []
    for family in FAMILIES:
        name = family.series_names[0] if family.kind in (FamilyKind.COUNTER, FamilyKind.GAUGE) else family.name
        labels = ", ".join(f"`{label}`" for label in family.labels)
        made.append([f"`{name}`", family.kind.value, labels, family.meaning])
    return table(["metric", "kind", "labels", "meaning"], made).replace("|  |", "| |")


def _level_text(event: LogEvent) -> str:
    level = logging.getLevelName(event.level).lower()
    if not event.kind.warns_of_failures:
        return level
    *others, last = sorted(f"`{cause.value}`" for cause in Cause if cause.row.is_warned)
    return f"{level}; warning if `cause` is {', '.join(others)} or {last}"


def events_table() -> str:
    """Return the table of the daemon's log events."""
    made = [
        [
            f"`{event.kind.name}`",
            _level_text(event),
            event.kind.message,
            ", ".join(f"`{name}`" for name in event.kind.fields),
        ]
        for event in LogEvent
    ]
    return table(["event", "level", "message", "fields"], made)


TITLES: Final = ("setting", "must be", "default", "what it decides")


def decode_table() -> str:
    """Return the table of a decode server's settings."""
    tables = ("engine", "operator", "tenants", "pool", "models", "prefixes")
    top = {key: found for key, found in declared(ServerTable).items() if key not in tables}
    parts = {"": top, "engine.": declared(EngineTable), "tenants.NAME.": declared(TenantTable)}
    parts |= {"pool.": declared(PoolTable), "models.NAME.": declared(PooledModelTable)}
    parts |= {"prefixes.NAME.": declared(PrefixTable)}
    made = [row for prefix, settings in parts.items() for row in rows(settings, prefix)]
    operator = declared(ServerTable)["operator"].setting.does
    for row in rows(declared(KeyTable), "operator."):
        made.append([*row[:3], f"{row[3]} {operator}"])
    return table(TITLES, made)


def daemon_table() -> str:
    """Return the table of all of the daemon's settings."""
    top = declared(SettingsFile)
    tables = tables_of(top)
    made = [*rows({key: found for key, found in top.items() if not tables.get(key)})]
    for name, settings in tables.items():
        prefix = f"{name}.NAME." if name == "tenants" else f"{name}."
        made += rows({key: found for key, found in settings.items() if key != "grace_ms"}, prefix)
    grace, any_cause = tables["limits"]["grace_ms"], next(iter(GRACES.values()))
    defaults = [f"{cause} = {found.default}" for cause, found in GRACES.items() if found.default]
    made.append(["`limits.grace_ms.CAUSE`", any_cause.what, f"`{', '.join(defaults)}`, else `0`", grace.setting.does])
    return table(TITLES, made)


DOCUMENTS: Final[dict[Path, dict[str, Callable[[], str]]]] = {
    ROOT / "daemon" / "manual" / "settings.md": {"settings": daemon_table},
    ROOT / "daemon" / "manual" / "metrics.md": {"metrics": metrics_table},
    ROOT / "daemon" / "manual" / "logs.md": {"events": events_table},
    ROOT / "client" / "decode" / "README.md": {"settings": decode_table},
    ROOT / "client" / "serve" / "README.md": {
        "gateway settings": lambda: table(TITLES, list(rows(declared(ModelTable)))),
        "model settings": lambda: table(TITLES, list(rows(declared(ModelSettings)))),
    },
}
"""The tables of each document, by their names."""


def texts() -> dict[Path, str]:
    """Return the whole text of each file that is made, or has a table that is."""
    made = {EXAMPLE: example()}
    for path, tables in DOCUMENTS.items():
        made[path] = with_tables(path.read_text(encoding="utf-8"), {name: make() for name, make in tables.items()})
    return made


def main() -> None:
    """Write them."""
    for path, text in texts().items():
        path.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
