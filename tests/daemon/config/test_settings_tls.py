from pathlib import Path
from typing import Any

import pytest

from gpulease.daemon.config.settings import ConfigError, load_config
from gpulease.daemon.remote.tls_settings import TlsSettings, parse_certificate_names, parse_tls

FILES: dict[str, Any] = {"certificate": "/c", "key": "/k", "client_ca": "/a"}
NEEDED = (Path("/c"), Path("/k"), Path("/a"))


def test_what_is_not_said_is_refused_or_off() -> None:
    assert parse_tls(FILES) == TlsSettings(*NEEDED)
    settings = parse_tls(FILES | {"crl": "/r", "operators": ["ops"], "max_connections": 9})
    assert settings == TlsSettings(*NEEDED, Path("/r"), frozenset({"ops"}), 9, 9)


@pytest.mark.parametrize(
    ("table", "why"),
    [
        ([], "must be a table"),
        ({}, "certificate must be given, and key, and client_ca"),
        (FILES | {"ca": "/x"}, "there is no setting ca"),
        (FILES | {"key": "k"}, "key must be an absolute path, not 'k'"),
        (FILES | {"key": "/k\0"}, "key must be an absolute path, not "),
        (FILES | {"operators": "ops"}, "must be a list"),
        (FILES | {"operators": ["tcp"]}, "not a valid tenant name"),
        (FILES | {"max_connections": 0}, "max_connections must be a whole number of at least 1, not 0"),
        (FILES | {"max_connections": True}, "max_connections must be a whole number of at least 1, not True"),
        (
            FILES | {"max_connections": 4, "max_connections_per_tenant": 5},
            "max_connections_per_tenant must be at most max_connections",
        ),
    ],
)
def test_wrong_settings_are_told(table: Any, why: str) -> None:
    with pytest.raises(ValueError, match=why):
        parse_tls(table)


@pytest.mark.parametrize(
    ("table", "why"),
    [
        ({}, "it is empty: add a certificate, or leave the table out"),
        ({"ann.example": "ann"}, "is not a valid certificate name"),
        ({"DNS:*.example": "ann"}, "without wildcards"),
        ({"DNS:ann.example": "default"}, "not a valid tenant name"),
        ("ann", "must be a table"),
    ],
)
def test_wrong_names_are_told(table: Any, why: str) -> None:
    with pytest.raises(ValueError, match=why):
        parse_certificate_names(table)


def test_a_tls_address_needs_certificates(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"need a \[tls\] table"):
        load_config(None, {"listen": ["tls:127.0.0.1:1"]})
    file = tmp_path / "config.toml"
    file.write_text('[tls]\ncertificate = "/c"\nkey = "/k"\nclient_ca = "/a"\n[tenant_of_certificate]\n"DNS:a" = "b"\n')
    config = load_config(file, {"listen": ["tls:127.0.0.1:1"]})
    assert config.tls == TlsSettings(*NEEDED)
    assert dict(config.tenant_of_certificate) == {"DNS:a": "b"}
