"""The units run by systemd on real cards: CUDA works with all their restrictions."""

import json
import re
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from helpers.booted_host import BootedHost, booted_host, missing
from helpers.nvml import Cards

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(bool(missing()), reason=missing()),
    pytest.mark.timeout(240),
]

CLI = ("-P", "-m", "gpulease.client.cli.__main__")


@pytest.fixture
def host(cards: Cards) -> Iterator[BootedHost]:
    used = cards.used_bytes()
    with (
        tempfile.TemporaryDirectory(prefix="gpul-", dir="/var/tmp") as folder,
        booted_host(Path(folder), has_cards=True) as host,
    ):
        if host is None:
            pytest.skip("no systemd can be booted here")
        yield host
    cards.check_back_to(used)


def can_be_opened(host: BootedHost, *properties: str) -> bool:
    """Return whether a unit with these properties can open the driver's first device."""
    unit = "\n".join(["[Service]", "Type=oneshot", "ExecStart=/bin/sh -c ': </dev/nvidiactl'", *properties, ""])
    host.do("sh", "-c", 'printf %s "$1" >/run/systemd/system/opening.service', "sh", unit)
    host.do("systemctl", "daemon-reload")
    host.said("systemctl", "start", "opening.service")
    status = host.said("systemctl", "show", "opening.service", "--property=ExecMainStatus", "--value")
    return status == "0"


def test_cuda_lives_with_the_units(host: BootedHost) -> None:
    assert not can_be_opened(host, "DevicePolicy=closed"), "this systemd does keep devices from units"
    assert can_be_opened(host, "DevicePolicy=closed", "DeviceAllow=char-nvidia rw")
    host.install(driver='"cuda"')
    host.do("systemctl", "enable", "--now", "gpuleased.socket", "gpuleased.service")
    first = host.leasing()
    tenant = host.start(host.python, "-P", "-m", "helpers.busy_tenant", "600")
    try:
        assert tenant.stdout is not None
        assert tenant.stdout.readline() == "leased\n"
        host.do("systemctl", "restart", "gpuleased")
        second = host.leasing(first)
        host.do("kill", "-KILL", second)
        assert host.leasing(second) != second
        said, _ = tenant.communicate(timeout=90)
        assert re.fullmatch(r"[1-9]\d* rounds\n", said), said
        assert tenant.returncode == 0
    finally:
        tenant.kill()
        tenant.communicate()
    cards = json.loads(host.do(host.python, *CLI, "info", "--json"))
    off = {said["measure"] for card in cards for said in card["sandbox"] if not said["on"]}
    assert off <= {"files", "device_calls", "network", "scope"}, "what Landlock does is up to this machine's kernel"
    host.do("systemctl", "stop", "gpuleased.socket", "gpuleased.service")
    assert host.shown("Result") == "success"
