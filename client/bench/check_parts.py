"""The parts of `gpulease bench --check`: each measures some figures, and the host's floors at the same time.

A part's figures have paths that begin with its name. Only parts with a bound for the driver are measured.
"""

import asyncio
import contextlib
import importlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from enum import Enum
from typing import Any, Final

from gpulease.client.bench.core import core_figures
from gpulease.client.bench.figures import Figures, LogLine, medians
from gpulease.client.bench.first_uses import first_uses
from gpulease.client.bench.gateway_load import request_figures
from gpulease.client.bench.lease_life import acquisition, expiry, revocation, warm_acquisition
from gpulease.client.bench.peers import LEASED, C, measure_with_peers
from gpulease.client.bench.region_times import measure_regions
from gpulease.client.bench.remote import openssl_stream_rate
from gpulease.client.bench.session_speed import COPY_SIZES, bulk_copies, copy_sizes, fresh_copies
from gpulease.client.bench.suite import (
    REQUEST_CONTEXTS,
    SAMPLES,
    WARM_CONTEXTS,
    bare_figures,
    card_for,
    gate_figures,
    reachable_daemon,
    session_rounds,
)
from gpulease.client.bench.tcp_peer import stream_rates
from gpulease.client.console.exit_status import MissingPrerequisite
from gpulease.client.console.private_daemon import private_daemon, running_address
from gpulease.client.console.transform import transform_ptx

ROUNDS: Final = {"cuda": 3, "cpu": 1}
LAUNCHES: Final = {"cuda": 10_000, "cpu": 5_000}
LEASES: Final = 10
FLIPS: Final = 100
REGION_SAMPLES: Final = {"cuda": 200, "cpu": 20}
CORE_LEASES: Final = {"cuda": 10_000, "cpu": 2_000}
CORE_KEEPS: Final = ("journal", "audit", "log")
REQUEST_S: Final = 2.0
REBIND_TOKENS: Final = 512
SHAPES: Final = {"cuda": "llama-1b", "cpu": "two-layers"}
BATCHES: Final = {"cuda": (1, 8, 64, 256), "cpu": (1, 8)}
DECODER_BATCHES: Final = {"cuda": (8, 64), "cpu": (8,)}
DECODER_S: Final = 2.0
CONTEXT: Final = 128
"""Sizes of a run, chosen so that it takes less than five minutes on a card, and one on the embedded driver."""


class DaemonKind(Enum):
    """The daemon that a part needs to be measured on."""

    ANY = "the running one, or a private one"
    REACHABLE = "one that listens for TCP and TLS"
    WARM = "one that keeps contexts ready"
    RECYCLING = "one that gives a tenant its own contexts again"


@dataclass(frozen=True, slots=True)
class MeasuredDaemon:
    """The daemon on which a part is measured.

    Attributes:
        address: The daemon's address.
        card: Its first card.
        driver: The card's driver.
        tcp: Its TCP address; "" if it has none.
        tls: Its TLS address; "" if it has none.
        log: Receives the names of measurements.
    """

    address: str
    card: Mapping[str, Any]
    driver: str
    tcp: str
    tls: str
    log: LogLine


@dataclass(frozen=True, slots=True)
class CheckPart:
    """One part of the check.

    Attributes:
        name: The first key of its figures' paths.
        text: A description of what it measures.
        kind: The kind of daemon that it needs.
        measure: Returns its figures.
    """

    name: str
    text: str
    kind: DaemonKind
    measure: Callable[[MeasuredDaemon], Mapping[str, Any]]


@contextlib.contextmanager
def daemon_of(kind: DaemonKind, driver: str, log: LogLine, warn: LogLine) -> Iterator[MeasuredDaemon]:
    """Provide the daemon for parts of a kind, until the block ends. Raises MissingPrerequisite."""
    with contextlib.ExitStack() as stack:
        tcp = tls = ""
        running = running_address() if kind is DaemonKind.ANY else None
        if running is not None:
            address = running
        elif kind in (DaemonKind.ANY, DaemonKind.REACHABLE):
            daemon = stack.enter_context(reachable_daemon(driver, warn))
            address, tcp, tls = daemon.address, daemon.tcp, daemon.tls
        elif kind is DaemonKind.WARM:
            address = stack.enter_context(private_daemon(driver, warm_contexts=WARM_CONTEXTS))
        else:
            settings = 'recycle = "same-tenant"\n'
            address = stack.enter_context(private_daemon(driver, warm_contexts=REQUEST_CONTEXTS, settings=settings))
        card = card_for(address, driver)
        yield MeasuredDaemon(address, card, card["driver"], tcp, tls, log)


def _session(daemon: MeasuredDaemon) -> Mapping[str, Any]:
    driver, address = daemon.driver, daemon.address
    # Only the embedded driver's bounds include the socket. On a card, copies through the socket would take half a
    # minute.
    rounds = session_rounds(address, driver, ROUNDS[driver], LAUNCHES[driver], daemon.log, has_socket=driver == "cpu")
    return {**rounds, "fresh": fresh_copies(address, max(copy_sizes(driver)))}


def _lives(daemon: MeasuredDaemon) -> Mapping[str, Any]:
    figures = acquisition(daemon.address, LEASES) | expiry(daemon.address, LEASES)
    return figures | revocation(daemon.address, LEASES) | {"bare": bare_figures(dict(daemon.card), LEASES)}


def _gate(daemon: MeasuredDaemon) -> Mapping[str, Any]:
    return gate_figures(dict(daemon.card), FLIPS)


def _remote(daemon: MeasuredDaemon) -> Mapping[str, Any]:
    # Compare each way with the stream of another program: a plain one for TCP, and openssl's for TLS.
    ways: dict[str, Callable[[], Figures]] = {
        "tcp": lambda: bulk_copies(daemon.tcp, COPY_SIZES),
        "stream": lambda: stream_rates(COPY_SIZES),
    }
    if daemon.tls:
        ways["tls"] = lambda: bulk_copies(daemon.tls, COPY_SIZES)
        ways["openssl"] = _openssl_rates
    # Measure the ways in turn in each round, so that a change of the host's speed affects all.
    rounds: dict[str, list[Figures]] = {way: [] for way in ways}
    for _ in range(ROUNDS[daemon.driver]):
        for way, measure in ways.items():
            rounds[way].append(measure())
    # If openssl is missing or fails, its rounds are empty.
    measured = {way: [figures for figures in each if figures] for way, each in rounds.items()}
    return {way: medians(each) if each else {} for way, each in measured.items()}


def _openssl_rates() -> Figures:
    rate = openssl_stream_rate()
    return {} if rate is None else {"gb_s": rate}


def _regions(daemon: MeasuredDaemon) -> Mapping[str, Any]:
    return measure_regions(daemon.address, transform_ptx(), REGION_SAMPLES[daemon.driver], daemon.log)


def _round_trips(daemon: MeasuredDaemon) -> Mapping[str, Any]:
    driver = daemon.driver
    # Only `--round-trips` compares the other callers of the driver, because no bound is a ratio to their figures.
    report = measure_with_peers(
        daemon.address, daemon.card, ROUNDS[driver], LAUNCHES[driver], SAMPLES, daemon.log, (LEASED, C)
    )
    figures: Mapping[str, Any] = report["figures"]
    return figures


def _warm(daemon: MeasuredDaemon) -> Mapping[str, Any]:
    return warm_acquisition(daemon.address, LEASES)


def _first(daemon: MeasuredDaemon) -> Mapping[str, Any]:
    return first_uses(daemon.address, LEASES)


def _gateway(daemon: MeasuredDaemon) -> Mapping[str, Any]:
    return request_figures(daemon.address, REQUEST_S, has_pool=True, has_recycling=True)


def _core(daemon: MeasuredDaemon) -> Mapping[str, Any]:
    return core_figures(CORE_LEASES[daemon.driver], CORE_KEEPS, has_expiry=daemon.driver == "cuda")


def _decode(daemon: MeasuredDaemon) -> Mapping[str, Any]:
    from gpulease.client.bench.decode_speed import DecodePlan, measure_decode

    steps: dict[str, dict[str, Figures]] = {"step": {}, "direct": {}, "torch": {}}

    def keep(figure: Mapping[str, object]) -> None:
        # Keep only the figures of steps, by how the steps ran, because others have no bound.
        kind, batch, took_ms = (figure.get(key) for key in ("figure", "batch", "ms"))
        if kind in steps and batch is not None and isinstance(took_ms, float):
            steps[str(kind)][str(batch)] = {"ms": took_ms}

    # Do not time single kernels, because nothing is promised about them.
    driver = daemon.driver
    plan = DecodePlan((SHAPES[driver],), BATCHES[driver], (CONTEXT,), ("decode_torch",), times_kernels=False)
    measure_decode(daemon.address, plan, keep, daemon.log)
    return steps


def _decoder(daemon: MeasuredDaemon) -> Mapping[str, Any]:
    from gpulease.client.bench.decode_service import measure_throughput

    batches = DECODER_BATCHES[daemon.driver]
    served = asyncio.run(measure_throughput(_checkpoint(daemon.driver), daemon.address, DECODER_S, batches))
    return {str(figures["sequences"]): figures for figures in served}


def _rebind(daemon: MeasuredDaemon) -> Mapping[str, Any]:
    from gpulease.client.bench.rebind_times import measure_rebinds

    (rebind,) = asyncio.run(measure_rebinds(daemon.address, _checkpoint(daemon.driver), (REBIND_TOKENS,)))
    return asdict(rebind)


def _load(daemon: MeasuredDaemon) -> Mapping[str, Any]:
    from gpulease.client.bench.checkpoint_load import warm_load_figures

    return warm_load_figures(daemon.address, SHAPES[daemon.driver])


def _checkpoint(driver: str) -> Any:
    from gpulease.client.bench.decode_shapes import SHAPES as CONFIGS
    from gpulease.client.decode import RandomCheckpoint

    return RandomCheckpoint(CONFIGS[SHAPES[driver]], 1)


def require_decode() -> None:
    """Raise MissingPrerequisite if the decode engine's extra is not installed: its promises would not be checked."""
    try:
        importlib.import_module("gpulease.client.decode")
    except ImportError as error:
        raise MissingPrerequisite(f"the decode engine's promises need the extra `decode`: {error}") from None


PARTS: Final = (
    CheckPart("session", "a session's calls and copies", DaemonKind.ANY, _session),
    CheckPart("leases", f"{LEASES} leases, each acquired and freed, expired, and revoked", DaemonKind.ANY, _lives),
    CheckPart("gate", f"how soon a worker stops launching, over {FLIPS} flips", DaemonKind.ANY, _gate),
    CheckPart("regions", "regions", DaemonKind.ANY, _regions),
    CheckPart("decode", "steps of the decode engine", DaemonKind.ANY, _decode),
    CheckPart("decoder", "a decoder compared with its engine", DaemonKind.ANY, _decoder),
    CheckPart("rebind", f"a rebind behind {REBIND_TOKENS} tokens", DaemonKind.ANY, _rebind),
    CheckPart("load", "a checkpoint loaded from the page cache", DaemonKind.ANY, _load),
    CheckPart("core", "the lease core with its journal, audit log and log", DaemonKind.ANY, _core),
    CheckPart("remote", "copies over TCP and TLS", DaemonKind.REACHABLE, _remote),
    CheckPart("round_trips", "round trips compared with C", DaemonKind.WARM, _round_trips),
    CheckPart("warm", f"{LEASES} leases with ready contexts", DaemonKind.WARM, _warm),
    CheckPart("first", f"first uses in {LEASES} sessions", DaemonKind.WARM, _first),
    CheckPart(
        "gateway", "requests of one lease each, the tenant's own contexts used again", DaemonKind.RECYCLING, _gateway
    ),
)
"""All parts; those that use the same daemon follow each other. `decode` is before `rebind`, which is compared with a
decode step.
"""
