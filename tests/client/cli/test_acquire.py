"""`gpulease acquire`, `renew` and `free`: a lease that outlives the command, found by other programs."""

import json
import re
import subprocess
import sys

import pytest
from click.testing import CliRunner

from gpulease.client.cli.__main__ import main
from gpulease.client.core.lease_request import LEASE_ID_VARIABLE
from gpulease.protocol.address import ADDRESS_VARIABLE
from gpulease.protocol.lease_ids import lease_id_of
from helpers.daemon import Daemon, python_environment, running

LIMIT_S = 120
GPULEASE = f'{sys.executable} -P -c "from gpulease.entry_points import gpulease; gpulease()"'
ACQUIRE = f"{GPULEASE} acquire --vram 1MiB"
ATTACH = (
    f"{sys.executable} -P -c 'from gpulease.client import GpuSession\n"
    "with GpuSession.attach() as session: print(session.lease.lease_id, session.lease.address, session.mem_alloc(4))'"
)


def shell(daemon: Daemon, script: str, **environment: str) -> "subprocess.CompletedProcess[str]":
    """Run a script to its end, in a shell that knows the daemon's address alone."""
    variables = python_environment() | {ADDRESS_VARIABLE: daemon.address} | environment
    return subprocess.run(
        ["bash", "-c", script], env=variables, capture_output=True, text=True, timeout=LIMIT_S, check=False
    )


def acquired(daemon: Daemon, *words: str) -> dict[str, object]:
    done = shell(daemon, f"{ACQUIRE} --json {' '.join(words)}")
    assert (done.returncode, done.stderr) == (0, "")
    found: dict[str, object] = json.loads(done.stdout)
    return found


def test_a_shell_acquires_other_programs_attach_and_it_frees(daemon: Daemon) -> None:
    done = shell(
        daemon,
        f'eval "$({ACQUIRE} --for 5m)" && {ATTACH} && {ATTACH} && {GPULEASE} renew --for 7m && {GPULEASE} free',
    )
    assert (done.returncode, done.stderr) == (0, "")
    first, second, renewed, freed = done.stdout.splitlines()
    lease_id = first.split()[0]
    assert first.split()[1] == daemon.address
    assert second.split()[0] == lease_id
    # Of the time some has passed when the daemon tells what is left.
    assert re.fullmatch(rf"Lease {lease_id} lasts for (7 min 00|6 min \d+) s\.", renewed)
    assert freed == f"Lease {lease_id} was freed."
    report = daemon.query(lease_id_of(lease_id))
    assert (report["cause"], report["generation"]) == ("freed", 2)


def test_it_prints_what_any_shell_evaluates(daemon: Daemon) -> None:
    # Unquoted, a shell joins the lines.
    done = shell(daemon, f"{ACQUIRE} | tee /dev/stderr | (eval $(cat); {GPULEASE} free)")
    lines = done.stderr.splitlines()
    assert lines[0] == f"export {ADDRESS_VARIABLE}={daemon.address};"
    found = re.fullmatch(rf"export {LEASE_ID_VARIABLE}=([0-9a-f]{{32}});", lines[1])
    assert found is not None
    assert len(lines) == 2
    assert done.stdout == f"Lease {found[1]} was freed.\n"


def test_an_address_that_a_shell_would_take_apart_is_quoted(daemon: Daemon) -> None:
    link = daemon.folder / "a $(touch b)'s"
    link.symlink_to(daemon.socket_path)
    done = shell(
        daemon,
        f'cd {daemon.folder} && eval "$({ACQUIRE})" && echo "$GPULEASE_ADDRESS" && {GPULEASE} free --json',
        GPULEASE_ADDRESS=f"unix:{link}",
    )
    link.unlink()
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[0] == f"unix:{link}"
    assert not (daemon.folder / "b").exists()


def test_a_program_reads_json(daemon: Daemon) -> None:
    found = acquired(daemon, "--for", "90s", "--device", "0")
    lease_id = str(found["lease_id"])
    assert 0 < int(str(found["ttl_ms"])) <= 90_000
    assert {key: found[key] for key in ("address", "generation", "size_bytes", "environment")} == {
        "address": daemon.address,
        "generation": 1,
        "size_bytes": 1 << 20,
        "environment": {ADDRESS_VARIABLE: daemon.address, LEASE_ID_VARIABLE: lease_id},
    }
    (report,) = daemon.leases()
    assert report["card_uuid"] == found["card_uuid"]
    assert "name" not in found
    assert (report["weight"], report.get("park")) == (1, None)
    renewed = json.loads(shell(daemon, f"{GPULEASE} renew {lease_id} --for 2m --json").stdout)
    assert (renewed["lease_id"], renewed["generation"]) == (lease_id, 2)
    assert 90_000 < renewed["ttl_ms"] <= 120_000
    assert json.loads(shell(daemon, f"{GPULEASE} free {lease_id[:8]} --json").stdout) == {"lease_id": lease_id}
    assert daemon.leases() == []


def test_it_lasts_though_nobody_is_connected_whatever_the_node_s_default(daemon: Daemon) -> None:
    found = acquired(daemon)
    report = daemon.query(lease_id_of(str(found["lease_id"])))
    assert (report["state"], report["orphan_ms"], report.get("orphaned_in_ms")) == ("active", 0, None)
    assert shell(daemon, f"{GPULEASE} free", GPULEASE_LEASE_ID=str(found["lease_id"])).returncode == 0


def test_its_weight_and_class_are_those_of_the_options() -> None:
    with running(Daemon(config="[tenants.default]\nmax_weight = 3\nmay_latency = true\n")) as daemon:
        found = acquired(daemon, "--weight", "3", "--latency")
        (report,) = daemon.leases()
        assert (report["weight"], report["latency"]) == (3, True)
        assert shell(daemon, f"{GPULEASE} free {found['lease_id']}").returncode == 0


@pytest.mark.parametrize(
    ("output", "status", "said"),
    [
        (">/dev/full", 74, "can't read or write: No space left on device"),
        (">&-", 1, "the lease can't be printed because standard output is closed"),
    ],
)
def test_no_lease_is_left_that_nobody_was_told_of(daemon: Daemon, output: str, status: int, said: str) -> None:
    done = shell(daemon, f"{ACQUIRE} {output}")
    assert (done.returncode, done.stderr) == (status, f"gpulease: {said}\n")
    assert daemon.leases() == []


@pytest.mark.parametrize(
    ("words", "status", "said"),
    [
        ("acquire", 2, "Missing option '--vram'"),
        ("acquire --vram many", 2, "'many' is not a size"),
        ("acquire --vram 1MiB --label zone", 2, "must be KEY=VALUE, not"),
        ("acquire --vram 1MiB --weight 0", 2, "0 is not in the range 1<=x<=65535"),
        ("acquire --vram 1MiB --park-idle 30s", 2, "--park-idle needs --parkable"),
        ("acquire --vram 1MiB --latency", 1, "may_latency"),
        ("acquire --vram 1MiB --device 9", 1, "No card matches"),
        ("acquire --vram 1MiB --name model-a", 1, "fleet"),
        ("free", 2, "Missing argument 'LEASE_ID'"),
        ("renew", 2, "Missing argument 'LEASE_ID'"),
        (f"free {7:032x}", 1, "NotFound"),
        (f"renew {7:032x}", 1, "NotFound"),
    ],
)
def test_what_can_t_be_done_is_said(daemon: Daemon, words: str, status: int, said: str) -> None:
    done = CliRunner().invoke(main, words.split(), env={ADDRESS_VARIABLE: daemon.address})
    assert (done.exit_code, said in done.stderr, done.stdout) == (status, True, ""), done.stderr
    assert daemon.leases() == []


def test_a_lease_is_given_back_once(daemon: Daemon) -> None:
    lease_id = acquired(daemon)["lease_id"]
    assert shell(daemon, f"{GPULEASE} free {lease_id}").returncode == 0
    again = shell(daemon, f"{GPULEASE} free {lease_id}")
    assert (again.returncode, "LeaseFreed" in again.stderr) == (1, True), again.stderr


def test_it_imports_no_arrays(daemon: Daemon) -> None:
    code = (
        "import sys; from gpulease.client.cli.__main__ import main\n"
        "try: main(['acquire', '--vram', '1MiB'])\n"
        "except SystemExit: pass\n"
        "print('numpy' in sys.modules, file=sys.stderr)"
    )
    done = shell(daemon, f'eval "$({sys.executable} -P -c "$CODE")"; {GPULEASE} free', CODE=code)
    assert (done.returncode, done.stderr) == (0, "False\n")
