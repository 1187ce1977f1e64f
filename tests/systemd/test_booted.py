"""The units under a systemd that runs them: what no reader of units can tell."""

import json
import os
import re
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from helpers.booted_host import BootedHost, booted_host, missing

pytestmark = [
    pytest.mark.skipif(bool(missing()), reason=missing()),
    # A boot takes seconds, on a busy host many.
    pytest.mark.timeout(240),
]

CLI = ("-P", "-m", "gpulease.client.cli.__main__")


@pytest.fixture
def host() -> Iterator[BootedHost]:
    # Not below /tmp, which the host has one of its own of.
    with tempfile.TemporaryDirectory(prefix="gpul-", dir="/var/tmp") as folder, booted_host(Path(folder)) as host:
        if host is None:
            pytest.skip("no systemd can be booted here")
        yield host


@pytest.mark.exhaustive
def test_sessions_go_on_whatever_becomes_of_the_daemon(host: BootedHost) -> None:
    host.install(driver='"cpu"', vram='["64MiB"]')
    host.do("systemctl", "enable", "--now", "gpuleased.socket", "gpuleased.service")
    tenant = host.start(host.python, "-P", "-m", "helpers.busy_tenant", "600")
    try:
        assert tenant.stdout is not None
        assert tenant.stdout.readline() == "leased\n"
        first = host.shown("MainPID")
        host.do("systemctl", "restart", "gpuleased")
        second = host.leasing(first)
        host.do("kill", "-KILL", second)
        third = host.leasing(second)
        host.do("systemctl", "reload", "gpuleased")
        host.do("kill", "-STOP", third)
        assert host.leasing(third) != third, "the watchdog saw to it"
        said, _ = tenant.communicate(timeout=60)
        assert re.fullmatch(r"[1-9]\d* rounds\n", said), said
        assert tenant.returncode == 0
    finally:
        tenant.kill()
        tenant.communicate()
    (card,) = json.loads(host.do(host.python, *CLI, "info", "--json"))
    # What Landlock does is up to this machine's kernel.
    off = {said["measure"] for said in card["sandbox"] if not said["on"]}
    assert off <= {"files", "device_calls", "network", "scope"}
    host.do("systemctl", "stop", "gpuleased.socket", "gpuleased.service")
    assert host.shown("Result") == "success"


@pytest.mark.exhaustive
def test_all_sockets_are_the_units(host: BootedHost) -> None:
    """The daemon could bind none of them itself: it has no network and no right to make such sockets."""
    host.install(driver='"cpu"', vram='["64MiB"]', http='"127.0.0.1:9400"')
    host.do("systemctl", "enable", "--now", "gpuleased.socket", "gpulease-http.socket", "gpuleased.service")
    asked = "import urllib.request; print(urllib.request.urlopen('http://127.0.0.1:9400/readyz').status)"
    assert host.do(host.python, "-c", asked) == "200\n"
    # Its own socket is kept over a restart, where no unit has it.
    host.do("systemctl", "disable", "--now", "gpuleased.socket")
    host.do("systemctl", "restart", "gpuleased")
    assert host.shown("NFileDescriptorStore") == "1"
    pid = host.shown("MainPID")
    host.do("kill", "-KILL", pid)
    host.do(host.python, *CLI, "info")
    assert host.leasing(pid) != pid


@pytest.mark.exhaustive
def test_an_address_that_the_service_can_not_have(host: BootedHost) -> None:
    def check_it_is_left(says: str) -> None:
        with pytest.raises(AssertionError, match="failed"):
            host.do("systemctl", "start", "gpuleased")
        assert host.shown("ExecMainStatus") == str(os.EX_CONFIG)
        assert (host.shown("NRestarts"), host.shown("ActiveState")) == ("0", "failed")
        assert re.search(says, host.shown("StatusText")), host.shown("StatusText")

    host.install(driver='"cpu"', vram='["64MiB"]', listen='"unix:/srv/d.sock"', http='"127.0.0.1:9400"')
    check_it_is_left("/srv is read-only for the daemon; .*ReadWritePaths=/srv")
    host.do("sed", "--in-place", "/^listen = /d", "/etc/gpulease/gpuleased.toml")
    check_it_is_left("no socket unit passes it to the daemon.* enable gpulease-http.socket, or create a drop-in")


@pytest.mark.exhaustive
@pytest.mark.skipif(Path("/dev/nvidiactl").exists(), reason="there is a driver")
def test_what_no_restart_mends_is_not_started_again(host: BootedHost) -> None:
    host.install(driver='"cuda"')
    with pytest.raises(AssertionError, match="failed"):
        host.do("systemctl", "start", "gpuleased")
    assert host.shown("ExecMainStatus") == str(os.EX_OSERR)
    assert (host.shown("NRestarts"), host.shown("ActiveState")) == ("0", "failed")
    assert "NVML" in host.shown("StatusText")
