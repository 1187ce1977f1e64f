"""The example of the daemon's settings: it can be used as it is, and names every setting there is."""

import re
import tomllib
from collections.abc import Mapping
from dataclasses import fields, replace
from pathlib import Path

from gpulease.client.cli.service import UNITS
from gpulease.daemon.config.settings import Config, load_config
from gpulease.daemon.leases.quotas import CoreLimits, TenantLimits, TenantRules
from gpulease.daemon.remote.tls_settings import TlsSettings
from gpulease.protocol.settings_reader import Declared, declared

TEXT = (UNITS / "gpuleased.toml").read_text()

MADE = tomllib.loads(TEXT)
"""The service's own settings."""


def all_made(tmp_path: Path) -> Config:
    """With every setting that is not made taken as made, on the one driver that has them all."""
    path = tmp_path / "all.toml"
    made = re.sub(r'^#(?=[a-z_\["0-9])', "", TEXT, flags=re.MULTILINE)
    path.write_text(made.replace('driver = "cuda"', 'driver = "cpu"'))
    return load_config(path, {})


def test_it_can_be_used_as_it_is() -> None:
    config = load_config(UNITS / "gpuleased.toml", {})
    assert config.limits == CoreLimits()
    assert config.tls is None


def test_every_attribute_is_a_setting() -> None:
    """The others are made from settings: a tenant's rules from [tenants]."""
    for kind, others in ((Config, set()), (TlsSettings, set()), (TenantLimits, set()), (CoreLimits, {"tenants"})):
        attributes = {found.attribute for found in declared(kind).values()}
        assert attributes == {item.name for item in fields(kind)} - others


def assert_defaults(settings: Mapping[str, Declared], read: object) -> None:
    """Check the settings whose default the example has, but the service's own."""
    for key, found in settings.items():
        is_default_written = not found.setting.example or (found.kind is int and found.setting.read is not None)
        if is_default_written and found.table is None and key not in MADE:
            assert getattr(read, found.attribute) == found.default, key


def test_what_is_not_made_has_its_default(tmp_path: Path) -> None:
    found = all_made(tmp_path)
    assert replace(found.limits, tenants=TenantRules()) == CoreLimits()
    assert_defaults(declared(Config), found)
    assert found.tls is not None
    assert_defaults(declared(TlsSettings), found.tls)
    assert found.fleet is not None
    assert_defaults(declared(type(found.fleet)), found.fleet)
    ann = found.limits.tenants.of("ann")
    assert (ann.max_vram_bytes, ann.acquire_burst) == (40 << 30, TenantLimits().acquire_burst)
