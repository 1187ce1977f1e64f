"""`gpulease bench`: what a lease costs, beside the same driver called directly, in one run."""

import contextlib
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from importlib.resources import as_file, files
from pathlib import Path
from typing import Any, Final

import click

from gpulease.client.bench.core import run_core
from gpulease.client.bench.ends import SPIN_PTX, expiry, revocation
from gpulease.client.bench.gateway import request_figures
from gpulease.client.bench.graphs import graph_figures
from gpulease.client.bench.kernels import kernel_figures
from gpulease.client.bench.leased import acquisition, bulk_copies, copy_sizes, hot_path, warm_acquisition
from gpulease.client.bench.load import run_load
from gpulease.client.bench.overlap import overlap
from gpulease.client.bench.remote import NoCertificates, make_certificates, remote_figures
from gpulease.client.bench.stream import stream_rates
from gpulease.client.bench.submits import SUBMIT_ROWS, submit_figures
from gpulease.client.cli.demo import transform_ptx
from gpulease.client.cli.private_daemon import CannotStart, private_daemon, running_address
from gpulease.client.cli.reports import first_card
from gpulease.client.cli.tables import card_title, seconds_text, table

DIRECT_TIMEOUT_S: Final = 300
"""For one round of direct calls; a hung driver must not hang the benchmark."""

GATE_FLIPS: Final = 400
"""For a 99th percentile that means something; each takes milliseconds."""

WARM_CONTEXTS: Final = 2
"""Of the private daemon that warm leases are measured on: one to take, and one that the next is made beside."""

ROUNDS: Final = 3
LAUNCHES: Final = 20_000
LEASES: Final = 30
"""Acquired one after the other, and left to expire, and revoked."""

QUICK_ROUNDS: Final = 1
QUICK_LAUNCHES: Final = 5_000
QUICK_LEASES: Final = 5
QUICK_GATE_FLIPS: Final = 50
QUICK_REQUEST_S: Final = 1.0
QUICK_MINUTES: Final = 1.0
"""Of `--quick`: about a minute in all. The 99th percentiles are then the worst of a few."""

REQUEST_CONTEXTS: Final = 4
"""Of the pool that requests of one lease each are measured on."""

REQUEST_S: Final = 5.0
"""How long each load is kept up."""

LOAD_MINUTES: Final = 10.0

_ROWS: Final = (
    ("launch_pipelined_us", "launch, pipelined", "us"),
    ("launch_own_us", "launch, its caller's own share", "us"),
    ("launch_sync_p50_us", "launch + sync, p50", "us"),
    ("launch_sync_p99_us", "launch + sync, p99", "us"),
    ("sync_p50_us", "sync, p50", "us"),
    ("calls_20_us", "20 launches, pipelined", "us"),
    ("graph_20_us", "a graph of 20 launches, pipelined", "us"),
    ("graph_20_call_us", "a graph of 20 launches, the call alone, p50", "us"),
    ("calls_20_sync_p50_us", "20 launches + sync, p50", "us"),
    ("graph_20_sync_p50_us", "a graph of 20 launches + sync, p50", "us"),
    ("graph_20_rebound_p50_us", "with another value in each launch + sync, p50", "us"),
    ("alloc_free_p50_us", "alloc + free 1 MiB, p50", "us"),
    ("write_16m_gb_s", "mem_write 16 MiB of any array", "GB/s"),
    ("read_16m_gb_s", "mem_read 16 MiB to any array", "GB/s"),
    ("write_256m_gb_s", "mem_write 256 MiB of any array", "GB/s"),
    ("read_256m_gb_s", "mem_read 256 MiB to any array", "GB/s"),
    ("arena_write_16m_gb_s", "mem_write 16 MiB of the arena / pinned", "GB/s"),
    ("arena_read_16m_gb_s", "mem_read 16 MiB to the arena / pinned", "GB/s"),
    ("arena_write_256m_gb_s", "mem_write 256 MiB of the arena / pinned", "GB/s"),
    ("arena_read_256m_gb_s", "mem_read 256 MiB to the arena / pinned", "GB/s"),
    ("write_4k_p50_us", "mem_write 4 KiB, p50", "us"),
    ("write_4k_pipelined_us", "mem_write 4 KiB, pipelined", "us"),
    ("read_4k_p50_us", "mem_read 4 KiB, p50", "us"),
)
_LEASE_ROWS: Final = (
    ("acquire_p50_ms", "acquire to first answer, p50"),
    ("acquire_p99_ms", "acquire to first answer, p99"),
    ("first_kernel_p50_ms", "acquire to the end of a kernel never seen, p50"),
    ("first_kernel_p99_ms", "acquire to the end of a kernel never seen, p99"),
    ("warm_acquire_p50_ms", "the same with a warm context: to first answer, p50"),
    ("warm_acquire_p99_ms", "the same with a warm context: to first answer, p99"),
    ("warm_first_kernel_p50_ms", "the same with a warm context: to the kernel's end, p50"),
    ("warm_first_kernel_p99_ms", "the same with a warm context: to the kernel's end, p99"),
    ("free_p50_ms", "free to memory proved free, p50"),
    ("free_p99_ms", "free to memory proved free, p99"),
    ("expiry_told_p50_ms", "deadline to the tenant's error, endless kernel, p50"),
    ("expiry_told_p99_ms", "deadline to the tenant's error, endless kernel, p99"),
    ("expiry_free_p50_ms", "deadline to memory proved free, endless kernel, p50"),
    ("expiry_free_p99_ms", "deadline to memory proved free, endless kernel, p99"),
    ("revoke_told_p50_ms", "revoke to the tenant's error, endless kernel, p50"),
    ("revoke_told_p99_ms", "revoke to the tenant's error, endless kernel, p99"),
    ("revoke_free_p50_ms", "revoke to memory proved free, endless kernel, p50"),
    ("revoke_free_p99_ms", "revoke to memory proved free, endless kernel, p99"),
    *SUBMIT_ROWS,
)
_BARE_ROWS: Final = (
    ("open_p50_ms", "fork to a context that answers, p50"),
    ("open_p99_ms", "fork to a context that answers, p99"),
    ("reap_p50_ms", "SIGKILL to reaped, endless kernel, p50"),
    ("reap_p99_ms", "SIGKILL to reaped, endless kernel, p99"),
)
_TCP_ROWS: Final = (
    ("write_16m_gb_s", "mem_write 16 MiB"),
    ("read_16m_gb_s", "mem_read 16 MiB"),
    ("write_256m_gb_s", "mem_write 256 MiB"),
    ("read_256m_gb_s", "mem_read 256 MiB"),
)
_TLS_ROWS: Final = (
    ("connect_p50_ms", "connect to the first answer, p50", "ms"),
    ("connect_p99_ms", "connect to the first answer, p99", "ms"),
    *(row for row in _ROWS if not row[0].startswith("arena_")),
)
_GATE_ROWS: Final = (
    ("refused_p50_us", "flip to the typed refusal, us, p50"),
    ("refused_p99_us", "flip to the typed refusal, us, p99"),
    ("begun_after_flip_most", "launches begun after the flip, most"),
)
_OVERLAP_ROWS: Final = (
    ("one_stream_ms", "copy, kernel, copy back in one stream, ms"),
    ("two_streams_ms", "the same in two streams in turn, ms"),
    ("one_to_two", "copy/kernel overlap: one stream / two"),
)
_KERNEL_ROWS: Final = (
    ("matmul", "tiled matmul 256 x 256 x 256"),
    ("saxpy", "saxpy 1M"),
    ("softmax", "softmax 256 x 1024"),
    ("layernorm", "layernorm 256 x 1024"),
    ("small", "saxpy of 32 in one block"),
    ("load_cold", "load these kernels, never seen"),
    ("load_again", "load them in another worker"),
)

Figures = dict[str, float]
Say = Callable[[str], object]
"""Tells whoever waits what is measured next."""

_POSITIVE: Final = click.IntRange(min=1)


@click.command()
@click.option("--driver", type=click.Choice(["auto", "cuda", "cpu"]), default="auto", help="Of a private daemon.")
@click.option("--quick", is_flag=True, help="Fewer samples of everything: about a minute.")
@click.option("--rounds", type=_POSITIVE, help="Leased and direct in turn; medians are shown: 3, or 1 with --quick.")
@click.option("--launches", type=_POSITIVE, help="Launches pipelined in a round: 20,000, or 5,000 with --quick.")
@click.option(
    "--leases",
    type=_POSITIVE,
    help="Acquired and freed, and as many left to expire, and revoked: 30, or 5 with --quick. At a time: with --load"
    " 200, --core 10,000.",
)
@click.option("--tcp", default="", help="Where the daemon that runs listens for TCP, to measure that too.")
@click.option(
    "--tls", default="", help="Where it listens for TLS; GPULEASE_TLS_CERTIFICATE, _KEY and _CA name the files."
)
@click.option("--gateway", is_flag=True, help="Instead, requests a second on one lease each, on private daemons.")
@click.option("--core", is_flag=True, help="Instead, the lease core alone: grants and renewals a second, lateness.")
@click.option("--load", is_flag=True, help="Instead, whether a private daemon grows under leases that come and go.")
@click.option("--minutes", type=click.FloatRange(min=0.01), help="Of --load: 10, or 1 with --quick.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead.")
def bench(
    driver: str,
    quick: bool,
    rounds: int | None,
    launches: int | None,
    leases: int | None,
    tcp: str,
    tls: str,
    gateway: bool,
    core: bool,
    load: bool,
    minutes: float | None,
    as_json: bool,
) -> None:
    """Measure leases on the daemon that runs, or on a private one. A line on stderr says what is measured next."""
    say = _said_with_the_time()
    if core and quick:
        raise click.UsageError("--core takes --leases, not --quick")
    if load or core:
        if load:
            run_load(leases, minutes or (QUICK_MINUTES if quick else LOAD_MINUTES), as_json)
        else:
            say("the lease core alone")
            run_core(leases, as_json)
        return
    if gateway:
        figures = _requests(driver, QUICK_REQUEST_S if quick else REQUEST_S, say)
        click.echo(json.dumps(figures, indent=2) if as_json else _request_table(figures))
        return
    rounds = rounds or (QUICK_ROUNDS if quick else ROUNDS)
    launches = launches or (QUICK_LAUNCHES if quick else LAUNCHES)
    leases, flips = leases or (QUICK_LEASES if quick else LEASES), QUICK_GATE_FLIPS if quick else GATE_FLIPS
    report = _beside_direct_calls(driver, rounds, launches, leases, flips, tcp, tls, say)
    click.echo(json.dumps(report, indent=2) if as_json else _tables(report))


def _said_with_the_time() -> Say:
    """Tell each step on stderr, in a plain line: a terminal shows it, and a log keeps it."""
    began_s = time.monotonic()
    return lambda text: click.echo(f"bench, {seconds_text(time.monotonic() - began_s)}: {text}", err=True)


def _beside_direct_calls(
    driver: str, rounds: int, launches: int, leases: int, flips: int, tcp: str, tls: str, say: Say
) -> dict[str, Any]:
    with contextlib.ExitStack() as stack:
        running = address = running_address()
        if address is None:
            tcp = f"tcp:127.0.0.1:{_free_port()}"
            settings = _certificates(stack)
            tls = f"tls:127.0.0.1:{_free_port()}" if settings else ""
            also_at = (tcp, tls) if tls else (tcp,)
            say("starting a private daemon")
            address = stack.enter_context(private_daemon(driver, also_at=also_at, settings=settings))
        card = first_card(address)
        if driver not in ("auto", card["driver"]):
            raise CannotStart(f"the daemon at {address} computes with {card['driver']}, not {driver}: stop it first")
        leased, by_socket, direct = _rounds(address, card["driver"], rounds, launches, say)
        say(f"{leases} leases and submits, acquired and freed")
        lease_figures = _acquisition(address, leases, has_pool=card["warm_wanted"] > 0)
        say(f"{leases} leases that expire under an endless kernel")
        lease_figures |= expiry(address, leases)
        say(f"{leases} leases that are revoked under one")
        lease_figures |= revocation(address, leases)
        say(f"{leases} contexts without a lease")
        bare = _bare(card, leases)
        say(f"how soon a worker stops launching, over {flips} flips")
        gate = _gate(card, flips)
        over_tcp, over_tls = _remote(tcp, tls, launches, copy_sizes(card["driver"]), rounds, say)
        say("kernels beside numpy")
        kernels = kernel_figures(address)
        say("copies and kernels in two streams")
        overlapped = overlap(address, card["driver"])
    if running is None:
        say(f"{leases} leases and submits with warm contexts")
        with private_daemon(driver, warm_contexts=WARM_CONTEXTS) as address:
            lease_figures |= _acquisition(address, leases, has_pool=True)
    report = {
        "title": card_title(card["driver"], card["name"], card["uuid"]),
        "driver": card["driver"],
        "card": card["name"],
        "leased": leased,
        "leased_by_socket": by_socket,
        "direct": direct,
        "ratio": {name: round(leased[name] / direct[name], 3) for name in leased if direct.get(name)},
        "tcp": over_tcp,
        "tls": over_tls,
        "lease_samples": leases,
        "leases": {name: round(value, 2) for name, value in lease_figures.items()},
        "bare": {name: round(value, 2) for name, value in bare.items()},
        "gate_flips": flips,
        "gate": {name: round(value, 1) for name, value in gate.items()},
        "overlap": {name: round(value, 3) for name, value in overlapped.items()},
        "kernels": {
            name: {figure: round(value, 4) for figure, value in figures.items()} for name, figures in kernels.items()
        },
    }
    if "acquire_p50_ms" in lease_figures:
        report["acquire_to_bare"] = round(lease_figures["acquire_p50_ms"] / bare["open_p50_ms"], 3)
    if "pycuda_call_us" in direct:
        report["launch_to_pycuda_call"] = round(leased["launch_pipelined_us"] / direct["pycuda_call_us"], 3)
    return report


def _remote(
    tcp: str, tls: str, launches: int, sizes: tuple[int, ...], rounds: int, say: Say
) -> tuple[dict[str, Figures], dict[str, Figures]]:
    """What is measured over TCP, and over TLS; nothing where there is no such address."""
    over_tcp: dict[str, Figures] = {}
    over_tls: dict[str, Figures] = {}
    if tcp:
        say("copies over TCP")
        over_tcp = _over_tcp(tcp, sizes, rounds)
    if tls and tcp:
        say("calls and copies over TLS beside TCP")
        over_tls = _over_tls(tls, tcp, launches, sizes, rounds)
    return over_tcp, over_tls


def _requests(driver: str, seconds: float, say: Say) -> dict[str, dict[str, dict[str, float]]]:
    figures, count, again = {}, REQUEST_CONTEXTS, 'recycle = "same-tenant"\n'
    daemons = {"fresh contexts": (0, ""), f"pool of {count}": (count, ""), "the tenant's own again": (count, again)}
    for name, (contexts, settings) in daemons.items():
        say(f"requests of one lease each, {name}")
        with private_daemon(driver, warm_contexts=contexts, settings=settings) as address:
            figures[name] = request_figures(address, seconds, has_pool=bool(contexts))
    return figures


def _request_table(figures: dict[str, dict[str, dict[str, float]]]) -> str:
    rows = [
        [pool, load, *(f"{found[name]:.1f}" if name in found else "" for name in ("per_s", "p50_ms", "p99_ms"))]
        for pool, loads in figures.items()
        for load, found in loads.items()
    ]
    return table(["a lease each", "requests", "a second", "p50 ms", "p99 ms"], rows)


def _rounds(address: str, driver: str, rounds: int, launches: int, say: Say) -> tuple[Figures, Figures, Figures]:
    leased: list[Figures] = []
    by_socket: list[Figures] = []
    direct: list[Figures] = []
    for number in range(1, rounds + 1):
        say(f"round {number} of {rounds}: launches and copies, the driver called directly")
        direct.append(_direct(driver, launches))
        for figures, shared, way in ((leased, True, "shared memory"), (by_socket, False, "its socket")):
            say(f"round {number} of {rounds}: launches and copies, in a session through {way}")
            more = bulk_copies(address, copy_sizes(driver), shared_memory=shared)
            more |= graph_figures(address, transform_ptx(), 500, shared_memory=shared)
            figures.append(hot_path(address, transform_ptx(), launches, 500, shared_memory=shared) | more)
    return _medians(leased), _medians(by_socket), _medians(direct)


def _acquisition(address: str, leases: int, *, has_pool: bool) -> Figures:
    """Of a daemon with a pool, the warm figures alone: there, it is chance what a lease gets in between."""
    figures = warm_acquisition(address, leases) if has_pool else acquisition(address, leases)
    return figures | submit_figures(address, transform_ptx(), leases, has_pool=has_pool)


def _over_tcp(address: str, sizes: tuple[int, ...], rounds: int) -> dict[str, Figures]:
    leased = _medians([bulk_copies(address, sizes) for _ in range(rounds)])
    stream = _medians([stream_rates(sizes) for _ in range(rounds)])
    leased = {name: leased[name] for name in stream}
    return {
        "leased": leased,
        "stream": stream,
        "ratio": {name: round(leased[name] / stream[name], 3) for name in stream},
    }


def _over_tls(tls: str, tcp: str, launches: int, sizes: tuple[int, ...], rounds: int) -> dict[str, Figures]:
    by_tls, by_tcp = (
        _medians([remote_figures(address, transform_ptx(), launches, sizes) for _ in range(rounds)])
        for address in (tls, tcp)
    )
    return {"tls": by_tls, "tcp": by_tcp, "ratio": {name: round(by_tls[name] / by_tcp[name], 3) for name in by_tls}}


def _certificates(stack: contextlib.ExitStack) -> str:
    """Settings of a private daemon that this process can reach by TLS until the stack is left; none if it can't be."""
    folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="gpulease-"))
    try:
        settings, environment = make_certificates(Path(folder))
    except NoCertificates as error:
        click.echo(f"gpulease bench: TLS is left out: {error}", err=True)
        return ""
    before = dict.fromkeys(environment, "") | {name: os.environ[name] for name in environment if name in os.environ}
    os.environ.update(environment)
    stack.callback(os.environ.update, before)
    return settings


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


def _direct(driver: str, launches: int) -> Figures:
    sizes = [str(size) for size in copy_sizes(driver)]
    with as_file(files("gpulease.client.cli").joinpath("transform.ptx")) as ptx:
        return _in_a_process("direct", driver, str(ptx), str(launches), "500", *sizes)


def _bare(card: dict[str, Any], count: int) -> Figures:
    return _in_a_process("bare", card["driver"], card["uuid"], str(count), standard_input=SPIN_PTX)


def _gate(card: dict[str, Any], flips: int) -> Figures:
    with as_file(files("gpulease.client.cli").joinpath("transform.ptx")) as ptx:
        return _in_a_process("revocation", card["driver"], card["uuid"], str(ptx), str(flips))


def _in_a_process(module: str, *words: str, standard_input: bytes = b"") -> Figures:
    """What a module of the daemon's measures, run by itself. Raises CannotStart."""
    command = [sys.executable, "-P", "-m", f"gpulease.daemon.bench.{module}", *words]
    done = subprocess.run(command, input=standard_input, capture_output=True, timeout=DIRECT_TIMEOUT_S, check=False)
    try:
        figures: Figures = json.loads(done.stdout.splitlines()[0])
    except (IndexError, ValueError):
        said = (done.stderr.decode(errors="replace").strip() or "no output").splitlines()[-1]
        raise CannotStart(f"the direct calls failed: {said}") from None
    return figures


def _medians(rounds: list[Figures]) -> Figures:
    return {name: round(statistics.median(figures[name] for figures in rounds), 3) for name in rounds[0]}


def _tables(report: dict[str, Any]) -> str:
    maps = [report[key] for key in ("leased", "leased_by_socket", "direct", "ratio")]
    leased, by_socket, direct, ratio = (found for found in maps if isinstance(found, dict))
    rows = [
        [text, *(_shown(figures, name) for figures in (leased, by_socket, direct)), unit, _shown(ratio, name)]
        for name, text, unit in _ROWS
        if name in leased
    ]
    parts = [str(report["title"]), table(["", "leased", "by socket", "direct", "unit", "leased/direct"], rows)]
    if "launch_to_pycuda_call" in report:
        parts.append(
            f"pipelined launch / pycuda Function.__call__ ({direct['pycuda_call_us']:.2f} us): "
            f"{report['launch_to_pycuda_call']}"
        )
    if report["tcp"]:
        parts.append(_tcp_table(report["tcp"]))
    if report["tls"]:
        columns = [report["tls"][column] for column in ("tls", "tcp", "ratio")]
        rows = [
            [text, *(_shown(figures, key) for figures in columns[:2]), unit, _shown(columns[2], key)]
            for key, text, unit in _TLS_ROWS
            if key in columns[0]
        ]
        parts.append(table(["through sockets on loopback", "TLS", "TCP", "unit", "TLS/TCP"], rows))
    for name, head, texts in (
        ("leases", f"over {report['lease_samples']} leases, ms", _LEASE_ROWS),
        ("bare", f"over {report['lease_samples']} processes without a lease, ms", _BARE_ROWS),
        ("gate", f"a worker that launches as fast as it can, over {report['gate_flips']} flips", _GATE_ROWS),
        ("overlap", "streams, for each piece", _OVERLAP_ROWS),
    ):
        figures = report[name]
        if isinstance(figures, dict):
            parts.append(table([head, ""], [[text, f"{figures[key]:.2f}"] for key, text in texts if key in figures]))
    if "acquire_to_bare" in report:
        parts.append(f"acquire to first answer / fork to a context that answers, p50: {report['acquire_to_bare']}")
    if isinstance(report["kernels"], dict):
        parts.append(_kernel_table(report["kernels"]))
    return "\n\n".join(parts)


def _shown(figures: Figures, name: str) -> str:
    return f"{figures[name]:.2f}" if name in figures else ""


def _tcp_table(tcp: dict[str, Figures]) -> str:
    columns = [tcp[column] for column in ("leased", "stream", "ratio")]
    rows = [[text, *(f"{figures[key]:.2f}" for figures in columns)] for key, text in _TCP_ROWS if key in tcp["ratio"]]
    return table(["over TCP on loopback, GB/s", "leased", "a plain stream", "leased/stream"], rows)


def _kernel_table(kernels: dict[str, Figures]) -> str:
    rows = []
    for name, text in _KERNEL_ROWS:
        figures = kernels[name]
        shown = [f"{figures[column]:.3f}" if column in figures else "" for column in ("leased_ms", "numpy_ms", "ratio")]
        rates = [f"{figures[rate]:.2f}" if rate in figures else "" for rate in ("gflop_s", "gflop_s_per_core")]
        rows.append([text, *shown, *rates])
    return table(["kernel with its wait, ms", "leased", "numpy", "leased/numpy", "GFLOP/s", "a core"], rows)
