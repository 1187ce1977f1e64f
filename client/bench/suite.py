"""Every measurement of `gpulease bench`: leases compared with direct calls to the same driver, in one run."""

import contextlib
import os
import socket
import statistics
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from importlib.resources import as_file, files
from pathlib import Path
from typing import Any, Final

from gpulease.client.bench.figures import Figures, LogLine, in_a_process, medians
from gpulease.client.bench.gateway_load import request_figures
from gpulease.client.bench.kernel_times import kernel_figures
from gpulease.client.bench.lease_life import SPIN_PTX, acquisition, expiry, revocation, warm_acquisition
from gpulease.client.bench.overlap import overlap
from gpulease.client.bench.peers import measure_with_peers
from gpulease.client.bench.remote import NoCertificates, make_certificates, openssl_stream_rate, remote_figures
from gpulease.client.bench.session_speed import bulk_copies, copy_sizes, graph_figures, hot_path
from gpulease.client.bench.submit_times import submit_figures
from gpulease.client.bench.tcp_peer import stream_rates
from gpulease.client.console.card import card_title
from gpulease.client.console.exit_status import MissingPrerequisite
from gpulease.client.console.private_daemon import private_daemon, running_address
from gpulease.client.console.reports import first_card
from gpulease.client.console.transform import transform_ptx

WARM_CONTEXTS: Final = 2
"""Number of contexts in the private daemon's pool for warm leases: one to use, and one while the next is made."""

REQUEST_CONTEXTS: Final = 4
"""Number of contexts in the pool of `measure_requests`, where each request acquires a lease."""

SAMPLES: Final = 500
"""Number of samples of each operation that is timed alone."""


@dataclass(frozen=True, slots=True)
class RunSize:
    """The size of one run.

    Attributes:
        driver: The driver of the private daemon. A running daemon must use the same, unless this is "auto".
        rounds: Number of rounds; each measures leased work and then direct work, and the report has the medians of all
            rounds.
        launches: Number of launches pipelined in a round.
        leases: Number of leases acquired and freed; as many more expire, and as many are revoked.
        flips: Number of times that the revocation word is set while a session launches as fast as it can.
        tcp: Address at which the running daemon listens for TCP; "" for none.
        tls: Address at which it listens for TLS; "" for none.
    """

    driver: str
    rounds: int
    launches: int
    leases: int
    flips: int
    tcp: str
    tls: str


def measure_with_direct_calls(plan: RunSize, log: LogLine, warn: LogLine) -> dict[str, Any]:
    """Measure everything on the running daemon, or on a private one; returns the report.

    Raises:
        MissingPrerequisite: The running daemon uses another driver, a private daemon did not start, or a process that
            calls the driver directly failed or took too long.
        WrongResult: A kernel's result differs from numpy's.
        WrongOrder: A stream did not keep its order.
        WrongCallerResult: In the comparison with other callers, the session's result is wrong.
    """
    with contextlib.ExitStack() as stack:
        running = address = running_address()
        if address is None:
            # A private daemon listens for TCP and TLS too, so that the cost of remote access can be measured.
            log("starting a private daemon")
            daemon = stack.enter_context(reachable_daemon(plan.driver, warn))
            address, plan = daemon.address, replace(plan, tcp=daemon.tcp, tls=daemon.tls)
        card = card_for(address, plan.driver)
        measured = _measure(address, card, plan, log)
        # Compare with other callers of the driver now, on the running daemon's own pool.
        if running is not None:
            measured.round_trips = _with_peers(address, card, plan, log)
    # The private daemon above has no pool of contexts, so measure warm leases on another one.
    if running is None:
        log(f"{plan.leases} leases and submits with warm contexts")
        with private_daemon(plan.driver, warm_contexts=WARM_CONTEXTS) as address:
            measured.leases |= _acquisition(address, plan.leases, has_pool=True)
            measured.round_trips = _with_peers(address, card_for(address, plan.driver), plan, log)
    return _report(card, plan, measured)


def measure_round_trips(plan: RunSize, log: LogLine) -> dict[str, Any]:
    """Measure only round trips, compared with other callers of the driver.

    Raises:
        MissingPrerequisite: The running daemon uses another driver, or the private daemon did not start.
        WrongCallerResult: The session's result is wrong.
    """
    with contextlib.ExitStack() as stack:
        address = running_address()
        if address is None:
            address = stack.enter_context(private_daemon(plan.driver, warm_contexts=WARM_CONTEXTS))
        card = card_for(address, plan.driver)
        title = card_title(card["driver"], card["name"], card["uuid"])
        return {"title": title, "round_trips": _with_peers(address, card, plan, log)}


def card_for(address: str, driver: str) -> dict[str, Any]:
    """Return the daemon's first card. Raises MissingPrerequisite if its driver is not `driver`."""
    card = first_card(address)
    if driver not in ("auto", card["driver"]):
        raise MissingPrerequisite(
            f"the daemon at {address} computes with {card['driver']}, not {driver}: stop it first"
        )
    return card


def _with_peers(address: str, card: dict[str, Any], plan: RunSize, log: LogLine) -> dict[str, Any]:
    return measure_with_peers(address, card, plan.rounds, plan.launches, SAMPLES, log)


def measure_requests(driver: str, seconds: float, log: LogLine) -> dict[str, dict[str, Figures]]:
    """Measure requests that each acquire a lease, on private daemons with and without a pool, for `seconds` each."""
    figures, count, same_tenant = {}, REQUEST_CONTEXTS, 'recycle = "same-tenant"\n'
    # Start three daemons: without a pool, with a pool, and with a pool that recycles a tenant's contexts.
    daemons = {
        "fresh contexts": (0, ""),
        f"pool of {count}": (count, ""),
        "the tenant's own again": (count, same_tenant),
    }
    for name, (contexts, settings) in daemons.items():
        log(f"requests of one lease each, {name}")
        with private_daemon(driver, warm_contexts=contexts, settings=settings) as address:
            has_pool, has_recycling = bool(contexts), settings == same_tenant
            figures[name] = request_figures(address, seconds, has_pool=has_pool, has_recycling=has_recycling)
    return figures


@dataclass(slots=True)
class _Measured:
    """Figures as measured, before they are rounded for the report."""

    sessions: dict[str, Figures]
    leases: Figures
    bare: Figures
    gate: Figures
    tcp: dict[str, Figures]
    tls: dict[str, Figures]
    kernels: dict[str, Figures]
    overlap: Figures
    round_trips: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class ReachableDaemon:
    """A private daemon that listens at three addresses: its own, one for TCP and one for TLS; "" for none."""

    address: str
    tcp: str
    tls: str


@contextlib.contextmanager
def reachable_daemon(driver: str, warn: LogLine) -> Iterator[ReachableDaemon]:
    """Start a daemon that also listens for TCP and, if certificates can be made, for TLS. It ends with the block.

    Raises MissingPrerequisite.
    """
    with contextlib.ExitStack() as stack:
        # The ports are free at this moment, and the daemon binds them a little later.
        tcp = f"tcp:127.0.0.1:{_free_port()}"
        settings = _make_reachable_by_tls(stack, warn)
        tls = f"tls:127.0.0.1:{_free_port()}" if settings else ""
        also_at = (tcp, tls) if tls else (tcp,)
        address = stack.enter_context(private_daemon(driver, also_at=also_at, settings=settings))
        yield ReachableDaemon(address, tcp, tls)


def _measure(address: str, card: dict[str, Any], plan: RunSize, log: LogLine) -> _Measured:
    driver, count = card["driver"], plan.leases
    # Measure in the order of the report: sessions, the life of a lease, TCP and TLS, kernels.
    sessions = session_rounds(address, driver, plan.rounds, plan.launches, log)
    log(f"{count} leases and submits, acquired and freed")
    leases = _acquisition(address, count, has_pool=card["warm_wanted"] > 0)
    log(f"{count} leases that expire under an endless kernel")
    leases |= expiry(address, count)
    log(f"{count} leases that are revoked under one")
    leases |= revocation(address, count)
    log(f"{count} contexts without a lease")
    bare = bare_figures(card, count)
    log(f"how soon a worker stops launching, over {plan.flips} flips")
    gate = gate_figures(card, plan.flips)
    tcp: dict[str, Figures] = {}
    tls: dict[str, Figures] = {}
    if plan.tcp:
        log("copies over TCP")
        tcp = _over_tcp(plan.tcp, copy_sizes(driver), plan.rounds)
    if plan.tls and plan.tcp:
        log("calls and copies over TLS, compared with TCP")
        tls = _over_tls(plan, copy_sizes(driver))
    log("kernels, compared with numpy")
    kernels = kernel_figures(address)
    log("copies and kernels in two streams")
    overlapped = overlap(address, driver)
    return _Measured(sessions, leases, bare, gate, tcp, tls, kernels, overlapped)


def _report(card: dict[str, Any], plan: RunSize, measured: _Measured) -> dict[str, Any]:
    leased, direct = measured.sessions["leased"], measured.sessions["direct"]
    report = {
        "title": card_title(card["driver"], card["name"], card["uuid"]),
        "driver": card["driver"],
        "card": card["name"],
        **measured.sessions,
        # A ratio needs both figures, and a direct one above 0.
        "ratio": {name: round(leased[name] / direct[name], 3) for name in leased if direct.get(name)},
        "tcp": measured.tcp,
        "tls": measured.tls,
        "lease_samples": plan.leases,
        "leases": _rounded(measured.leases, 2),
        "bare": _rounded(measured.bare, 2),
        "gate_flips": plan.flips,
        "gate": _rounded(measured.gate, 1),
        "overlap": _rounded(measured.overlap, 3),
        "kernels": {name: _rounded(figures, 4) for name, figures in measured.kernels.items()},
        "round_trips": measured.round_trips,
    }
    if "acquire_p50_ms" in measured.leases:
        # Compare different groups: an acquire with a bare context, and a launch with pycuda's call.
        report["acquire_to_bare"] = round(measured.leases["acquire_p50_ms"] / measured.bare["open_p50_ms"], 3)
    if "pycuda_call_us" in direct:
        report["launch_to_pycuda_call"] = round(leased["launch_pipelined_us"] / direct["pycuda_call_us"], 3)
    return report


def _rounded(figures: Figures, digits: int) -> Figures:
    return {name: round(value, digits) for name, value in figures.items()}


def session_rounds(
    address: str, driver: str, rounds: int, launches: int, log: LogLine, *, has_socket: bool = True
) -> dict[str, Figures]:
    """Time sessions through shared memory, sessions through their socket if `has_socket`, and direct calls.

    Returns the medians of the rounds, by way.

    Raises MissingPrerequisite.
    """
    ways = {"leased": True, "leased_by_socket": False} if has_socket else {"leased": True}
    figures: dict[str, list[Figures]] = {way: [] for way in (*ways, "direct")}
    # Measure direct and leased work in each round, so that a change of the host's speed affects both.
    for number in range(1, rounds + 1):
        log(f"round {number} of {rounds}: launches and copies, the driver called directly")
        figures["direct"].append(direct_figures(driver, launches))
        for way, shared in ways.items():
            medium = "shared memory" if shared else "its socket"
            log(f"round {number} of {rounds}: launches and copies, in a session through {medium}")
            copies = bulk_copies(address, copy_sizes(driver), shared_memory=shared)
            copies |= graph_figures(address, transform_ptx(), SAMPLES, shared_memory=shared)
            hot = hot_path(address, transform_ptx(), launches, SAMPLES, shared_memory=shared)
            figures[way].append(hot | copies)
    return {way: medians(each) for way, each in figures.items()}


def _acquisition(address: str, leases: int, *, has_pool: bool) -> Figures:
    """Time leases and jobs.

    With a pool, measure only leases with ready contexts: otherwise chance would decide whether a lease gets one.
    """
    figures = warm_acquisition(address, leases) if has_pool else acquisition(address, leases)
    return figures | submit_figures(address, transform_ptx(), leases, has_pool=has_pool)


def _over_tcp(address: str, sizes: tuple[int, ...], rounds: int) -> dict[str, Figures]:
    # Copy the same sizes in a session over TCP, and through a plain stream.
    leased = medians([bulk_copies(address, sizes) for _ in range(rounds)])
    stream = medians([stream_rates(sizes) for _ in range(rounds)])
    leased = {name: leased[name] for name in stream}
    return {
        "leased": leased,
        "stream": stream,
        "ratio": {name: round(leased[name] / stream[name], 3) for name in stream},
    }


def _over_tls(plan: RunSize, sizes: tuple[int, ...]) -> dict[str, Figures]:
    by_tls, by_tcp = (
        medians([remote_figures(address, transform_ptx(), plan.launches, sizes) for _ in range(plan.rounds)])
        for address in (plan.tls, plan.tcp)
    )
    # Compute the ratios of the same calls over TLS and TCP, and then of copies to openssl's own stream.
    ratio = {name: round(by_tls[name] / by_tcp[name], 3) for name in by_tls}
    rates = [rate for rate in (openssl_stream_rate() for _ in range(plan.rounds)) if rate is not None]
    stream: Figures = {}
    if rates:
        stream["openssl_gb_s"] = statistics.median(rates)
        copies = {name: rate for name, rate in by_tls.items() if name.endswith("m_gb_s")}
        stream |= {name: round(rate / stream["openssl_gb_s"], 3) for name, rate in copies.items()}
    return {"tls": by_tls, "tcp": by_tcp, "ratio": ratio, "stream": stream}


def _make_reachable_by_tls(stack: contextlib.ExitStack, warn: LogLine) -> str:
    """Make certificates, and use them in this process until the stack is left. Returns the settings for a daemon.

    Returns "" if no certificates can be made.
    """
    folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="gpulease-"))
    try:
        settings, environment = make_certificates(Path(folder))
    except NoCertificates as error:
        warn(f"gpulease bench: TLS is left out: {error}")
        return ""
    # Restore the variables afterwards, as "" if they were not set.
    before = dict.fromkeys(environment, "") | {name: os.environ[name] for name in environment if name in os.environ}
    os.environ.update(environment)
    stack.callback(os.environ.update, before)
    return settings


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


def direct_figures(driver: str, launches: int) -> Figures:
    """Return times of the driver's own calls and copies, in a separate process. Raises MissingPrerequisite."""
    sizes = [str(size) for size in copy_sizes(driver)]
    with as_file(files("gpulease.client.console").joinpath("transform.ptx")) as ptx:
        return in_a_process("direct", driver, str(ptx), str(launches), str(SAMPLES), *sizes)


def bare_figures(card: dict[str, Any], count: int) -> Figures:
    """Return times of contexts opened and killed without a lease. Raises MissingPrerequisite."""
    return in_a_process("bare", card["driver"], card["uuid"], str(count), standard_input=SPIN_PTX)


def gate_figures(card: dict[str, Any], flips: int) -> Figures:
    """Return how soon a worker notices that its lease has ended. Raises MissingPrerequisite."""
    with as_file(files("gpulease.client.console").joinpath("transform.ptx")) as ptx:
        return in_a_process("revocation", card["driver"], card["uuid"], str(ptx), str(flips))
