"""`gpulease install-service`: the units that it prints, the files that it writes, and its errors."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from gpulease.client.cli import service
from gpulease.client.cli.__main__ import main
from gpulease.client.cli.service import OPERATORS_OWN, PLACES, UNITS, Environment, filled_in, quoted, this_environment

HOME = str(Path("/home", "ann"))
IN_OPT = Environment(("/opt/g/bin/gpuleased",), (), (Path("/opt/g"),))


@pytest.fixture(autouse=True)
def _installed_in_opt(monkeypatch: pytest.MonkeyPatch) -> None:
    """The folder that these tests run from is no place for a service."""
    monkeypatch.setattr(service, "this_environment", lambda: IN_OPT)


def run(*arguments: str) -> tuple[int, str, str]:
    done = CliRunner().invoke(main, ["install-service", *arguments])
    return done.exit_code, done.stdout, done.stderr


@pytest.mark.parametrize(
    ("word", "as_option", "elsewhere"),
    [
        ("/opt/g/bin/gpuleased", "/opt/g/bin/gpuleased", "/opt/g/bin/gpuleased"),
        ("/opt/my gpus/bin", '"/opt/my gpus/bin"', '"/opt/my gpus/bin"'),
        ("/opt/50%", "/opt/50%%", "/opt/50%%"),
        ("/opt/$HOME", "/opt/$$HOME", "/opt/$HOME"),
        ('/opt/"a\\b', '"/opt/\\"a\\\\b"', '"/opt/\\"a\\\\b"'),
        ("/opt/a;b", '"/opt/a;b"', '"/opt/a;b"'),
    ],
)
def test_words_that_systemd_reads_in_its_own_way(word: str, as_option: str, elsewhere: str) -> None:
    assert quoted(word, is_option=True) == as_option
    assert quoted(word) == elsewhere


def test_every_file_has_a_place() -> None:
    """A Containerfile is for hosts without systemd."""
    assert set(PLACES) == {path.name for path in UNITS.iterdir() if path.is_file()} - {"Containerfile"}


def test_they_are_printed_unless_it_is_said() -> None:
    for arguments in ((), ("--print",), ("--print", "--install")):
        status, said, _ = run(*arguments)
        assert status == 0
        assert "\nExecStart=/opt/g/bin/gpuleased --config /etc/gpulease/gpuleased.toml\n" in said
        assert all(f"# --- /{place}\n" in said for place in PLACES.values())


def test_a_root_without_install_writes_nothing_and_says_so(tmp_path: Path) -> None:
    status, said, complaint = run("--root", str(tmp_path))
    assert (status, list(tmp_path.iterdir())) == (0, [])
    assert "# --- /" in said
    assert f"nothing was written below {tmp_path}, because --install is missing" in complaint


def test_they_are_installed_once_and_the_settings_are_the_operator_s(tmp_path: Path) -> None:
    status, said, _ = run("--install", "--root", str(tmp_path))
    assert status == 0
    assert said.count("is written") == len(PLACES)
    assert "systemctl enable --now gpuleased.socket gpuleased.service" in said
    assert {path.relative_to(tmp_path).as_posix() for path in tmp_path.rglob("*") if path.is_file()} == {
        *PLACES.values()
    }
    settings, unit = tmp_path / PLACES["gpuleased.toml"], tmp_path / PLACES["gpuleased.service"]
    assert unit.stat().st_mode & 0o777 == 0o644
    settings.write_text("max_load_s = 5\n")
    unit.write_text("[Service]\n")
    status, said, _ = run("--install", "--root", str(tmp_path))
    assert status == 0
    assert said.count("is up to date") == len(PLACES) - 2
    assert f"{settings} was not changed: it is the operator's own file" in said
    assert f"{unit} is replaced" in said
    assert settings.read_text() == "max_load_s = 5\n"
    assert "gpuleased --config" in unit.read_text()


def test_a_place_that_can_not_be_written(tmp_path: Path) -> None:
    (tmp_path / "etc").write_text("precious")
    status, said, complaint = run("--install", "--root", str(tmp_path))
    assert status == 1
    assert not said
    assert "gpuleased.service can't be written: Not a directory" in complaint


def test_an_empty_root_is_no_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    status, said, complaint = run("--install", "--root", "")
    assert status == 2
    assert "it is empty" in complaint
    assert not said
    assert not any(tmp_path.iterdir())


def test_a_place_that_the_service_would_not_see(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    hidden = Environment(("/tmp/mine/bin/gpuleased",), (), (Path("/tmp/mine"),))
    monkeypatch.setattr(service, "this_environment", lambda: hidden)
    status, said, complaint = run("--install")
    assert status == 1
    assert not said
    assert "the service could not see /tmp/mine" in complaint
    status, _, complaint = run("--install", "--root", str(tmp_path))
    assert status == 0
    assert "the service could not see /tmp/mine" in complaint


def test_a_python_in_a_home_can_be_read() -> None:
    text = (UNITS / "gpuleased.service").read_text()
    assert "\nProtectHome=yes\n" in filled_in("gpuleased.service", text, IN_OPT)
    at_home = Environment((f"{HOME}/bin/gpuleased",), (f"PYTHONPATH={HOME}/my code",), (Path(HOME),))
    filled = filled_in("gpuleased.service", text, at_home)
    assert "\nProtectHome=read-only\n" in filled
    assert f'\nEnvironment="PYTHONPATH={HOME}/my code"\nExecStart={HOME}/bin/gpuleased --config' in filled


def test_the_decode_server_is_started_by_the_daemon_s_python() -> None:
    text = (UNITS / "gpulease-decode.service").read_text()
    command = "serve decode /etc/gpulease/decode.toml"
    assert f"\nExecStart=/opt/g/bin/gpulease {command}\n" in filled_in("gpulease-decode.service", text, IN_OPT)
    checkout = Environment(("/usr/bin/python", "-P", "-m", "gpulease.daemon"), ("PYTHONPATH=/src",), ())
    filled = filled_in("gpulease-decode.service", text, checkout)
    assert f"\nEnvironment=PYTHONPATH=/src\nExecStart=/usr/bin/python -P -m gpulease.client.cli {command}\n" in filled


def test_this_environment_starts_a_daemon() -> None:
    environment = this_environment()
    variables = dict(variable.split("=", 1) for variable in environment.variables)
    command = [*environment.command, "--version"]
    done = subprocess.run(command, env=variables, capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.startswith("gpuleased, version")


def test_a_client_alone_has_no_service(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(service, "find_spec", lambda name: None)
    monkeypatch.setattr(service, "this_environment", this_environment)
    status, _, complaint = run()
    assert status == 1
    assert "the daemon is not installed" in complaint


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd-analyze is not installed")
def test_systemd_finds_the_daemon_in_an_odd_place(tmp_path: Path) -> None:
    place = tmp_path / "50% of $HOME; and more"
    place.mkdir()
    for program in ("gpuleased", "gpulease"):
        (place / program).symlink_to(sys.executable)
    odd = Environment((str(place / "gpuleased"),), (), ())
    units = [tmp_path / name for name in PLACES if name.endswith((".service", ".socket"))]
    for unit in units:
        unit.write_text(filled_in(unit.name, (UNITS / unit.name).read_text(), odd))
    done = subprocess.run(
        ["systemd-analyze", "verify", *units], capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.returncode, done.stdout + done.stderr) == (0, "")


def test_the_manual_removes_all_that_is_installed() -> None:
    manual = (UNITS.parent / "daemon" / "manual" / "systemd.md").read_text(encoding="utf-8")
    uninstalling = manual.partition("## Uninstalling")[2].partition("\n## ")[0]
    removed = {word for line in uninstalling.splitlines() if line.startswith("rm -f ") for word in line.split()[2:]}
    assert removed == {f"/{path}" for name, path in PLACES.items() if name != OPERATORS_OWN}
    assert f"`/{Path(PLACES[OPERATORS_OWN]).parent}`" in uninstalling
