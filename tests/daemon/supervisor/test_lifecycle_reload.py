import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest

from gpulease.client import Denied
from gpulease.daemon.config.settings import Config
from gpulease.daemon.leases.quotas import TenantLimits, TenantRules
from gpulease.daemon.supervisor.lifecycle import MAX_LOGGED_CHANGES, settings_in_effect, settings_that_wait
from helpers import audit_log
from helpers.free_ports import free_port
from helpers.service_manager import ServiceManager
from helpers.waiting import wait_until

BAD_RULES = ("max_leases = 0", "devices = []")


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({}, []),
        ({"tenant_of_uid": {7: "ann"}, "max_connections": 5}, []),
        ({"vram_bytes": (1,), "audit_file_bytes": 2, "driver": "cpu"}, ["driver", "vram", "audit_file_size"]),
        ({"state": Path("/state"), "max_connections": 5}, ["state"]),
    ],
)
def test_what_takes_a_restart(change: dict[str, object], expected: list[str]) -> None:
    assert settings_that_wait(Config(), replace(Config(), **change)) == expected  # type: ignore[arg-type]


def test_limits_take_a_restart_and_tenants_bounds_do_not() -> None:
    limits = Config().limits
    rules = TenantRules(default=TenantLimits(max_leases=1))
    assert settings_that_wait(Config(), Config(limits=replace(limits, tenants=rules))) == []
    assert settings_that_wait(Config(), Config(limits=replace(limits, max_ttl_s=5, tenants=rules))) == ["limits"]


def test_what_a_reload_changes_at_once() -> None:
    def config(rules: TenantRules, **others: Any) -> Config:
        return Config(limits=replace(Config().limits, tenants=rules), **others)

    one, two = TenantLimits(max_leases=1), TenantLimits(max_leases=2)
    before = config(TenantRules(one, {"ann": one, "bob": two}), max_connections=5)
    assert settings_in_effect(before, before) == []
    after = config(TenantRules(one, {"bob": one, "cy": one}), max_connections=6, state=Path("/state"))
    assert settings_in_effect(before, after) == ["max_connections", "tenants.ann", "tenants.bob", "tenants.cy"]
    lost = ["max_connections", "tenants.default", "tenants.ann", "tenants.bob"]
    assert settings_in_effect(before, Config()) == lost, "an empty file"
    many = config(TenantRules(by_name={f"t{number:03}": one for number in range(100)}))
    listed = settings_in_effect(Config(), many)
    assert listed == [*(f"tenants.t{number:03}" for number in range(MAX_LOGGED_CHANGES)), "and 68 more"]


@pytest.mark.exhaustive
def test_settings_are_read_again(manager: ServiceManager) -> None:
    manager.start_ready(config="")
    with manager.builder().acquire() as lease:
        manager.configure("max_load_s = 60\n[tenants.default]\nmax_leases = 1\nmax_ttl_s = 60\n")
        manager.send(signal.SIGHUP)
        manager.wait_for("READY=1", times=2)
        reloading = manager.said.index("RELOADING=1")
        stamp = manager.said[reloading + 1]
        assert stamp.startswith("MONOTONIC_USEC=")
        assert stamp.removeprefix("MONOTONIC_USEC=").isdigit()
        status = "STATUS=Settings reloaded; these take effect at the next start: max_load_s."
        assert manager.said[reloading + 2 :] == ["READY=1", status]
        # What it has stays; what is asked for from now on is held against the new bounds.
        with pytest.raises(Denied, match="max_leases"):
            manager.builder().acquire()
        with pytest.raises(Denied, match="max_ttl_s"):
            lease.renew(61)
    manager.configure("[tenants.default]\nmax_leases = 2\n")
    manager.send(signal.SIGHUP)
    manager.wait_for("READY=1", times=3)
    with manager.builder().acquire(), manager.builder().acquire(), pytest.raises(Denied, match="max_leases"):
        manager.builder().acquire()
    assert manager.end() == 0
    reloads = [line for line in manager.log().splitlines() if "settings reloaded" in line]
    told = [line.partition("changed=")[2] for line in reloads]
    assert told == ["tenants.default waiting=max_load_s", 'tenants.default waiting=""']


@pytest.mark.exhaustive
def test_a_broken_file_changes_nothing(manager: ServiceManager) -> None:
    manager.start_ready(config="[tenants.default]\nmax_leases = 1\n")
    for broken in ("no_such = 1\n", "[tenants.default\n", *(f"[tenants.default]\n{line}\n" for line in BAD_RULES)):
        manager.configure(broken)
        heard = manager.said.count("READY=1")
        manager.send(signal.SIGHUP)
        manager.wait_for("READY=1", times=heard + 1)
        assert manager.said[-1].startswith("STATUS=Settings not reloaded; the old ones stay in effect: ")
    assert (
        "ERROR   the settings were not reloaded, so the old ones stay in effect: there is no setting no_such"
        in manager.log()
    )
    with manager.builder().acquire(), pytest.raises(Denied, match="max_leases"):
        manager.builder().acquire()
    assert manager.end() == 0


@pytest.mark.exhaustive
def test_the_audit_log_has_the_digest_of_what_holds(manager: ServiceManager) -> None:
    log = manager.folder / "audit"
    first = audit_log.config(log)
    manager.start_ready(config=first)
    for config in (f"max_connections = 7\n{first}", first):
        manager.configure(config)
        heard = manager.said.count("READY=1")
        manager.send(signal.SIGHUP)
        manager.wait_for("READY=1", times=heard + 1)
    assert manager.end() == 0
    start, changed, back, _ = audit_log.records(log)
    assert [one["kind"] for one in (start, changed, back)] == ["start", "operator", "operator"]
    assert changed["data"]["action"] == back["data"]["action"] == "reload"
    assert start["data"]["config"] == back["data"]["config"] != changed["data"]["config"]
    audit_log.check_whole(log)


@pytest.mark.exhaustive
def test_the_web_pages_token_is_read_again(manager: ServiceManager) -> None:
    path = manager.folder / "token"
    port = free_port()
    config = f'http = "127.0.0.1:{port}"\nhttp_token_file = "{path}"\n'
    path.write_text("a" * 32)
    path.chmod(0o600)
    manager.start_ready(config=config)

    def statuses() -> list[int]:
        url = f"http://127.0.0.1:{port}/api/v1/state"
        bearers = [{"Authorization": f"Bearer {letter * 32}"} for letter in "ab"]
        return [httpx.get(url, headers=bearer, timeout=60, trust_env=False).status_code for bearer in bearers]

    assert statuses() == [200, 401]
    for text, told in (
        ("b" * 31, "STATUS=Settings not reloaded; the old ones stay in effect: setting http_token_file: "),
        ("b" * 32, ""),
    ):
        path.write_text(text)
        heard = manager.said.count("READY=1")
        manager.send(signal.SIGHUP)
        manager.wait_for("READY=1", times=heard + 1)
        assert manager.said[-1].startswith(told or "STATUS=Settings reloaded.")
        expected = [200, 401] if told else [401, 200]
        wait_until(lambda: statuses() == expected, "it is what it is to be", seen=statuses)  # noqa: B023
    for without in (config.splitlines()[0], ""):
        manager.configure(without)
        manager.send(signal.SIGHUP)
        wait_until(lambda: statuses() == [401, 401], "there is none any more", seen=statuses)
        manager.configure(config)
        manager.send(signal.SIGHUP)
        wait_until(lambda: statuses() == [401, 200], "there is one again", seen=statuses)
    assert manager.end() == 0


@pytest.mark.exhaustive
def test_without_a_file_there_is_nothing_to_read_again(manager: ServiceManager) -> None:
    manager.start_ready()
    assert manager.end(signal.SIGHUP) == -signal.SIGHUP
    assert "WATCHDOG=1" not in manager.said, "nobody asked for a sign of life"
