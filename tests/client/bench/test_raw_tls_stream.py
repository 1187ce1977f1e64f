"""The measure for copies over TLS: a raw stream between two programs of openssl."""

import shutil
from pathlib import Path

import pytest

from gpulease.client.bench.remote import make_certificates, openssl_stream_rate
from gpulease.client.cli.bench import _raw_tls


@pytest.fixture
def _files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, path in make_certificates(tmp_path)[1].items():
        monkeypatch.setenv(name, path)


@pytest.mark.skipif(shutil.which("openssl") is None, reason="openssl is not installed")
@pytest.mark.usefixtures("_files")
def test_a_stream_goes_through_whole() -> None:
    rate = openssl_stream_rate(8 << 20)
    assert rate is not None
    assert rate > 0


def test_a_host_without_openssl_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    assert openssl_stream_rate() is None
    assert "not measured" in _raw_tls({})


def test_copies_are_compared_with_it() -> None:
    told = _raw_tls({"openssl_gb_s": 0.5, "write_16m_gb_s": 2.0})
    assert told.endswith("0.50 GB/s. TLS here / that: mem_write 16 MiB 2.00.")
