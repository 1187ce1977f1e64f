"""CUDA works with the unit's restrictions: the devices are there, and neither a network nor most of root's rights are
needed.
"""

import os
import shutil
import tempfile
from pathlib import Path

import pytest

from gpulease.client import GpuBuilder, GpuSession
from gpulease.client.sync.driver import ask
from gpulease.protocol import Opcode
from gpulease.protocol.messages import Empty, Inventory
from helpers.hardened_daemon import Hardened
from helpers.kernels import check_main_job
from helpers.nvml import Cards

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(os.geteuid() != 0, reason="only root can shut a process in so"),
    pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd is not installed"),
]


def test_a_session_under_the_unit_s_hardening(cards: Cards) -> None:
    with tempfile.TemporaryDirectory(prefix="gpul-", dir="/tmp") as name:
        daemon = Hardened(Path(name), driver="cuda")
        try:
            daemon.wait_until_it_listens()
            reply = ask(Opcode.GET_INVENTORY, Empty(), daemon.address)
            assert isinstance(reply, Inventory)
            assert {found["measure"]: found["on"] for found in reply.details[0]["sandbox"]}["user"]
            with GpuBuilder(daemon.address).min_vram(256 << 20).acquire() as lease, GpuSession(lease) as session:
                check_main_job(session)
                session.empty(1 << 20, "u1")
            daemon.stop()
        finally:
            daemon.discard()
