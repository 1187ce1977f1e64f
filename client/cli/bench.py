"""`gpulease bench`: the command and its tables; `client.bench` does the measuring."""

import contextlib
import sys
import time
from collections.abc import Mapping, Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any, Final, NoReturn

import click

from gpulease.client.bench.bounds import BoundOutcome, floors_of, keeps_bounds, load_bounds
from gpulease.client.bench.check import check_promises, fallen, measure_promises, read_earlier
from gpulease.client.bench.core import LEASES as CORE_LEASES
from gpulease.client.bench.core import keeps_core_bounds, measure_core
from gpulease.client.bench.figures import Figures, LogLine, print_figures
from gpulease.client.bench.host_floors import with_floors
from gpulease.client.bench.park_models import MODELS, SPARE_MODELS, is_right, measure_park, park_table
from gpulease.client.bench.park_storm import is_calm, measure_storm, storm_table
from gpulease.client.bench.peers import CALLERS, LEASED, NOTES, ROWS
from gpulease.client.bench.region_times import measure_regions
from gpulease.client.bench.suite import RunSize, measure_requests, measure_round_trips, measure_with_direct_calls
from gpulease.client.console.exit_status import MissingPrerequisite
from gpulease.client.console.number_range import NumberRange
from gpulease.client.console.private_daemon import private_daemon, running_address
from gpulease.client.console.reports import first_card
from gpulease.client.console.scene import Scene
from gpulease.client.console.tables import seconds_text, table
from gpulease.client.console.transform import transform_ptx
from gpulease.protocol.json_text import indented_json

GATE_FLIPS: Final = 400
"""Number of revocations: enough for a meaningful 99th percentile. Each takes milliseconds."""

ROUNDS: Final = 3
LAUNCHES: Final = 20_000
LEASES: Final = 30
"""Number of leases acquired one after another; as many more expire, and as many are revoked."""

QUICK_ROUNDS: Final = 1
QUICK_LAUNCHES: Final = 5_000
QUICK_LEASES: Final = 5
QUICK_GATE_FLIPS: Final = 50
QUICK_REQUEST_S: Final = 1.0
QUICK_MINUTES: Final = 1.0
"""The sizes with `--quick`, which takes about a minute. The 99th percentiles are then the worst of a few samples."""

REGION_SAMPLES: Final = 200
QUICK_REGION_SAMPLES: Final = 20
"""Number of regions opened and revoked for each figure."""

REQUEST_S: Final = 5.0
"""Duration of each load, in seconds."""

STORM_MINUTES: Final = 10.0

_POSITIVE: Final = click.IntRange(min=1)


@click.command()
@click.option(
    "--driver", type=click.Choice(["auto", "cuda", "cpu"]), default="auto", help="The private daemon's driver."
)
@click.option("--quick", is_flag=True, help="Take fewer samples; takes about a minute.")
@click.option(
    "--rounds",
    type=_POSITIVE,
    help=(
        "Number of rounds; each measures a lease and the direct driver in turn, and the medians are "
        "shown. By default 3, or 1 with --quick."
    ),
)
@click.option(
    "--launches",
    type=_POSITIVE,
    help="Number of pipelined launches per round; by default 20,000, or 5,000 with --quick.",
)
@click.option(
    "--leases",
    type=_POSITIVE,
    help="Number of leases to acquire and free; the same numbers expire and are revoked. By default 30, or 5 "
    "with --quick. With --core, the number of leases that exist at the same time; by default 10,000.",
)
@click.option("--tcp", default="", help="The running daemon's TCP address, to measure TCP as well.")
@click.option(
    "--tls",
    default="",
    help="The running daemon's TLS address, to measure TLS as well; GPULEASE_TLS_CERTIFICATE, _KEY and _CA "
    "name the files.",
)
@click.option(
    "--gateway",
    is_flag=True,
    help="Instead, measure requests per second, each on a separate lease, on private daemons.",
)
@click.option(
    "--core",
    is_flag=True,
    help="Instead, measure only the daemon's lease table: grants and renewals per second, and how late leases expire.",
)
@click.option(
    "--regions",
    is_flag=True,
    help="Instead, measure regions; fail if launches in a revoked region are refused too late.",
)
@click.option(
    "--park",
    is_flag=True,
    help="Instead, measure models that share a card by parking, compared with loading them again each time.",
)
@click.option(
    "--park-storm",
    is_flag=True,
    help=(
        "Instead, park, move, revoke and kill sessions at random; fail if any result is wrong or any byte is missing."
    ),
)
@click.option(
    "--model-mib",
    type=_POSITIVE,
    help="With --park: the size of each model; by default 16,384 on a card, otherwise 64.",
)
@click.option(
    "--models",
    type=click.IntRange(min=2),
    default=MODELS,
    show_default=True,
    help="With --park: the number of models; the card has room for half of them.",
)
@click.option(
    "--host-models",
    type=_POSITIVE,
    help=f"With --park: for how many models park_memory has room; by default, {SPARE_MODELS} more than are parked.",
)
@click.option(
    "--decode",
    is_flag=True,
    help="Instead, measure the steps and kernels of the decode engine; print each figure as a JSON object on a line.",
)
@click.option(
    "--round-trips",
    is_flag=True,
    help="Instead, measure only round trips, each in turn through a lease, in C, with cuda-bindings and with pycuda.",
)
@click.option(
    "--check",
    is_flag=True,
    help=(
        "Instead, measure every figure that has a bound in client/bench/bounds.toml; takes some minutes. "
        "Fail if a bound is missed."
    ),
)
@click.option(
    "--against", type=click.Path(path_type=Path), help="With --check: the file of an earlier run, to show regressions."
)
@click.option(
    "--to",
    type=click.Path(path_type=Path),
    default=Path("gpulease-check.json"),
    show_default=True,
    help="With --check: the file to write.",
)
@click.option("--peers", is_flag=True, help="Instead, print how to compare with other remoting systems.")
@click.option(
    "--minutes",
    type=NumberRange(min=0.01),
    help="With --park or --park-storm: how many minutes to run; by default 10, or 1 with --quick.",
)
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
    regions: bool,
    park: bool,
    park_storm: bool,
    model_mib: int | None,
    models: int,
    host_models: int | None,
    decode: bool,
    round_trips: bool,
    check: bool,
    against: Path | None,
    to: Path,
    peers: bool,
    minutes: float | None,
    as_json: bool,
) -> None:
    """Measure leases on the running daemon, or on a private one. Prints progress on stderr."""
    log = _progress_lines()
    if peers:
        click.echo(files("gpulease.client.bench").joinpath("PEERS.md").read_text(encoding="utf-8").rstrip())
        return
    if core and quick:
        raise click.UsageError("--core can be combined with --leases, but not with --quick")
    # Each option below runs one part instead of the whole benchmark.
    if check:
        _run_check(driver, against, to, log, as_json)
    if against is not None:
        raise click.UsageError("--against needs --check")
    minutes = minutes or (QUICK_MINUTES if quick else STORM_MINUTES)
    if park:
        _run_park(driver, model_mib, (models, host_models), minutes, log, as_json)
    if park_storm:
        report = measure_storm(driver, minutes, log)
        click.echo(indented_json(report) if as_json else storm_table(report))
        sys.exit(0 if is_calm(report) else 1)
    if decode:
        _run_decode(driver, quick, log, as_json)
        return
    if core:
        log("the lease core alone")
        _run_core(leases or CORE_LEASES, as_json)
    if regions:
        _run_regions(driver, QUICK_REGION_SAMPLES if quick else REGION_SAMPLES, log, as_json)
    if gateway:
        figures = measure_requests(driver, QUICK_REQUEST_S if quick else REQUEST_S, log)
        click.echo(indented_json(figures) if as_json else _request_table(figures))
        return
    # Otherwise, run the whole benchmark.
    plan = _plan(driver, quick, (rounds, launches, leases), tcp, tls)
    if round_trips:
        _run_round_trips(plan, log, as_json)
        return
    report = measure_with_direct_calls(plan, log, lambda text: click.echo(text, err=True))
    click.echo(indented_json(report) if as_json else _tables(report))


def _plan(driver: str, quick: bool, options: tuple[int | None, int | None, int | None], tcp: str, tls: str) -> RunSize:
    """Return a plan with the given numbers of rounds, launches and leases; the default for each that is None."""
    # An option replaces the usual size. 0 is not accepted, so `or` is enough.
    usual = (QUICK_ROUNDS, QUICK_LAUNCHES, QUICK_LEASES) if quick else (ROUNDS, LAUNCHES, LEASES)
    rounds, launches, leases = (chosen or default for chosen, default in zip(options, usual, strict=True))
    return RunSize(driver, rounds, launches, leases, QUICK_GATE_FLIPS if quick else GATE_FLIPS, tcp, tls)


def _run_round_trips(plan: RunSize, log: LogLine, as_json: bool) -> None:
    report = measure_round_trips(plan, log)
    text = f"{report['title']}\n\n{round_trip_table(report['round_trips'])}"
    click.echo(indented_json(report) if as_json else text)


def _run_park(
    driver: str, model_mib: int | None, counts: tuple[int, int | None], minutes: float, log: LogLine, as_json: bool
) -> NoReturn:
    size_bytes = None if model_mib is None else model_mib << 20
    report = measure_park(driver, size_bytes, minutes * 60, log, *counts)
    click.echo(indented_json(report) if as_json else park_table(report))
    sys.exit(0 if is_right(report) else 1)


def _run_decode(driver: str, quick: bool, log: LogLine, as_json: bool) -> None:
    # Import this only here, because a decoder needs an extra, and the other figures don't.
    from gpulease.client.bench.decode_speed import measure_decode, plan_for

    figures: list[Mapping[str, object]] = []
    with contextlib.ExitStack() as stack:
        address = running_address() or stack.enter_context(private_daemon(driver))
        title = Scene.at(address).title()
        plan = plan_for(first_card(address)["driver"], quick=quick)
        # With --json, print one object at the end; otherwise, print each figure as soon as it is measured.
        if not as_json:
            print_figures({"figure": "title", "title": title})
        measure_decode(address, plan, figures.append if as_json else print_figures, log)
    if as_json:
        click.echo(indented_json({"title": title, "figures": figures}))


def _run_check(driver: str, against: Path | None, to: Path, log: LogLine, as_json: bool) -> NoReturn:
    report = measure_promises(driver, log, lambda text: click.echo(text, err=True))
    # Write the file first, so that no later error can lose the figures.
    try:
        to.write_text(indented_json(report) + "\n", encoding="utf-8")
    except OSError as error:
        raise MissingPrerequisite(f"{to}: {error.strerror}") from None
    # The bounds are those of the report's driver.
    now = check_promises(report)
    earlier = None if against is None else read_earlier(against, report)
    before = {} if earlier is None else {one.bound.name: one for one in check_promises(earlier)}
    # False means missed. None means that the host lacks something that the figure needs.
    missed = [one for one in now if one.is_kept is False]
    if as_json:
        rows = {
            one.bound.name: {
                "figure": one.figure,
                "figure_unit": one.bound.figure_unit,
                "divisor": one.divisor,
                "value": one.value,
                "first_value": one.first_value,
                "unit": one.bound.unit,
                "bound": one.bound.limit,
                "kept": one.is_kept,
                "goal": one.bound.goal,
            }
            for one in now
        }
        click.echo(indented_json({"title": report["title"], "bounds": rows}))
    else:
        click.echo(f"{report['title']}\n\n{check_table(now, before)}\n\nWritten to {to}.")
        for bound in fallen(now, before):
            click.echo(f"Fallen since {earlier['title'] if earlier else ''}: {bound.text}.")
        for one in missed:
            click.echo(f"MISSED: {missed_text(one)}")
    sys.exit(1 if missed else 0)


def missed_text(outcome: BoundOutcome) -> str:
    """Say by how much a value is beyond its bound, or that a figure for it is missing."""
    bound, value = outcome.bound, outcome.value
    if value is None:
        return f"{bound.text}: not measured ({bound.figure}{f' / {bound.of}' if bound.of else ''})."
    # The factor by which it is beyond the bound, whichever side the bound is on.
    beyond = bound.limit / value if bound.is_least else value / bound.limit
    measured = f"{_value_text(outcome.figure)} {bound.figure_unit}"
    if bound.of:
        measured += f", {_value_text(value)} of {bound.beside} ({bound.of} = {_value_text(outcome.divisor)})"
    first = outcome.first_value
    again = "measured once" if first is None else f"the better of two; the first was {_value_text(first)}"
    return f"{bound.text}: {measured}, {beyond:.2f} times beyond {bound.limit:g} ({again})."


def check_table(now: Sequence[BoundOutcome], before: Mapping[str, BoundOutcome]) -> str:
    """Lay out a row for each bound, with a column for an earlier run's values if there are any."""
    earlier_head = ["earlier"] if before else []
    head = ["promise", "figure", "unit", "divided by", "", "value", *earlier_head, "bound", "kept", "goal", "reached"]
    words = {True: "yes", False: "NO", None: ""}
    rows = []
    for promise in now:
        bound, earlier = promise.bound, before.get(promise.bound.name)
        sign = ">=" if bound.is_least else "<="
        cells = [bound.text, _value_text(promise.figure), bound.figure_unit, bound.beside, _value_text(promise.divisor)]
        cells += [_value_text(promise.value), *([_value_text(earlier.value) if earlier else ""] if before else [])]
        cells.append(f"{sign} {bound.limit:g}")
        # For a bound that is left out, show the property that the host lacks. For a bound that was missed at first, say
        # so.
        kept = words[promise.is_kept] if promise.is_kept is not None else f"no {bound.needs} here"
        cells.append(kept if promise.first_value is None else f"{kept}, at first {_value_text(promise.first_value)}")
        goal = bound.goal
        rows.append([*cells, "" if goal is None else f"{sign} {goal:g}", words[promise.has_reached_goal].lower()])
    return table(head, rows)


def _value_text(value: float | None) -> str:
    return "" if value is None else f"{value:.3g}"


def _run_core(leases: int, as_json: bool) -> NoReturn:
    figures = measure_core(leases)
    click.echo(indented_json({"leases": leases, "figures": figures}) if as_json else _core_table(leases, figures))
    sys.exit(0 if keeps_core_bounds(figures) else 1)


def _run_regions(driver: str, samples: int, log: LogLine, as_json: bool) -> NoReturn:
    with contextlib.ExitStack() as stack:
        address = running_address() or stack.enter_context(private_daemon(driver))
        title, driver = Scene.at(address).title(), str(first_card(address)["driver"])
        figures = with_floors(
            lambda: measure_regions(address, transform_ptx(), samples, log), floors_of("regions", load_bounds(driver))
        )
    # Print every row; only rows with a bound decide the exit status.
    rows = [[text, f"{figures[name]:.2f}"] for name, text in _REGION_ROWS]
    shown = f"{title}\n\n{table(['regions', ''], rows)}"
    click.echo(indented_json({"title": title, "figures": figures}) if as_json else shown)
    sys.exit(0 if keeps_bounds(driver, {"regions": figures}) else 1)


def _progress_lines() -> LogLine:
    """Return a function that prints each step on stderr as a plain line, for terminals and for logs."""
    # Elapsed seconds show which part takes long.
    began_s = time.monotonic()
    return lambda text: click.echo(f"bench, {seconds_text(time.monotonic() - began_s)}: {text}", err=True)


_ROWS: Final = (
    ("launch_pipelined_us", "launch, pipelined", "us"),
    ("launch_own_us", "launch, the caller's own time", "us"),
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
    ("write_16m_gb_s", "mem_write 16 MiB from any array", "GB/s"),
    ("read_16m_gb_s", "mem_read 16 MiB to any array", "GB/s"),
    ("write_256m_gb_s", "mem_write 256 MiB from any array", "GB/s"),
    ("read_256m_gb_s", "mem_read 256 MiB to any array", "GB/s"),
    ("arena_write_16m_gb_s", "mem_write 16 MiB from the arena / pinned", "GB/s"),
    ("arena_read_16m_gb_s", "mem_read 16 MiB to the arena / pinned", "GB/s"),
    ("arena_write_256m_gb_s", "mem_write 256 MiB from the arena / pinned", "GB/s"),
    ("arena_read_256m_gb_s", "mem_read 256 MiB to the arena / pinned", "GB/s"),
    ("write_4k_p50_us", "mem_write 4 KiB, p50", "us"),
    ("write_4k_pipelined_us", "mem_write 4 KiB, pipelined", "us"),
    ("read_4k_p50_us", "mem_read 4 KiB, p50", "us"),
)
SUBMIT_ROWS: Final = (
    ("submit_session_p50_ms", "a small kernel + sync in a session, p50"),
    ("submit_session_p99_ms", "a small kernel + sync in a session, p99"),
    ("submit_p50_ms", "the same as a submit, to its answer, p50"),
    ("submit_p99_ms", "the same as a submit, to its answer, p99"),
    ("submit_next_p50_ms", "the same, each sent after the last one ended, p50"),
    ("submit_next_p99_ms", "the same, each sent after the last one ended, p99"),
    ("warm_submit_p50_ms", "a submit with a warm context, to its answer, p50"),
    ("warm_submit_p99_ms", "a submit with a warm context, to its answer, p99"),
)
_LEASE_ROWS: Final = (
    ("acquire_p50_ms", "acquire to first answer, p50"),
    ("acquire_p99_ms", "acquire to first answer, p99"),
    ("first_kernel_p50_ms", "acquire to the end of a new kernel, p50"),
    ("first_kernel_p99_ms", "acquire to the end of a new kernel, p99"),
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
_REGION_ROWS: Final = (
    ("region_mib", "a region's size, MiB"),
    *(
        (f"{name}_p{part}_{unit}", f"{text}, {unit}, p{part}")
        for name, unit, text in (
            ("floor_open", "us", "the driver's calls alone: create and map"),
            ("open", "us", "open"),
            ("floor_end", "us", "the driver's calls alone: unmap and release"),
            ("revoke_to_returned", "us", "revoke to the reply that its bytes are free again"),
            ("revoke_wall_clock", "us", "flip to the typed refusal, launch by launch"),
            ("revoke_wall_clock_proved", "ms", "flip to bytes proved back, launch by launch"),
            ("revoke_in_graphs", "us", "flip to the typed refusal, graph by graph"),
            ("revoke_in_graphs_proved", "ms", "flip to bytes proved back, graph by graph"),
            ("step_quiet", "us", "launch + sync in another region, quiet"),
            ("step_beside_revocations", "us", "launch + sync in another region, during revocations"),
        )
        for part in (50, 99)
    ),
    ("graph_step_us", "one such graph + sync, us, p50"),
    ("launch_us", "a launch that names no region, us"),
    ("launch_in_1_us", "a launch that names 1, us"),
    ("launch_in_256_us", "a launch that names 256, us"),
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
    ("load_cold", "load these kernels for the first time"),
    ("load_again", "load them in another worker"),
)
CORE_ROWS: Final = (
    ("grants_per_s", "grants per second, until all leases are granted"),
    ("renewals_per_s", "renewals a second"),
    ("mixed_per_s", "grants and renewals a second, during frees"),
    ("grants_cpu_us", "a grant costs the broker's thread, us"),
    ("renewals_cpu_us", "a renewal costs the broker's thread, us"),
    ("mixed_cpu_us", "a grant or a renewal during frees, us"),
    ("expiry_late_p50_ms", "expiry after its deadline, ms, p50"),
    ("expiry_late_p99_ms", "expiry after its deadline, ms, p99"),
    ("expiry_late_max_ms", "expiry after its deadline, ms, max"),
    ("burst_late_p99_ms", "the same if 1,000 end at one moment, ms, p99"),
)


def _tables(report: dict[str, Any]) -> str:
    leased, by_socket, direct, ratio = (report[key] for key in ("leased", "leased_by_socket", "direct", "ratio"))
    # Make a row for each figure that was measured in sessions; the other columns may lack some.
    rows = [
        [
            text,
            *(_figure_text(figures, name) for figures in (leased, by_socket, direct)),
            unit,
            _figure_text(ratio, name),
        ]
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
        parts.append(_tls_table(report["tls"]))
    # Add the tables of two columns, each with its own head and rows.
    for name, head, texts in (
        ("leases", f"over {report['lease_samples']} leases, ms", _LEASE_ROWS),
        ("bare", f"over {report['lease_samples']} processes without a lease, ms", _BARE_ROWS),
        ("gate", f"a worker that launches as fast as it can, over {report['gate_flips']} flips", _GATE_ROWS),
        ("overlap", "streams, for each piece", _OVERLAP_ROWS),
    ):
        figures = report[name]
        parts.append(table([head, ""], [[text, f"{figures[key]:.2f}"] for key, text in texts if key in figures]))
    if "acquire_to_bare" in report:
        parts.append(f"acquire to first answer / fork to a context that answers, p50: {report['acquire_to_bare']}")
    parts.append(_kernel_table(report["kernels"]))
    parts.append(round_trip_table(report["round_trips"]))
    return "\n\n".join(parts)


def round_trip_table(report: Mapping[str, Any]) -> str:
    """Lay out each caller's p50 and p99 of the round trips, with notes, and the reasons for missing callers."""
    figures, ratio, goals = report["figures"], report["ratio"], report["goals"]
    # Only callers that were measured have columns; the session comes first.
    callers = [name for name in CALLERS if name in figures]
    other_callers = [name for name in callers if name != LEASED]
    head = [f"round trips, medians of {report['rounds']} rounds", "unit"]
    head += [text for name in callers for text in (f"{name} p50", "p99")]
    head += [*(f"leased/{name}" for name in other_callers), "goal", "met"]
    rows = []
    for row in ROWS:
        # A row without a figure of the session has nothing to compare.
        if row.figure(50) not in figures[LEASED]:
            continue
        cells = [row.text, row.unit.replace("gb_s", "GB/s")]
        cells += [_figure_text(figures[name], row.figure(percent)) for name in callers for percent in (50, 99)]
        cells += [_figure_text(ratio[name], row.stem) for name in other_callers]
        goal = goals.get(row.stem, {"goal": "", "is_met": None})
        rows.append([*cells, goal["goal"], {True: "yes", False: "no", None: ""}[goal["is_met"]]])
    # Several callers may be missing for the same reason, so print one line for each reason.
    reasons: dict[str, list[str]] = {}
    for name, reason in report["absent"].items():
        reasons.setdefault(reason, []).append(name)
    lines = [*NOTES, *(f"Left out: {', '.join(names)}: {reason}." for reason, names in reasons.items())]
    return "\n".join([table(head, rows), *lines, "Other remoting systems: gpulease bench --peers."])


def _figure_text(figures: Figures, name: str) -> str:
    return f"{figures[name]:.2f}" if name in figures else ""


def _tcp_table(tcp: dict[str, Figures]) -> str:
    columns = [tcp[column] for column in ("leased", "stream", "ratio")]
    rows = [[text, *(f"{figures[key]:.2f}" for figures in columns)] for key, text in _TCP_ROWS if key in tcp["ratio"]]
    return table(["over TCP on loopback, GB/s", "leased", "a plain stream", "leased/stream"], rows)


def _tls_table(figures: dict[str, Figures]) -> str:
    tls, tcp, ratio = (figures[column] for column in ("tls", "tcp", "ratio"))
    rows = [
        [text, _figure_text(tls, key), _figure_text(tcp, key), unit, _figure_text(ratio, key)]
        for key, text, unit in _TLS_ROWS
        if key in tls
    ]
    head = ["through sockets on loopback", "TLS", "TCP", "unit", "TLS/TCP"]
    return "\n".join([table(head, rows), _raw_tls(figures["stream"])])


def _raw_tls(stream: Figures) -> str:
    # Without openssl nothing was measured, and no ratio can be shown.
    if not stream:
        return "A raw TLS stream is not measured: openssl is not installed."
    ratios = [f"{text} {stream[key]:.2f}" for key, text in _TCP_ROWS if key in stream]
    rate = f"A raw TLS stream, openssl s_client to s_server: {stream['openssl_gb_s']:.2f} GB/s."
    return f"{rate} TLS here / that: {', '.join(ratios)}."


def _kernel_table(kernels: dict[str, Figures]) -> str:
    rows = []
    for name, text in _KERNEL_ROWS:
        figures = kernels[name]
        cells = [f"{figures[column]:.3f}" if column in figures else "" for column in ("leased_ms", "numpy_ms", "ratio")]
        rates = [f"{figures[rate]:.2f}" if rate in figures else "" for rate in ("gflop_s", "gflop_s_per_core")]
        rows.append([text, *cells, *rates])
    return table(["kernel with its wait, ms", "leased", "numpy", "leased/numpy", "GFLOP/s", "a core"], rows)


def _request_table(figures: dict[str, dict[str, dict[str, float]]]) -> str:
    rows = [
        [
            pool,
            load,
            *(f"{load_figures[name]:.1f}" if name in load_figures else "" for name in ("per_s", "p50_ms", "p99_ms")),
        ]
        for pool, loads in figures.items()
        for load, load_figures in loads.items()
    ]
    return table(["a lease each", "requests", "a second", "p50 ms", "p99 ms"], rows)


def _core_table(leases: int, figures: dict[str, Figures]) -> str:
    head = [f"{leases} leases, no processes", *figures]
    rows = [[text, *(f"{column[name]:.2f}" for column in figures.values())] for name, text in CORE_ROWS]
    return table(head, rows)
