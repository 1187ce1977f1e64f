"""Reads a daemon's audit log as an auditor would, with `gpulease audit`."""

import json
from pathlib import Path
from typing import Any

from click.testing import CliRunner, Result

from gpulease.daemon.record.audit.__main__ import main
from gpulease.daemon.record.audit.files import log_files
from helpers.daemon import Daemon


def config(folder: Path, *, required: bool = False, **more: str) -> str:
    """Return settings of a daemon that keeps its audit log in `folder`."""
    settings = {"audit": json.dumps(str(folder)), "audit_required": str(required).lower()} | more
    return "".join(f"{key} = {value}\n" for key, value in settings.items())


def gpulease_audit(*words: str | Path) -> Result:
    return CliRunner().invoke(main, [str(word) for word in words])


def check_whole(folder: Path) -> int:
    """Return the number of records of a log. Fails unless `gpulease audit` verifies the log."""
    done = gpulease_audit("verify", "--json", folder)
    assert done.exit_code == 0, done.output
    return int(json.loads(done.stdout)["records"])


def records(folder: Path) -> list[dict[str, Any]]:
    """Return all records, read with plain JSON, without the product's code."""
    lines = b"".join(path.read_bytes() for path in log_files(folder)).split(b"\n")
    found = []
    for line in lines:
        try:
            found.append(json.loads(line))
        except ValueError:
            continue  # An incomplete line that a crash left. `check_whole` checks whether it was reported.
    return found


def kinds(folder: Path) -> list[str]:
    return [record["kind"] for record in records(folder)]


def usage(folder: Path) -> dict[str, Any]:
    done = gpulease_audit("usage", "--json", folder)
    assert done.exit_code == 0, done.output
    found = json.loads(done.stdout)
    assert isinstance(found, dict)
    return found


def stop(daemon: Daemon) -> None:
    """Stop a daemon cleanly, so that its log is complete."""
    daemon.process.terminate()
    assert daemon.wait_for_exit() == 0, daemon.log()
