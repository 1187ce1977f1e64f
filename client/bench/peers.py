"""Round trips of a session compared with other callers of the CUDA driver in one run: callers, ratios and goals."""

import importlib.util
import shutil
import sys
import tempfile
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from functools import partial
from importlib.resources import as_file, files
from pathlib import Path
from subprocess import CalledProcessError, TimeoutExpired, run
from typing import Any, Final

from gpulease.client.bench.bounds import HOST, load_bounds
from gpulease.client.bench.figures import Figures, LogLine, figures_of, medians
from gpulease.client.bench.host_floors import with_floors
from gpulease.client.bench.lease_life import warm_acquisition
from gpulease.client.bench.round_trips import measure_session
from gpulease.client.console.exit_status import MissingPrerequisite

LEASED: Final = "leased"
C: Final = "C"
BINDINGS: Final = "cuda-bindings"
PYCUDA: Final = "pycuda"
CALLERS: Final = (LEASED, C, BINDINGS, PYCUDA)

COMPILERS: Final = ("cc", "gcc", "clang")
COMPILE_TIMEOUT_S: Final = 60.0
SESSION_STARTS: Final = 5
"""Number of sessions that are opened with a ready context in each round."""

VARIABLE_OF_CARDS: Final = "CUDA_VISIBLE_DEVICES"

NO_CARD: Final = "the daemon computes with the embedded driver, and only a card has other callers and goals"
NO_POOL: Final = "the daemon keeps no warm contexts: its operator sets warm_contexts"


@dataclass(frozen=True, slots=True)
class PeerRow:
    """A row of the table.

    Attributes:
        stem: The beginning of its figures' names.
        text: The row's title.
        unit: The end of its figures' names: us, ms or gb_s.
        promise: Its table in bounds.toml, which has its goal.
    """

    stem: str
    text: str
    unit: str
    promise: str

    def figure(self, percent: int) -> str:
        """The name of its figure at that percentile."""
        return f"{self.stem}_p{percent}_{self.unit}"


ROWS: Final = (
    PeerRow("launch_pipelined", "launch, pipelined", "us", "launch_pipelined"),
    PeerRow("launch_own", "launch, the caller's own time", "us", "launch_own"),
    PeerRow("launch_sync", "launch + sync", "us", "launch_sync"),
    PeerRow("sync_idle", "sync with nothing queued", "us", "sync"),
    PeerRow("train_sync", "20 launches + sync", "us", "launches_20_sync"),
    PeerRow("alloc_free_beside", "alloc + free 1 MiB, next to other allocations", "us", "alloc_free"),
    PeerRow("alloc_free_alone", "alloc + free 1 MiB, its granule empty each time", "us", "alloc_free"),
    PeerRow("write_4k_sync", "H2D 4 KiB + sync", "us", "write_4k"),
    PeerRow("read_4k", "D2H 4 KiB", "us", "read_4k"),
    PeerRow("write_16m_pinned", "H2D 16 MiB, pinned, + sync", "gb_s", "write_16m"),
    PeerRow("read_16m_pinned", "D2H 16 MiB, pinned", "gb_s", "read_16m"),
    PeerRow("session_start", "session set-up, warm (others: cold)", "ms", "warm_acquire"),
)

NOTES: Final = (
    "A program that has another allocation keeps its 2 MiB granule. Without one, the driver takes a granule from the",
    "card and gives it back each time. A session keeps what it freed for its next allocation, and zeroes it. The",
    "p99 of a pipelined row is that of bursts of launches, not of single ones, of a rate the rate at that time.",
    "The others' set-up is cuInit, a context and a sync.",
)


def measure_with_peers(
    address: str,
    card: Mapping[str, Any],
    rounds: int,
    launches: int,
    samples: int,
    log: LogLine,
    callers: Collection[str] = CALLERS,
) -> dict[str, Any]:
    """Measure the callers in turn, all except the session in separate processes. Returns the medians of the rounds.

    Every round starts with another caller. A caller that fails is left out, and the report says why. Raises
    WrongCallerResult if a session's results are wrong.
    """
    with tempfile.TemporaryDirectory(prefix="gpulease-") as folder:
        # Warm set-up needs a pool of contexts; without one, its row stays empty.
        has_pool = card["warm_wanted"] > 0
        ready: dict[str, Callable[[], Figures]] = {
            LEASED: partial(_measure_leased, address, launches, samples, has_pool=has_pool)
        }
        if card["driver"] == "cuda":
            peers, absent = _peers(Path(folder), str(card["uuid"]), launches, samples)
            ready |= {name: peer for name, peer in peers.items() if name in callers}
        else:
            absent = dict.fromkeys(CALLERS[1:], NO_CARD)
        measured = with_floors(lambda: _in_turn(ready, absent, rounds, log), ("exchange_us",))
    if not has_pool:
        absent["the session's set-up"] = NO_POOL
    host = measured.pop(HOST)
    return report_of(measured, host, absent, rounds, has_goals=card["driver"] == "cuda")


def _in_turn(
    ready: Mapping[str, Callable[[], Figures]], absent: dict[str, str], rounds: int, log: LogLine
) -> dict[str, Figures]:
    """Measure each caller in each round; one that fails is moved to `absent`."""
    names = list(ready)
    rounds_by_name: dict[str, list[Figures]] = {name: [] for name in names}
    for number in range(rounds):
        # Each round begins with another caller, so that none is always first on a cold card.
        first = number % len(names)
        for name in names[first:] + names[:first]:
            if name in absent:
                continue
            log(f"round {number + 1} of {rounds}: round trips, {name}")
            try:
                rounds_by_name[name].append(ready[name]())
            except MissingPrerequisite as error:
                # Without the session there is nothing to compare.
                if name == LEASED:
                    raise
                absent[name] = str(error)
    return {name: medians(figures) for name, figures in rounds_by_name.items() if name not in absent}


def _measure_leased(address: str, launches: int, samples: int, *, has_pool: bool) -> Figures:
    figures = measure_session(address, launches, samples)
    if has_pool:
        starts = warm_acquisition(address, SESSION_STARTS)
        figures |= {f"session_start_p{part}_ms": starts[f"warm_acquire_p{part}_ms"] for part in (50, 99)}
    return figures


def _peers(
    folder: Path, card_uuid: str, launches: int, samples: int
) -> tuple[dict[str, Callable[[], Figures]], dict[str, str]]:
    """Return the callers that can run here, and the reasons why others can't."""
    ready: dict[str, Callable[[], Figures]] = {}
    absent: dict[str, str] = {}
    arguments = (str(launches), str(samples))
    # Name the daemon's card by its UUID, because indexes may be in another order.
    variables = {VARIABLE_OF_CARDS: card_uuid}
    # Each caller needs something that may be missing: a compiler, or a package.
    try:
        program = compile_direct_calls(folder)
    except MissingPrerequisite as error:
        absent[C] = str(error)
    else:
        ready[C] = partial(_run_program, program, arguments, variables)
    for name, module, needed in (
        (BINDINGS, "bindings_peer", "cuda.bindings.driver"),
        (PYCUDA, "pycuda_peer", "pycuda.driver"),
    ):
        if reason := missing_reason(name, needed):
            absent[name] = reason
        else:
            command = (sys.executable, "-P", "-m", f"gpulease.client.bench.{module}", *arguments)
            ready[name] = partial(figures_of, command, variables=variables)
    return ready, absent


def missing_reason(package: str, module: str) -> str:
    """Return a sentence if that module is not installed, else ""."""
    try:
        # Looking for a submodule imports its parent, which may be missing as well.
        is_installed = importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:
        is_installed = False
    return "" if is_installed else f"{package} is not installed: pip install {package}"


def compile_direct_calls(folder: Path) -> Path:
    """Compile the C caller into a folder; returns the program's path. Raises MissingPrerequisite."""
    compiler = next(filter(None, map(shutil.which, COMPILERS)), None)
    if compiler is None:
        raise MissingPrerequisite(f"no C compiler was found: install one of {', '.join(COMPILERS)}")
    # The source is part of the package; a compiler needs it as a file.
    program = folder / "direct_calls"
    with as_file(files("gpulease.client.bench").joinpath("direct_calls.c")) as source:
        command = [compiler, "-O2", "-o", str(program), str(source), "-ldl"]
        try:
            run(command, capture_output=True, text=True, check=True, timeout=COMPILE_TIMEOUT_S)
        except CalledProcessError as error:
            last_line = (error.stderr.strip() or "no output").splitlines()[-1]
            raise MissingPrerequisite(f"{Path(compiler).name} failed: {last_line}") from None
        except (OSError, TimeoutExpired) as error:
            raise MissingPrerequisite(f"{Path(compiler).name} failed: {error}") from None
    return program


def _run_program(program: Path, arguments: tuple[str, ...], variables: Mapping[str, str]) -> Figures:
    with as_file(files("gpulease.client.bench").joinpath("round_trips.ptx")) as ptx:
        return figures_of((str(program), str(ptx), *arguments), variables=variables)


def report_of(
    figures: Mapping[str, Figures], host: Figures, absent: Mapping[str, str], rounds: int, *, has_goals: bool
) -> dict[str, Any]:
    """Return the report: figures, the host's floors, ratios to each other caller by row, goals, and missing callers.

    Goals are for cards: `has_goals` is False for the embedded driver.
    """
    ours = figures[LEASED]
    # Ratios compare the session's median with the other caller's; the p99 values are only shown.
    medians_of = {row.stem: row.figure(50) for row in ROWS}
    return {
        "rounds": rounds,
        "figures": dict(figures),
        HOST: host,
        "ratio": {
            name: {
                stem: round(ours[figure] / theirs[figure], 3)
                for stem, figure in medians_of.items()
                if figure in ours and theirs.get(figure)
            }
            for name, theirs in figures.items()
            if name != LEASED
        },
        "goals": _goals(figures, host) if has_goals else {},
        "absent": dict(absent),
    }


def _goals(figures: Mapping[str, Figures], host: Figures) -> dict[str, dict[str, Any]]:
    """Return each row's goal as text, and whether the session reaches it; None if a figure is missing."""
    bounds = {bound.name: bound for bound in load_bounds("cuda")}
    goals = {}
    for row in ROWS:
        bound, name = bounds[row.promise], row.figure(50)
        # The session's figure is divided by another caller's figure of that name, or by a floor of the host.
        if bound.beside in CALLERS:
            divisor = figures.get(bound.beside, {}).get(name)
        else:
            divisor = (host | figures[LEASED]).get(bound.of.rpartition(".")[2])
        value = bound.value(figures[LEASED].get(name), divisor)
        goals[row.stem] = {"goal": bound.aim_text, "is_met": None if value is None else bound.holds(value, bound.aim)}
    return goals
