"""The example of the daemon's settings: it can be used as it is, and names every setting there is."""

import re
from dataclasses import fields, replace
from pathlib import Path

from gpulease.client.cli.service import UNITS
from gpulease.daemon.config.settings import TABLES, TENANT_SETTINGS, TLS_SETTINGS, Config, Setting, load_config
from gpulease.daemon.leases import CoreLimits
from gpulease.daemon.leases.quotas import TenantLimits, TenantRules
from gpulease.daemon.remote.tls_settings import TlsSettings

TEXT = (UNITS / "gpuleased.toml").read_text()

DEFAULTS = {"warm_contexts", "max_connections", "max_connections_per_tenant", "max_load_s", "audit_required"}
DEFAULTS |= {
    "recycle",
    "recycle_idle_s",
    "recycle_leases",
    "placement",
    "audit_file_bytes",
    "audit_keep_files",
    "sandbox",
    "sandbox_without",
    "require_token",
}
"""Settings that stand there with the value they have if they are not made."""


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


def test_every_setting_is_there() -> None:
    for section, settings in TABLES.items():
        for setting in settings if section != "limits.grace_ms" else ():
            is_table = setting.name in (
                "limits",
                "tls",
                "fleet",
                "tenants",
                "tenant_of_uid",
                "tenant_of_certificate",
                "grace_ms",
            )
            wanted = rf"^#?\[.*\b{setting.name}\b.*\]$" if is_table else rf"^#?{setting.name} = "
            assert re.search(wanted, TEXT, re.MULTILINE), f"{section}: {setting.name}"


def test_every_setting_has_its_attribute() -> None:
    def attributes(settings: tuple[Setting, ...]) -> list[str]:
        return [setting.attribute for setting in settings]

    assert attributes(TABLES[""]) == [item.name for item in fields(Config)] + ["tenants"]
    assert attributes(TLS_SETTINGS) == [item.name for item in fields(TlsSettings)]
    assert set(attributes(TENANT_SETTINGS)) == {item.name for item in fields(TenantLimits)}


def test_every_setting_has_a_comment() -> None:
    """Of its own, or of the group it stands in; some say all by their names."""
    above = ""
    for line in TEXT.splitlines():
        if re.match(r"^#?\w+ = ", line):
            assert above.startswith("#"), line
        above = line


def test_what_is_not_made_has_its_default(tmp_path: Path) -> None:
    found, default = all_made(tmp_path), Config()
    for name in DEFAULTS:
        assert getattr(found, name) == getattr(default, name), name
    assert replace(found.limits, tenants=TenantRules()) == CoreLimits()
    assert found.limits.grace_ms == CoreLimits().grace_ms
    assert found.tls is not None
    for name in ("operators", "max_connections", "max_connections_per_tenant"):
        assert getattr(found.tls, name) == getattr(TlsSettings(Path(), Path(), Path()), name)
