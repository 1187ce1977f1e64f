"""The units as systemd's own tools see them."""

import os
import re
import shutil
import stat
import subprocess
from configparser import ConfigParser
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from gpulease.client.cli.__main__ import main
from gpulease.client.cli.service import PLACES, UNITS
from gpulease.daemon.config.settings import load_config

MAX_EXPOSURE = 2.0

needs_systemd = pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd is not installed")


@pytest.fixture
def installed(tmp_path: Path) -> Path:
    """The top of a file system that the service was installed into."""
    done = CliRunner().invoke(main, ["install-service", "--install", "--root", str(tmp_path)])
    assert done.exit_code == 0, done.output
    return tmp_path


def of(name: str) -> ConfigParser:
    """A unit's settings, where each stands once."""
    parser = ConfigParser(strict=False, interpolation=None, delimiters=("=",), comment_prefixes=("#",))
    parser.optionxform = str  # type: ignore[assignment,method-assign]
    parser.read(UNITS / name)
    return parser


def analyze(*arguments: str) -> "subprocess.CompletedProcess[str]":
    command = ["systemd-analyze", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


@needs_systemd
def test_they_are_well_formed(installed: Path) -> None:
    units = [str(installed / place) for name, place in PLACES.items() if name.endswith((".service", ".socket"))]
    done = analyze("verify", *units)
    assert (done.returncode, done.stdout + done.stderr) == (0, "")


@needs_systemd
@pytest.mark.parametrize("name", ["gpuleased.service", "gpulease-decode.service"])
def test_services_are_exposed_to_little(installed: Path, name: str) -> None:
    unit = str(installed / PLACES[name])
    done = analyze("security", "--offline=yes", "--no-pager", f"--threshold={MAX_EXPOSURE * 10:g}", unit)
    found = re.search(r"Overall exposure level for \S+: ([\d.]+)", done.stdout)
    assert found, done.stderr
    assert float(found[1]) <= MAX_EXPOSURE, done.stdout
    assert done.returncode == 0


@pytest.mark.skipif(shutil.which("systemd-sysusers") is None, reason="systemd-sysusers is not installed")
def test_users_and_folders(installed: Path) -> None:
    files = [str(installed / PLACES[name]) for name in ("gpulease.sysusers", "gpulease.tmpfiles")]
    subprocess.run(["systemd-sysusers", f"--root={installed}", files[0]], check=True, capture_output=True, timeout=60)
    groups = dict(line.split(":")[::2] for line in (installed / "etc/group").read_text().splitlines())
    users = (installed / "etc/passwd").read_text()
    config = load_config(UNITS / "gpuleased.toml", {})
    assert f"{config.worker_user}:" in users
    assert of("gpuleased.socket")["Socket"]["SocketGroup"] in groups
    if os.geteuid() != 0:
        pytest.skip("only root can give folders away")
    command = ["systemd-tmpfiles", f"--root={installed}", "--create", files[1]]
    subprocess.run(command, check=True, capture_output=True, timeout=60)
    folder = (installed / "run/gpulease").stat()
    assert stat.S_IMODE(folder.st_mode) == 0o2750
    assert folder.st_gid == int(groups["gpulease"])


def test_what_no_restart_mends_is_not_restarted() -> None:
    service = of("gpuleased.service")["Service"]
    mended_by_none = {click.UsageError.exit_code, os.EX_DATAERR, os.EX_OSERR, os.EX_NOPERM, os.EX_CONFIG}
    assert {*map(int, service["RestartPreventExitStatus"].split())} == mended_by_none


def test_what_sessions_and_cuda_need() -> None:
    service = of("gpuleased.service")["Service"]
    assert service["KillMode"] == "process"
    assert service["Type"] == "notify"
    assert int(service["FileDescriptorStoreMax"]) > 0
    assert service["LimitMEMLOCK"] == "infinity"
    for name in ("PrivateDevices", "MemoryDenyWriteExecute", "ProcSubset", "PrivateUsers"):
        assert name not in service


def test_a_socket_is_where_the_settings_have_it() -> None:
    config = load_config(UNITS / "gpuleased.toml", {})
    assert [str(address) for address in config.listen] == [f"unix:{of('gpuleased.socket')['Socket']['ListenStream']}"]
    assert config.state == Path("/var/lib") / of("gpuleased.service")["Service"]["StateDirectory"]
    assert str(config.listen[0]) in (UNITS / "gpuleased.toml").read_text()
    assert (
        f"tls:[::]:{of('gpulease-tls.socket')['Socket']['ListenStream']}" in (UNITS / "gpulease-tls.socket").read_text()
    )
