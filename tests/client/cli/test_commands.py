"""The command line against a real daemon: commands as people type them, and their output."""

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from gpulease.client.bench import decode_speed
from gpulease.client.bench.decode_speed import DecodePlan
from gpulease.client.cli.__main__ import main
from gpulease.client.cli.bench import _kernel_table
from gpulease.client.console.tables import seconds_text, size_text, table
from gpulease.client.console.transform import transform_ptx
from gpulease.protocol.address import ADDRESS_VARIABLE
from helpers.daemon import Daemon
from helpers.kernels import TRANSFORM

Gpulease = Callable[..., Result]


@pytest.fixture
def gpulease(daemon: Daemon) -> Gpulease:
    """Runs a command with the daemon as its default."""

    def run(*words: str) -> Result:
        return CliRunner().invoke(main, list(words), env={ADDRESS_VARIABLE: daemon.address})

    return run


def test_the_demos_kernels_are_those_of_the_vectors() -> None:
    assert transform_ptx() == TRANSFORM


def test_nobody_answers(tmp_path: Path) -> None:
    done = CliRunner().invoke(main, ["info"], env={ADDRESS_VARIABLE: f"unix:{tmp_path}/nobody"})
    assert done.exit_code == 69
    assert "Is gpuleased running?" in done.stderr
    assert "Traceback" not in done.output


def test_info(gpulease: Gpulease, daemon: Daemon) -> None:
    assert "embedded CPU card" in gpulease("info").stdout
    (card,) = json.loads(gpulease("info", "--json").stdout)
    assert (card["capacity_bytes"], card["fenced_bytes"], card["leases"]) == (6 << 30, 0, 0)


def test_leases_and_revoke(gpulease: Gpulease, daemon: Daemon) -> None:
    assert gpulease("leases").stdout == "No leases.\n"
    with daemon.builder().acquire() as lease:
        listed = gpulease("leases").stdout
        assert lease.lease_id_text in listed
        assert f"uid:{os.getuid()}" in listed
        assert json.loads(gpulease("leases", "--json").stdout)[0]["state"] == "active"
        done = gpulease("revoke", lease.lease_id_text, "--reason", "a test")
        assert (done.exit_code, "has ended, and its memory" in done.stdout) == (0, True)
        assert daemon.query(lease.lease_id)["cause"] == "revoked"
        assert gpulease("leases").stdout == "No leases.\n"


def test_leases_in_columns(gpulease: Gpulease, daemon: Daemon, monkeypatch: pytest.MonkeyPatch) -> None:
    # Who runs the tests may say how wide they are shown, as xdist does.
    monkeypatch.delenv("COLUMNS", raising=False)
    with daemon.builder().acquire() as lease:
        head, row = gpulease("leases").stdout.splitlines()
        assert head.split() == [
            "lease",
            "tenant",
            "GPU",
            "state",
            "slice",
            "used",
            "GPU",
            "time",
            "launches",
            "copies",
            "age",
            "left",
        ]
        # The head stands above its ids whatever they begin with, and so does the tenants'.
        assert (head.index("lease"), row.index(str(lease.lease_id))) == (0, 0)
        assert head.index("tenant") == row.index(f"uid:{os.getuid()}")
        assert row.split()[2] == "0"
        assert gpulease("leases", "--tenant", f"uid:{os.getuid()}").stdout.split("\n")[0].split() == head.split()
        assert gpulease("leases", "--tenant", "ann").stdout == "No leases of ann.\n"
        assert json.loads(gpulease("leases", "--tenant", "ann", "--json").stdout) == []


def test_the_sandbox_is_shown_where_it_is_asked_for(gpulease: Gpulease) -> None:
    assert "extent, or why it is off" in gpulease("info", "--sandbox").stdout
    usual = gpulease("info").stdout
    assert "extent, or why it is off" not in usual
    off = [found["measure"] for found in json.loads(gpulease("info", "--json").stdout)[0]["sandbox"] if not found["on"]]
    assert all(measure in usual for measure in off)


@pytest.mark.parametrize(
    ("word", "status", "said"),
    [
        (f"{0x0123:032x}", 1, f"No such lease: {0x0123:032x}"),
        ("zz", 2, "it must be a lease id"),
        ("4f090dbe", 1, "no lease that you may see has an id that begins with 4f090dbe"),
        ("4f0", 2, "at least the first 4 digits of one"),
        (f"0x{1:030x}", 2, "it must be a lease id"),
    ],
)
def test_revoke_what_is_not_there(gpulease: Gpulease, word: str, status: int, said: str) -> None:
    done = gpulease("revoke", word)
    assert done.exit_code == status
    assert said in done.output


def test_the_first_digits_of_an_id_will_do(gpulease: Gpulease, daemon: Daemon) -> None:
    with daemon.builder().acquire() as lease, daemon.builder().acquire():
        prefix = str(lease.lease_id)[:8].upper()
        done = gpulease("revoke", prefix, "--json")
        assert (done.exit_code, json.loads(done.stdout)["lease_id"]) == (0, str(lease.lease_id))
        assert daemon.query(lease.lease_id)["cause"] == "revoked"
        # It has ended: the digits find nothing, and all of them still do.
        assert gpulease("revoke", prefix).exit_code == 1
        ended = gpulease("events", str(lease.lease_id))
        assert ended.stdout.startswith(f"{lease.lease_id}  ended")


@pytest.mark.parametrize("words", [("revoke", f"{1:032x}", "--reason"), ("fence", "clear")], ids=" ".join)
def test_a_text_that_no_request_can_carry(gpulease: Gpulease, words: tuple[str, ...]) -> None:
    done = gpulease(*words, "ü" * 513)
    assert (done.exit_code, "it has 1026 bytes; at most 1024 are allowed" in done.output) == (2, True)


def test_revoke_for_programs(gpulease: Gpulease, daemon: Daemon) -> None:
    with daemon.builder().acquire() as lease:
        done = gpulease("revoke", lease.lease_id_text, "--json")
        assert json.loads(done.stdout) == {"lease_id": lease.lease_id_text, "outcome": "torndown"}
    done = gpulease("revoke", f"{1:032x}", "--json")
    assert (done.exit_code, json.loads(done.stdout)["outcome"]) == (1, "notfound")


def test_fence_clear(gpulease: Gpulease) -> None:
    assert json.loads(gpulease("fence", "clear", "--json").stdout) == {"cleared": 0}
    assert gpulease("fence", "clear").stdout == "No slice was fenced.\n"


@pytest.mark.exhaustive
def test_bench(gpulease: Gpulease, daemon: Daemon) -> None:
    words = ("--quick", "--launches", "200", "--leases", "1", "--tcp", daemon.tcp_address, "--json")
    done = gpulease("bench", *words)
    assert done.exit_code == 0, done.output
    said = done.stderr.splitlines()
    assert all(line.startswith("bench, ") for line in said)
    for step in ("round 1 of 1", "1 leases that expire", "over 50 flips", "kernels, compared with numpy"):
        assert any(step in line for line in said)
    report = json.loads(done.stdout)
    assert report["gate_flips"] == 50
    floors = {"launch_own_floor_us", "graph_20_call_floor_us"}
    assert set(report["leased"]) - {"launch_own_us"} - floors == set(report["direct"])
    figures = [pair for part in ("leased", "direct", "leases", "bare", "overlap") for pair in report[part].items()]
    # A tenant that is told at its deadline is told after 0 ms.
    assert [name for name, value in figures if not value > 0 and not name.startswith("expiry_told")] == []
    assert 0 < report["gate"]["refused_p50_us"] <= report["gate"]["refused_p99_us"]
    # One may have passed its look already.
    assert report["gate"]["begun_after_flip_most"] <= 1
    assert set(report["tcp"]["ratio"]) == {"write_16m_gb_s", "read_16m_gb_s"}
    assert all(value > 0 for value in report["tcp"]["ratio"].values())
    kernels = report["kernels"]
    assert all(value > 0 for figures in kernels.values() for value in figures.values())
    assert kernels["load_again"]["leased_ms"] < kernels["load_cold"]["leased_ms"]
    assert _kernel_table(kernels).count("\n") == len(kernels) == 7
    assert report["round_trips"]["figures"]["leased"]["sync_idle_p50_us"] > 0
    wrong = gpulease("bench", "--driver", "cuda")
    assert wrong.exit_code == 1
    assert "computes with cpu, not cuda" in wrong.stderr
    assert gpulease("bench", "--rounds", "0").exit_code == 2
    assert gpulease("bench", "--core", "--quick").exit_code == 2


def test_bench_tells_how_to_run_others_beside_it(gpulease: Gpulease) -> None:
    told = gpulease("bench", "--peers").stdout
    assert told.startswith("# Comparing with other remoting systems")
    assert all(way in told for way in ("LD_LIBRARY_PATH", "LD_PRELOAD", "--round-trips --json"))


def test_bench_of_the_decode_engine(gpulease: Gpulease, monkeypatch: pytest.MonkeyPatch) -> None:
    def measured(address: str, plan: DecodePlan, tell: Callable[..., object], say: Callable[..., object]) -> None:
        say(f"{plan.shapes[0]}: measured")
        tell({"figure": "step", "ms": 1.23456})

    monkeypatch.setattr(decode_speed, "measure_decode", measured)
    done = gpulease("bench", "--decode", "--quick")
    title, step = map(json.loads, done.stdout.splitlines())
    assert "embedded" in title["title"]
    assert step == {"figure": "step", "ms": 1.2346}
    assert "two-layers: measured" in done.stderr
    report = json.loads(gpulease("bench", "--decode", "--json").stdout)
    assert (report["title"], report["figures"]) == (title["title"], [{"figure": "step", "ms": 1.23456}])


def test_tables() -> None:
    # An id is no figure, whatever it begins with.
    ids = [["0123", "5 B"], ["45", "10 B"]]
    assert table(["lease", "n"], ids, texts=("lease",)) == "lease     n\n0123    5 B\n45     10 B"
    assert table(["a", "n"], [["x", "5 B"], ["yy", "10 B"]]) == "a      n\nx    5 B\nyy  10 B"
    assert [size_text(size) for size in (5, 2048, 3 << 20, 6 << 30)] == ["5 B", "2 KiB", "3 MiB", "6 GiB"]
    assert [seconds_text(span) for span in (4.24, 200, 7500)] == ["4.2 s", "3 min 20 s", "2 h 05 min"]


def test_a_mistyped_command_is_answered_with_the_one_that_was_meant() -> None:
    done = CliRunner().invoke(main, ["helth"])
    assert done.exit_code == 2
    assert done.output.endswith("Error: No such command 'helth'. Did you mean 'health'?\n")
