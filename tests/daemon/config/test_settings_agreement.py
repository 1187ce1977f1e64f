from pathlib import Path

import pytest

from gpulease.daemon.config.settings import (
    ConfigError,
    check_park_memory,
    check_worker_user,
    load_config,
    missing_devices,
    park_memory_problem,
)
from gpulease.daemon.host.memory_limit import MemoryLimit
from gpulease.daemon.leases.devices import Card
from gpulease.daemon.leases.quotas import CoreLimits, TenantLimits, TenantRules

TLS = '[tls]\ncertificate = "/c"\nkey = "/k"\nclient_ca = "/a"\n'
ANN = "[tenants.ann]\nmax_leases = 1\n"
NAMED = '[tenant_of_certificate]\n"DNS:build.example" = "build"\n'


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("text", "said"),
    [
        (ANN, "tenants: 'ann' matches no tenant; give a user or a certificate this name"),
        (f'{ANN}[tenant_of_uid]\n1000 = "anne"\n', "'ann' matches no tenant"),
        (f"{ANN}{TLS}{NAMED}", "'ann' matches no tenant"),
        (
            '[tenants."uid:7"]\nmax_leases = 1\n[tenant_of_uid]\n7 = "ann"\n',
            "'uid:7' matches no user, because .* 'ann'",
        ),
        ("[tenants.gpuleased]\nmax_leases = 1\n", "'gpuleased' is not a valid tenant name"),
        (NAMED, "tenant_of_certificate needs a .tls. table"),
        (f'{TLS}operators = ["root"]\n{NAMED}', "tls: operators contains 'root', but no certificate"),
        (
            "[limits]\nmax_ttl_s = 60\n[tenants.default]\nmax_ttl_s = 61\n",
            "max_ttl_s of 'default' must be at most 60, .*, not 61",
        ),
    ],
)
def test_what_would_be_said_of_nobody(tmp_path: Path, text: str, said: str) -> None:
    path = tmp_path / "c.toml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=said):
        load_config(path, {})


@pytest.mark.parametrize(
    "text",
    [
        f'{ANN}[tenant_of_uid]\n1000 = "ann"\n',
        f"{ANN}{TLS}",
        f'{ANN}{TLS}{NAMED}"URI:ann" = "ann"\n',
        f'{ANN}{TLS}{NAMED}[tenant_of_uid]\n1000 = "ann"\n',
        f'{TLS}operators = ["build"]\n{NAMED}',
        '[tenants."uid:7"]\nmax_ttl_s = 9\n[tenants.tcp]\nmax_leases = 1\n[tenants.default]\nmax_leases = 2\n',
    ],
)
def test_what_is_said_of_somebody(tmp_path: Path, text: str) -> None:
    path = tmp_path / "c.toml"
    path.write_text(text)
    assert load_config(path, {})


def test_cards_are_named_as_tenants_name_them() -> None:
    cards = [Card("GPU-ab12", 0, "A", 100, 10), Card("MIG-cd34", 1, "B", 100, 10)]
    assert missing_devices(TenantRules(TenantLimits(devices=("0", "gpu-AB12", "ab12", "MIG-cd34"))), cards) == []
    assert missing_devices(TenantRules(by_name={"ann": TenantLimits(devices=("0", "GPU-zz"))}), cards) == [
        "tenants: devices of 'ann' contains 'GPU-zz'; the cards of this host are 0 (GPU-ab12), 1 (MIG-cd34)"
    ]


def test_workers_are_a_user_who_is_there_and_not_root() -> None:
    check_worker_user("nobody")
    for name, said in (
        ("gpulease-nobody", "the user 'gpulease-nobody' does not exist; create it"),
        ("root", "'root' is root"),
    ):
        with pytest.raises(ValueError, match=f"worker_user: {said}"):
            check_worker_user(name)


def test_parked_bytes_beyond_the_hosts_memory_are_reported() -> None:
    host = MemoryLimit(64 << 30, "this host's memory")
    assert park_memory_problem(CoreLimits(park_memory_bytes=64 << 30), host) == ""
    assert park_memory_problem(CoreLimits(park_memory_bytes=65 << 30), host) == (
        "limits.park_memory is 69793218560 bytes (65.0 GiB), "
        "but this host's memory is only 68719476736 bytes (64.0 GiB)"
    )


def test_parked_bytes_fit_into_the_control_groups_limit() -> None:
    check_park_memory(CoreLimits(park_memory_bytes=1 << 60), None)
    most = MemoryLimit(64 << 30, "the limit in /sys/fs/cgroup/a/memory.max")
    check_park_memory(CoreLimits(park_memory_bytes=64 << 30), most)
    said = (
        r"limits.park_memory must be at most 68719476736 bytes \(64.0 GiB\), the limit in /sys/.*max, not 68719476737"
    )
    with pytest.raises(ValueError, match=said):
        check_park_memory(CoreLimits(park_memory_bytes=(64 << 30) + 1), most)
