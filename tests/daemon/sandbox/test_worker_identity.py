import os
import stat
from pathlib import Path

import pytest

from gpulease.daemon.sandbox.measures import SandboxUnavailable
from gpulease.daemon.sandbox.worker_identity import identity_of

NOBODY = 65534


class Node:
    """A device node as stat(2) tells of it."""

    def __init__(self, mode: int, gid: int, uid: int = 0) -> None:
        self._found = os.stat_result((stat.S_IFCHR | mode, 0, 0, 1, uid, gid, 0, 0, 0, 0))

    def stat(self) -> os.stat_result:
        return self._found

    def __str__(self) -> str:
        return "/dev/node"


@pytest.mark.parametrize(
    ("nodes", "groups"),
    [
        ([], ()),
        ([Node(0o666, 44)], ()),
        ([Node(0o660, 44), Node(0o660, 44), Node(0o660, 109), Node(0o666, 7)], (44, 109)),
        ([Node(0o600, 0, uid=NOBODY)], ()),
        ([Path("/dev/not-there"), Path("/dev")], ()),
    ],
)
def test_only_groups_that_the_devices_need(nodes: list[Path], groups: tuple[int, ...]) -> None:
    identity = identity_of("nobody", tuple(nodes))
    assert (identity.uid, identity.groups) == (NOBODY, groups)


@pytest.mark.parametrize("node", [Node(0o660, 0), Node(0o600, 44)], ids=["root's group", "root alone"])
def test_devices_that_only_root_can_open(node: Path) -> None:
    with pytest.raises(SandboxUnavailable, match="only root can open /dev/node") as caught:
        identity_of("nobody", (node,))
    assert "NVreg_DeviceFileGID" in caught.value.hint


@pytest.mark.parametrize(("name", "why"), [("no-such-user", "does not exist"), ("root", "worker_user is root")])
def test_users_that_workers_can_not_be(name: str, why: str) -> None:
    with pytest.raises(SandboxUnavailable, match=why):
        identity_of(name, ())
