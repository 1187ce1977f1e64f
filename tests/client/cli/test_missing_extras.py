"""Commands without the extra that they need: each says which one, and none shows a traceback."""

import subprocess
import sys
from pathlib import Path

import pytest

from helpers.without_extras import environment_without_extras

CLI = "gpulease.client.cli.__main__"


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    return environment_without_extras(tmp_path_factory.mktemp("bare"))


@pytest.mark.parametrize(
    ("module", "words", "extra"),
    [
        ("gpulease.daemon", (), "daemon"),
        (CLI, ("fleet", "fence", "-h"), "daemon,fleet"),
        (CLI, ("serve", "decode", "--demo"), "serve,decode"),
        ("gpulease.client.integrations.kubernetes", ("serve", "--node", "n"), "dra"),
        *(
            pytest.param(*case, marks=pytest.mark.exhaustive)
            for case in (
                (CLI, ("pki", "init", "x"), "daemon"),
                (CLI, ("fleet", "quota", "-h"), "daemon,fleet"),
                (CLI, ("serve", "directory", "-h"), "daemon,fleet"),
                (CLI, ("serve", "gateway", "--demo"), "serve"),
                (CLI, ("serve", "models", "--demo"), "serve"),
                ("gpulease.client.integrations.kubernetes", ("serve", "--node", "n"), "dra"),
            )
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "-".join(value),
)
def test_the_extra_is_named(
    environment: dict[str, str], tmp_path: Path, module: str, words: tuple[str, ...], extra: str
) -> None:
    command = [sys.executable, "-P", "-m", module, *words]
    done = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=120)
    said = done.stdout + done.stderr
    assert "Traceback" not in said
    assert "an internal error of gpulease" not in said
    assert " is not installed" in said
    assert f"pip install '.[{extra}]' in gpulease's repository" in said
    assert done.returncode == (78 if module == "gpulease.daemon" else 1)


@pytest.mark.parametrize("option", ["-h", "--version"])
def test_the_daemon_says_what_it_is_all_the_same(environment: dict[str, str], option: str) -> None:
    command = [sys.executable, "-P", "-m", "gpulease.daemon", option]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stderr) == (0, "")
