"""Commands in the fleet's manual, extracted to be run."""

import re
import shutil
import subprocess
from pathlib import Path
from textwrap import dedent

import pytest

_MANUAL = Path(__file__).parents[2] / "daemon/manual/fleet.md"


def restore_commands(tool: str = "etcdctl") -> tuple[str, str]:
    """Return the manual's commands that restore etcd: one for each member, and one for the whole cluster.

    Skips the test if `tool` is etcdutl and the installed one can't raise revisions.
    """
    section = _MANUAL.read_text().partition("\n## Restore etcd\n")[2].partition("\n## ")[0]
    restore, renew = (
        dedent(block) for block in re.findall(r"^ *```sh\n(.*?)^ *```$", section, re.MULTILINE | re.DOTALL)
    )
    if tool == "etcdutl":
        (more,) = re.findall(r"run `etcdutl` instead of `etcdctl`, and add `(.+?)`", section)
        restore = f"{restore.rstrip()} {more}".replace("etcdctl", "etcdutl")
        asked = ["etcdutl", "snapshot", "restore", "--help"]
        if not shutil.which(tool) or "--bump-revision" not in subprocess.check_output(asked, text=True):
            pytest.skip("SKIPPED FOR WANT OF etcdutl of etcd 3.6")
    return restore, renew
