"""Outcomes of hostile code in the sandbox, computed once for each set of measures."""

import json
import subprocess
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from helpers.daemon import python_environment


@pytest.fixture(scope="session")
def imprisoned(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., dict[str, Any]]:
    """Return a function that runs `helpers.prisoner` without the given measures, for some attempts or for all."""

    @cache
    def found(without: tuple[str, ...] = (), only: tuple[str, ...] = ()) -> dict[str, Any]:
        folder = tmp_path_factory.mktemp("prison")
        # Everybody may access the folder, so that only the sandbox prevents an access, and not the folder's owner.
        folder.chmod(0o777)
        for name in ("readable", "writable"):
            (folder / name).write_text(name)
            (folder / name).chmod(0o666)
        return run_prisoner(folder, without, only)

    return found


def run_prisoner(folder: Path, without: tuple[str, ...], only: tuple[str, ...]) -> dict[str, Any]:
    command = [sys.executable, "-P", "-m", "helpers.prisoner", str(folder), json.dumps(without), json.dumps(only)]
    ended = subprocess.run(command, capture_output=True, text=True, env=python_environment(), timeout=60, check=False)
    assert ended.returncode == 0, ended.stderr
    left = {path.name: path.read_text() for path in folder.iterdir()}
    assert left == {"readable": "readable", "writable": "writable"}
    told: dict[str, Any] = json.loads(ended.stdout)
    return told
