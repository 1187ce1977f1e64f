"""The `[fleet]` table: what is taken, and what an operator is told of the rest."""

from pathlib import Path
from typing import Any

import pytest

from gpulease.daemon.config.settings import Config, ConfigError, load_config
from gpulease.daemon.fleet.records.fleet_settings import FleetSettings, Isolated

TABLE = """
[fleet]
etcd = "etcd://h1,h2:2400,[::1]"
ca = "/pki/ca.pem"
certificate = "/pki/node.pem"
key = "/pki/node.key"
node = "gpu1"
addresses = ["tls:gpu1.example:7443"]
labels = { zone = "a", model = "h200" }
horizon_s = 60
isolated = "serve"
history_s = 300
etcd_quota = "8GiB"
"""


def load(tmp_path: Path, text: str, **overrides: Any) -> Config:
    file = tmp_path / "settings.toml"
    file.write_text(text)
    return load_config(file, overrides)


def test_the_whole_table(tmp_path: Path) -> None:
    fleet = load(tmp_path, TABLE).fleet
    assert fleet is not None
    assert fleet.etcd == ("h1:2379", "h2:2400", "[::1]:2379")
    assert (fleet.ca, fleet.certificate, fleet.key) == tuple(
        map(Path, ("/pki/ca.pem", "/pki/node.pem", "/pki/node.key"))
    )
    assert (fleet.node, fleet.addresses, dict(fleet.labels)) == (
        "gpu1",
        ("tls:gpu1.example:7443",),
        {"zone": "a", "model": "h200"},
    )
    assert (fleet.horizon_s, fleet.isolated) == (60, Isolated.SERVE)
    assert (fleet.history_s, fleet.etcd_quota_bytes) == (300, 8 << 30)


def test_the_command_line_names_another_etcd_and_keeps_the_rest_of_the_table(tmp_path: Path) -> None:
    fleet = load(tmp_path, TABLE, fleet="etcd://h9").fleet
    assert fleet is not None
    assert (fleet.etcd, fleet.node) == (("h9:2379",), "gpu1")
    assert load_config(None, {"fleet": "etcd://h9"}).fleet == FleetSettings(("h9:2379",))
    assert load_config(None, {}).fleet is None


@pytest.mark.parametrize(
    ("line", "error"),
    [
        ('node = "gpu1"', "etcd must be given"),
        ('etcd = "http://h1"', "write etcd://"),
        ('etcd = "etcd://"', "must be a member of etcd"),
        ('etcd = "etcd://h1:0"', "must be a member of etcd"),
        ('etcd = "etcd://h1:65536"', "must be a member of etcd"),
        ('etcd = "etcd://h1/x"', "must be a member of etcd"),
        ('etcd = "etcd://h1,h1:2379"', "a member twice"),
        ("etcd = 5", "fleet.etcd must be a string such as etcd://HOST,HOST:PORT, not 5"),
        ('etcd = "etcd://h1"\nca = "ca.pem"', "ca"),
        ('etcd = "etcd://h1"\ncertificate = "/c"', "certificate and key must be given together"),
        ('etcd = "etcd://h1"\ncertificate = "/c"\nkey = "/k"', "certificate needs ca"),
        ('etcd = "etcd://h1"\nnode = "a/b"', "fleet.node must be a node's id, not 'a/b'"),
        ('etcd = "etcd://h1"\naddresses = "tls:a:1"', "a list of addresses"),
        ('etcd = "etcd://h1"\naddresses = ["http:a:1"]', "not an address"),
        ('etcd = "etcd://h1"\nlabels = { "a b" = "c" }', "is not a label"),
        ('etcd = "etcd://h1"\nlabels = { a = 5 }', "is not a label"),
        ('etcd = "etcd://h1"\nhorizon_s = 1', "fleet.horizon_s must be a whole number from 2 to 600, not "),
        ('etcd = "etcd://h1"\nhorizon_s = 30000', "fleet.horizon_s must be a whole number from 2 to 600, not "),
        ('etcd = "etcd://h1"\nisolated = "no"', "fleet.isolated must be 'hold' or 'serve', not 'no'"),
        ('etcd = "etcd://h1"\nhistory_s = 5', "fleet.history_s must be a whole number from 15 to 86400, or 0, not 5"),
        ('etcd = "etcd://h1"\nhistory_s = true', "history_s"),
        ('etcd = "etcd://h1"\netcd_quota = "1MiB"', "at least"),
        ('etcd = "etcd://h1"\netcd_quota = 7', "etcd_quota"),
        ('etcd = "etcd://h1"\ncolour = "red"', "there is no setting fleet.colour"),
    ],
)
def test_what_is_refused(tmp_path: Path, line: str, error: str) -> None:
    with pytest.raises(ConfigError, match=error):
        load(tmp_path, f"[fleet]\n{line}\n")
