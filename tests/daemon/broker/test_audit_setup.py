"""The digest of the settings in the audit log's first record."""

import asyncio
import errno
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from gpulease.daemon.broker.audit_setup import CannotRecord, config_digest, open_recorder
from gpulease.daemon.capabilities.claims import Demand
from gpulease.daemon.config.settings import Config, ConfigError, load_config
from gpulease.daemon.leases.devices import PlacementOrder
from gpulease.daemon.leases.quotas import CoreLimits, TenantLimits, TenantRules
from gpulease.daemon.record.audit.record_writer import AuditWriter
from gpulease.daemon.record.audit.records import read_head

ANN, BOB = TenantLimits(max_leases=1), TenantLimits(devices=("0",))


def of_tenants(**by_name: TenantLimits) -> dict[str, Any]:
    return {"limits": CoreLimits(tenants=TenantRules(by_name=by_name))}


@pytest.mark.parametrize(
    ("one", "other"),
    [
        # The order of a set is another in every process.
        ({"require_token": frozenset(Demand)}, {"require_token": dict.fromkeys(("alloc", "attach", "renew"), True)}),
        ({"tenant_of_uid": {7: "ann", 8: "bob"}}, {"tenant_of_uid": {8: "bob", 7: "ann"}}),
        (of_tenants(ann=ANN, bob=BOB), of_tenants(bob=BOB, ann=ANN)),
    ],
)
def test_the_same_settings_have_the_same_digest(one: dict[str, Any], other: dict[str, Any]) -> None:
    assert config_digest(Config(**one)) == config_digest(Config(**other)) != config_digest(Config())


def test_other_settings_have_another() -> None:
    several: list[dict[str, Any]] = [
        {},
        {"require_token": frozenset({Demand.ALLOC})},
        {"tenant_of_uid": {7: "ann"}},
        {"vram_bytes": (7,)},
        {"limits": CoreLimits(max_leases=7)},
        {"placement": PlacementOrder.PACK},
        of_tenants(ann=ANN),
        of_tenants(ann=BOB),
        of_tenants(bob=BOB),
        of_tenants(bob=replace(BOB, fleet_quota=True)),
        # Numbers that records do not hold, and a path whose bytes are no text.
        {"max_connections": 10**20},
        {"max_connections": 10**20 + 1},
        {"audit": Path("/log/\udcff")},
    ]
    assert len({config_digest(Config(**settings)) for settings in several}) == len(several)


def test_a_later_setting_of_tenants_changes_no_earlier_digest() -> None:
    """The digest is that of the daemon before, which knew no quotas in a fleet."""
    digest = config_digest(Config(**of_tenants(bob=BOB)))
    assert digest == "6117c5c959d85158cd593e8675ae84ace91ac67c82ab39c6adc1770e4430c8f8"


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"audit": "file"}, "setting audit: .*file must be a folder, not a file"),
        ({"audit": "no/log"}, "setting audit: the folder .*no does not exist"),
        (
            {"audit": "log", "audit_head": "folder"},
            "setting audit_head: .*folder must be a regular file, not a folder, a FIFO",
        ),
        (
            {"audit": "log", "audit_head": "fifo"},
            "setting audit_head: .*fifo must be a regular file, not a folder, a FIFO",
        ),
        (
            {"audit": "log", "audit_head": "file"},
            "setting audit_head: .*file contains something other than an audit log's head",
        ),
        ({"audit": "log", "audit_head": "no/head.json"}, "setting audit_head: the folder .*no does not exist"),
        ({"audit": "file/log"}, "setting audit: the folder .*file does not exist"),
    ],
)
def test_a_place_where_no_log_can_be_is_refused_whether_it_is_required_or_not(
    tmp_path: Path, settings: dict[str, str], said: str
) -> None:
    (tmp_path / "file").write_text("precious")
    (tmp_path / "folder").mkdir()
    os.mkfifo(tmp_path / "fifo")
    config = Config(**{name: tmp_path / place for name, place in settings.items()})  # type: ignore[arg-type]

    async def live() -> None:
        async with open_recorder(config, "cpu", []):
            pass

    with pytest.raises(ConfigError, match=said):
        asyncio.run(live())
    assert (tmp_path / "file").read_text() == "precious"


@pytest.mark.parametrize("contents", [b"", bytes(256), b'{"alive_us":1'])
def test_a_new_or_damaged_head_is_replaced(tmp_path: Path, contents: bytes) -> None:
    head = tmp_path / "head.json"
    head.write_bytes(contents)

    async def live() -> None:
        async with open_recorder(Config(audit=tmp_path / "log", audit_head=head, audit_required=True), "cpu", []):
            pass

    asyncio.run(live())
    assert read_head(head.read_bytes()).end.seq == 2


@pytest.mark.parametrize(("path", "said"), [(None, ""), ("/log/2.jsonl", "/log/2.jsonl: ")])
def test_a_log_that_is_required_and_has_no_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, path: str | None, said: str
) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), path)

    async def live() -> None:
        async with open_recorder(Config(audit=tmp_path / "log", audit_required=True), "cpu", []):
            pass

    monkeypatch.setattr(AuditWriter, "start", fail)
    with pytest.raises(CannotRecord) as refused:
        asyncio.run(live())
    assert str(refused.value) == f"the audit log can't be written: {said}No space left on device"


def test_the_digest_of_unchanged_settings_stays_from_version_to_version() -> None:
    """A renamed field would look to an auditor as if the operator had changed the settings."""
    digest = config_digest(load_config(None, {}))
    assert digest == "b48ced13ed5c7c8501c328288906d7c3f2fea956c244d2114fcdb3f765cb3c16"
