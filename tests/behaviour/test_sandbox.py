"""A real daemon's workers run in a sandbox, work nevertheless, and the daemon reports the measures."""

import asyncio
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from gpulease.client import GpuSession, GpuSessionFailed, KernelArgs, Revoked, aio
from gpulease.client.cli.node import info
from gpulease.client.verify.faulty_kernels import compiling_long
from gpulease.daemon.ptx.limits import MAX_FIRST_CODE_THREADS
from gpulease.daemon.sandbox.measures import Measure
from gpulease.daemon.zygote.worker_output import MAX_OUTPUT_BYTES
from gpulease.protocol.limits import MAX_PRINTED_BYTES
from helpers.daemon import Daemon, python_environment, running
from helpers.kernels import Neighbour, check_main_job
from helpers.processes import open_files, status_of
from helpers.waiting import wait_until

LANDLOCK_CREATE_RULESET = 444
BY_LANDLOCK = {"files", "device_calls", "network", "scope"}
BY_ROOT: set[str] = set() if os.geteuid() == 0 else {"user"}
"""Measures that only a daemon of root has."""


def findings(daemon: Daemon) -> dict[str, dict[str, Any]]:
    return {found["measure"]: found for found in daemon.inventory().details[0]["sandbox"]}


def test_a_worker_is_shut_in_as_told_and_does_its_job(daemon: Daemon) -> None:
    found = findings(daemon)
    assert list(found) == [measure.value for measure in Measure]
    with daemon.builder().acquire() as lease, GpuSession(lease) as session:
        check_main_job(session)
        pid = daemon.worker_pid(lease.lease_id)
        status = status_of(pid)
        assert found["user"]["on"] == (int(status["Uid"].split()[0]) != os.geteuid())
        assert found["syscalls"]["on"] == (status["Seccomp"] == "2")
        assert status["NoNewPrivs"] == "1"
        assert [int(status[name], 16) for name in ("CapEff", "CapPrm", "CapInh", "CapAmb")] == [0] * 4
        assert Path(f"/proc/{pid}/oom_score_adj").read_text() == "500\n"
        limits = Path(f"/proc/{pid}/limits").read_text() if os.geteuid() == 0 else "Max core file size 0 0"
        assert [line.split()[4:6] for line in limits.splitlines() if "core file" in line] == [["0", "0"]]


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can look into a worker")
def test_a_worker_has_open_what_its_session_needs(daemon: Daemon) -> None:
    with daemon.builder().acquire() as lease, GpuSession(lease) as session:
        array = session.empty(1024, "f4")
        wanted = [
            "/memfd:gpulease-arena (deleted)",
            "/memfd:gpulease-arena (deleted)",
            "/memfd:gpulease-claims (deleted)",
            "/memfd:gpulease-lease (deleted)",
            "/memfd:gpulease-output (deleted)",
            "/memfd:gpulease-regions (deleted)",
            "/memfd:gpulease-regions (deleted)",
            "/memfd:gpulease-ring (deleted)",
            "pipe",
            "socket",
            "socket",
        ]

        def open_ones() -> list[str]:
            names = [to.partition(":[")[0] for to in open_files(daemon.worker_pid(lease.lease_id)).values()]
            return sorted(name for name in names if name != "/dev/null" and "workers-" not in name)

        # Descriptors for the hand-over of a connection may be open a moment longer.
        wait_until(lambda: open_ones() == wanted, "it has open what it needs", seen=open_ones)
        del array


PRINTS = b"""
.version 8.0
.target sm_75
.address_size 64
.extern .func (.param .b32 r) vprintf(.param .b64 format, .param .b64 values);
.entry show(.param .u64 format)
{
    .reg .b64 %d<3>;
    ld.param.u64 %d1, [format]; mov.u64 %d2, 0;
    .param .b64 a; .param .b64 b; .param .b32 c;
    st.param.b64 [a], %d1; st.param.b64 [b], %d2;
    call (c), vprintf, (a, b);
}
"""


def test_a_kernel_that_prints_reaches_its_tenant_alone(daemon: Daemon) -> None:
    with daemon.builder().acquire() as lease, GpuSession(lease) as session:
        module, text = session.module_load(PRINTS), session.mem_alloc(1024)
        said = "2026-01-01 00:00:00,000 INFO forged\n" * 20
        session.mem_write(text, 0, said.encode() + b"\0")
        args = KernelArgs().push_buffer(text)
        assert session.printed() == ("", False)
        for blocks in (1, 2):
            session.launch(module, "show", [blocks], [1], args)
            assert session.printed() == (said * blocks, False)
        for _ in range(2):
            session.launch(module, "show", [64], [64], args)
            session.sync()
        found = session.printed()
        assert found.is_lost
        assert said in found.text
        assert len(found.text) <= MAX_PRINTED_BYTES
        session.launch(module, "show", [1], [1], args)
        assert session.printed() == (said, False)
        with daemon.builder().acquire() as other, GpuSession(other) as neighbour:
            session.launch(module, "show", [1], [1], args)
            session.sync()
            assert neighbour.printed() == ("", False)
        heard: list[tuple[str, bool]] = []
        session.on_printed(heard.append)
        for _ in range(2):
            session.sync()
            session.launch(module, "show", [1], [1], args)
        # The end of the block syncs as well.
    assert heard == [(said, False)] * 3
    assert "forged" not in daemon.log()


def test_a_callback_on_the_asyncio_face(daemon: Daemon) -> None:
    async def main() -> list[tuple[str, bool]]:
        heard: list[tuple[str, bool]] = []
        builder = aio.GpuBuilder(daemon.address).min_vram(1 << 20)
        async with await builder.acquire() as lease, aio.GpuSession(lease) as session:
            session.on_printed(heard.append)
            module, text = await session.module_load(PRINTS), await session.mem_alloc(16)
            await session.mem_write(text, 0, b"hello\n\0")
            for _ in range(2):
                await session.launch(module, "show", [1], [1], KernelArgs().push_buffer(text))
                await session.sync()
            session.on_printed(None)
            await session.launch(module, "show", [1], [1], KernelArgs().push_buffer(text))
            await session.sync()
        return heard

    assert asyncio.run(main()) == [("hello\n", False)] * 2


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can write for a worker")
def test_a_worker_that_is_taken_over_fills_no_log_and_forges_no_line(daemon: Daemon) -> None:
    with daemon.builder().acquire() as lease, GpuSession(lease) as session:
        pid = daemon.worker_pid(lease.lease_id)

        def is_cut_off() -> bool:
            with suppress(BrokenPipeError):
                Path(f"/proc/{pid}/fd/2").write_bytes(b"2026-01-01 00:00:00,000 INFO forged\n" * 100)
            return "the rest is lost" in daemon.log()

        wait_until(is_cut_off, "it is cut off", seen=lambda: len(daemon.log()))
        check_main_job(session)
    forged = [line for line in daemon.log().splitlines() if "forged" in line]
    record = re.compile(
        r"[-\d]+ [:.\d]+ INFO +output of a worker or its kernel:  "
        rf"lease_id={lease.lease_id:032x} worker_pid={pid} said="
    )
    assert all(record.match(line) for line in forged)
    assert 0 < sum(map(len, forged)) < 3 * MAX_OUTPUT_BYTES


def test_what_is_on_is_shown(daemon: Daemon, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GPULEASE_ADDRESS", daemon.address)
    # Remove the width of the output that the environment may set, as xdist does.
    monkeypatch.delenv("COLUMNS", raising=False)
    shown = CliRunner().invoke(info, ["--sandbox"]).output
    for measure, found in findings(daemon).items():
        (line,) = [line for line in shown.splitlines() if line.split()[:1] == [measure]]
        assert line.split()[1] == ("on" if found["on"] else "OFF")
        assert found["detail"] in line
    assert json.loads(CliRunner().invoke(info, ["--json"]).output) == daemon.inventory().details


@pytest.fixture(scope="module")
def strict() -> Iterator[Daemon]:
    """Yield a daemon that requires all measures but two, and limits compilation to a second."""
    config = 'sandbox = "required"\nsandbox_without = ["user", "syscalls"]\nmax_load_s = 1\n'
    with running(Daemon(config=config)) as daemon:
        yield daemon


@pytest.mark.exhaustive
def test_measures_that_the_operator_does_without(strict: Daemon) -> None:
    daemon = strict
    found = findings(daemon)
    assert {measure for measure in found if not found[measure]["on"]} == {"user", "syscalls"}
    assert found["syscalls"]["detail"] == "left out by sandbox_without"
    with daemon.builder().acquire() as lease, GpuSession(lease) as session:
        check_main_job(session)
        status = status_of(daemon.worker_pid(lease.lease_id))
        assert (int(status["Uid"].split()[0]), status["Seccomp"]) == (os.geteuid(), "0")


def start_lacking(folder: Path, config: str) -> subprocess.Popen[str]:
    """Start a daemon as if the kernel had no Landlock."""
    (folder / "config.toml").write_text(config)
    lacking = [sys.executable, "-P", "-m", "helpers.lacking", str(LANDLOCK_CREATE_RULESET)]
    daemon = [sys.executable, "-P", "-m", "gpulease.daemon", "--driver", "cpu", "--config", str(folder / "config.toml")]
    command = [*lacking, *daemon, "--listen", f"unix:{folder}/d.sock"]
    return subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=python_environment())


def test_a_kernel_without_landlock_is_told_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GPULEASE_ADDRESS", f"unix:{tmp_path}/d.sock")
    with start_lacking(tmp_path, "") as process:
        try:
            assert process.stderr is not None
            assert any("listens on" in line for line in process.stderr)
            (card,) = json.loads(CliRunner().invoke(info, ["--json"]).output)
        finally:
            process.terminate()
    found = {finding["measure"]: finding for finding in card["sandbox"]}
    assert {measure for measure in found if not found[measure]["on"]} == BY_LANDLOCK | BY_ROOT
    assert "no Landlock" in found["files"]["detail"]


@pytest.mark.exhaustive
def test_a_measure_that_is_required_and_can_not_be_had(tmp_path: Path) -> None:
    with start_lacking(tmp_path, 'sandbox = "required"') as process:
        _, said = process.communicate(timeout=60)
    assert process.returncode == os.EX_UNAVAILABLE
    assert "gpuleased: the sandbox is required, and this host lacks " in said
    assert "files (this kernel has no Landlock" in said
    assert "Traceback" not in said


@pytest.mark.exhaustive
def test_an_image_that_compiles_for_too_long_ends_its_lease(strict: Daemon) -> None:
    daemon = strict
    with daemon.builder().acquire() as other, GpuSession(other) as beside:
        neighbour = Neighbour(beside)
        lease = daemon.builder().acquire()
        session = GpuSession(lease)
        with pytest.raises(GpuSessionFailed, match="took more than 1 s to compile"):
            session.module_load(compiling_long(500))
        wait_until(lambda: neighbour.check() and daemon.query(lease.lease_id)["state"] == "torndown", "it is over")
        report = daemon.query(lease.lease_id)
        assert (report["cause"], report["reason"]) == ("load_timeout", "an image took more than 1 s to compile")


MANY = [MAX_FIRST_CODE_THREADS // 256], [256]


def slow_to_compile() -> bytes:
    """Return PTX that is translated at once but takes LLVM over a minute, because all its registers stay live.

    Only optimising takes that long. It is done before the first launch if that has MANY threads.
    """
    count = 200
    body = "".join(
        f"L{n}: add.u32 %r{n * 31 % count}, %r{n * 17 % count}, %r{n * 13 % count}; setp.eq.u32 %p, %r{n}, 5;"
        f" @%p bra L{n * 7 % count};\n"
        for n in range(count)
    )
    head = ".version 8.0\n.target sm_75\n.address_size 64\n"
    return f"{head}.entry slow() {{ .reg .u32 %r<{count}>; .reg .pred %p; bar.sync 1;\n{body} ret; }}".encode()


def launch_slow(session: GpuSession) -> None:
    session.launch(session.module_load(slow_to_compile()), "slow", *MANY, KernelArgs())
    session.sync()


def record_slow(session: GpuSession) -> None:
    module = session.module_load(slow_to_compile())
    with session.record():
        session.launch(module, "slow", *MANY, KernelArgs())


@pytest.mark.parametrize("use", [launch_slow, pytest.param(record_slow, marks=pytest.mark.exhaustive)])
def test_a_kernel_that_compiles_for_too_long_ends_its_lease(strict: Daemon, use: Callable[[GpuSession], None]) -> None:
    daemon = strict
    with daemon.builder().acquire() as other, GpuSession(other) as beside:
        neighbour = Neighbour(beside)
        lease = daemon.builder().acquire()
        session = GpuSession(lease)
        with pytest.raises(GpuSessionFailed, match="took more than 1 s to compile"):
            use(session)
        wait_until(lambda: neighbour.check() and daemon.query(lease.lease_id)["state"] == "torndown", "it is over")
        report = daemon.query(lease.lease_id)
        assert (report["cause"], report["reason"]) == ("load_timeout", "an image took more than 1 s to compile")


def test_a_lease_is_revoked_in_time_while_its_kernel_compiles(daemon: Daemon) -> None:
    lease = daemon.builder().acquire()
    session = GpuSession(lease)
    session.launch(session.module_load(slow_to_compile()), "slow", *MANY, KernelArgs())
    daemon.revoke(lease.lease_id)
    with pytest.raises(Revoked):
        session.sync()
    wait_until(lambda: daemon.query(lease.lease_id)["state"] == "torndown", "it is over")
