"""A daemon's audit log, read as an auditor would: by `gpulease audit`."""

import json
from pathlib import Path
from typing import Any

from click.testing import CliRunner, Result

from gpulease.daemon.record.audit.__main__ import main
from gpulease.daemon.record.audit.files import log_files
from helpers.daemon import Daemon


def config(folder: Path, *, required: bool = False, **more: str) -> str:
    """Settings of a daemon that keeps its log in `folder`."""
    settings = {"audit": json.dumps(str(folder)), "audit_required": str(required).lower()} | more
    return "".join(f"{key} = {value}\n" for key, value in settings.items())


def gpulease_audit(*words: str | Path) -> Result:
    return CliRunner().invoke(main, [str(word) for word in words])


def check_whole(folder: Path) -> int:
    """Fails unless the log verifies; how many records it has."""
    done = gpulease_audit("verify", "--json", folder)
    assert done.exit_code == 0, done.output
    return int(json.loads(done.stdout)["records"])


def records(folder: Path) -> list[dict[str, Any]]:
    """All records, by any reader of JSON: no code of ours."""
    lines = b"".join(path.read_bytes() for path in log_files(folder)).split(b"\n")
    found = []
    for line in lines:
        try:
            found.append(json.loads(line))
        except ValueError:
            continue  # What a crash left; `check_whole` says whether it was reported.
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
    """End a daemon in good order, so that its log is complete."""
    daemon.process.terminate()
    assert daemon.wait_for_exit() == 0, daemon.log()
