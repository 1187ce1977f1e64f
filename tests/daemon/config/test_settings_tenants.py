from pathlib import Path

import pytest

from gpulease.daemon.capabilities.claims import Demand
from gpulease.daemon.config.settings import Config, ConfigError, load_config
from gpulease.daemon.leases.quotas import TenantLimits

WHOLE = """
require_token = ["alloc", "renew"]
token_key_file = "/var/lib/gpulease/token.key"

[limits]
max_leases = 9

[tenant_of_uid]
1000 = "ann"
1001 = "ann"

[tenants.default]
max_vram = "8GiB"
max_leases = 4

[tenants.ann]
max_vram = "40GiB"
acquires_per_minute = 60
acquire_burst = 5
devices = [0, "GPU-8b1e0f5c"]

[tenants."uid:7"]
max_ttl_s = 60
"""


def load(folder: Path, text: str) -> Config:
    path = folder / "config.toml"
    path.write_text(text)
    return load_config(path, {})


def test_the_whole(tmp_path: Path) -> None:
    config = load(tmp_path, WHOLE)
    assert config.require_token == {Demand.ALLOC, Demand.RENEW}
    assert config.token_key_file == Path("/var/lib/gpulease/token.key")
    assert config.tenant_of_uid == {1000: "ann", 1001: "ann"}
    assert config.limits.max_leases == 9
    rules = config.limits.tenants
    assert rules.of("eve") == TenantLimits(max_vram_bytes=8 << 30, max_leases=4)
    assert rules.of("ann") == TenantLimits(40 << 30, 4, None, 60, 5, ("0", "GPU-8b1e0f5c"))
    assert rules.of("uid:7") == TenantLimits(8 << 30, 4, 60)


def test_a_quota_in_the_fleet_needs_a_fleet(tmp_path: Path) -> None:
    text = "[tenants.default]\nfleet_quota = true\n[tenants.'uid:7']\nfleet_quota = false\n"
    rules = load(tmp_path, f"{text}[fleet]\netcd = 'etcd://h1'\n").limits.tenants
    assert (rules.of("uid:8").fleet_quota, rules.of("uid:7").fleet_quota) == (True, False)
    with pytest.raises(ConfigError, match=r"fleet_quota of 'default' needs a \[fleet\] table"):
        load(tmp_path, text)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("[tenants.ann]\nfleet_quota = 5", "tenants.ann.fleet_quota must be true or false, not 5"),
        ("[tenants.ann]\nmax_share = 0", "tenants.ann.max_share must be a whole number from 1 to 100, not 0"),
        ("[tenants.ann]\nmax_weight = 0", "tenants.ann.max_weight must be a whole number from 1 to 65535, not 0"),
        ("[tenants.ann]\nmay_latency = 1", "tenants.ann.may_latency must be true or false, not 1"),
        ("tenants = 5", "table of tables"),
        ("[tenants]\nann = 5", "table of tables"),
        ("[tenants.ann]\nmax_memory = 5", "there is no setting tenants.ann.max_memory"),
        ("[tenants.ann]\nmax_vram = 5", "tenants.ann.max_vram must be a string, not 5"),
        ("[tenants.ann]\nmax_vram = 'much'", "is not a size"),
        ("[tenants.ann]\nmax_leases = true", "tenants.ann.max_leases must be a whole number of at least 1, not True"),
        ("[tenants.ann]\nmax_leases = 0", "tenants.ann.max_leases must be a whole number of at least 1, not 0"),
        ("[tenants.ann]\ndevices = []", "tenants.ann.devices must name a card, or be left out"),
        ("[tenants.ann]\ndevices = '0'", "tenants.ann.devices must be a list of cards' uuids or indexes, not '0'"),
        ("[tenants.'a b']\nmax_leases = 1", "'a b' is not a valid tenant name"),
        ("[tenants.'uid:ann']\nmax_leases = 1", "'uid:ann' is not a valid tenant name"),
        ("[tenant_of_uid]\n01 = 'ann'", "is not a user's number"),
        ("[tenant_of_uid]\n'\u0663' = 'ann'", "is not a user's number"),
        ("[tenant_of_uid]\nann = '1000'", "is not a user's number"),
        ("[tenant_of_uid]\n1000 = 'tcp'", "not a valid tenant name"),
        ("[tenant_of_uid]\n1000 = 'uid:5'", "not a valid tenant name"),
        ("[tenant_of_uid]\n4294967295 = 'ann'", "is not a user's number"),
        ("require_token = ['free']", "require_token must be 'alloc', 'renew' or 'attach', not 'free'"),
        ("token_key_file = 'token.key'", "token_key_file must be an absolute path, not 'token.key'"),
        ("[limits]\ntenants = 5", "there is no setting limits.tenants"),
    ],
)
def test_what_is_wrong(tmp_path: Path, text: str, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        load(tmp_path, text)
