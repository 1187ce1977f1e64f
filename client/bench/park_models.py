"""Models that share a card with room for only some of them: parking them compared with loading them again.

    gpulease bench --park

Each model is a lease filled with addresses within its own bytes (woven_data.py). A request launches kernels that follow
these addresses; afterwards, every word is compared, which is not timed. One client sends the requests: to the models in
turn, at random, and at random by Zipf's law. A server without parking loads models again: it frees the lease used least
recently, acquires another one, and writes its bytes from a file in the page cache.
"""

import contextlib
import itertools
import mmap
import random
import tempfile
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, Final

from gpulease.client import Busy, GpuBuilder, GpuExclusivityClass, GpuLease, GpuSession
from gpulease.client.bench.figures import Figures, LogLine, percentile
from gpulease.client.bench.woven_data import EXTRA_BYTES, WovenData, woven_bytes
from gpulease.client.console.private_daemon import private_daemon
from gpulease.client.console.reports import first_card
from gpulease.client.console.tables import table
from gpulease.client.sync.driver import ask
from gpulease.protocol import Opcode
from gpulease.protocol.messages import LeaseRef

MODELS: Final = 8
"""Number of models by default. The card has room for half of them."""

SPARE_MODELS: Final = 2
"""By default, host memory has room for the parked models and this many more: one that leaves, one that returns."""

MODEL_BYTES: Final = {"cpu": 64 << 20, "cuda": 16 << 30}

WAIT_S: Final = 60.0
LEASE_S: Final = 1800.0

PIECE_BYTES: Final = 64 << 20
"""Number of bytes that are written from the file in one call."""

_SETTINGS: Final = """\
[limits]
park_memory = "{park_memory}B"
overcommit = 8.0
park_stay_ms = 0
parks_per_minute = 100000
"""


@dataclass(slots=True)
class PatternFigures:
    """The requests of one pattern.

    Attributes:
        hits_s: Seconds of each request to a model that was on the card.
        misses_s: Seconds of each request to a model that was not.
        refused: Number of requests that found no room in time.
        wrong: Number of wrong words and results.
    """

    hits_s: list[float] = field(default_factory=list)
    misses_s: list[float] = field(default_factory=list)
    refused: int = 0
    wrong: int = 0

    def figures(self) -> Figures:
        count = len(self.hits_s) + len(self.misses_s)
        figures = {"requests": float(count), "hit_rate": len(self.hits_s) / max(1, count)}
        for name, took_s in (("back", self.misses_s), ("there", self.hits_s)):
            if took_s:
                figures |= {
                    f"{name}_p50_ms": percentile(took_s, 50) * 1e3,
                    f"{name}_p99_ms": percentile(took_s, 99) * 1e3,
                }
        return figures | {"refused": float(self.refused), "wrong": float(self.wrong)}


def patterns(models: int) -> dict[str, Iterator[int]]:
    """Return the numbers, from 0, of the requested models by pattern; each pattern is the same in every run."""
    turn, uniform, zipf = itertools.cycle(range(models)), random.Random(1), random.Random(2)
    weights = [1 / (number + 1) for number in range(models)]
    return {
        "in turn": turn,
        "at random": iter(lambda: uniform.randrange(models), -1),
        "Zipf": iter(lambda: zipf.choices(range(models), weights)[0], -1),
    }


@dataclass(frozen=True, slots=True)
class ParkPlan:
    """What to measure.

    Attributes:
        size_bytes: Size of each model.
        models: Number of models. The card has room for half of them, rounded down.
        host_models: For how many models `park_memory` has room.
        pattern_s: Seconds that each pattern runs, parked and loaded again.
    """

    size_bytes: int
    models: int
    host_models: int
    pattern_s: float

    @property
    def resident(self) -> int:
        """Number of models for which the card has room."""
        return self.models // 2


def measure_park(
    driver: str,
    size_bytes: int | None,
    seconds: float,
    log: LogLine,
    models: int = MODELS,
    host_models: int | None = None,
) -> dict[str, Any]:
    """Measure models that are parked, and models that are loaded again, for `seconds` together; returns the report.

    None means the default size, and host memory for the parked models and SPARE_MODELS more. Raises
    MissingPrerequisite.
    """
    # Step 1: start a daemon on the whole card, to find out how many bytes a model's lease is charged.
    with private_daemon(driver) as address:
        card = first_card(address, "held_bytes")
        size_bytes = woven_bytes(size_bytes or MODEL_BYTES[card["driver"]])
        slice_bytes = size_bytes + EXTRA_BYTES[card["driver"]]
        with _builder(address, slice_bytes).acquire():
            charge_bytes = int(first_card(address, "held_bytes")["held_bytes"])
    host_models = models - models // 2 + SPARE_MODELS if host_models is None else host_models
    plan = ParkPlan(size_bytes, models, host_models, seconds / 2 / len(patterns(models)))
    # Step 2: start one with so little memory that the contexts of all models fit, but only some models.
    over_bytes = charge_bytes - slice_bytes
    vram_bytes = models * over_bytes + plan.resident * slice_bytes + slice_bytes // 2
    vram_bytes = min(vram_bytes, int(card["capacity_bytes"]))
    settings = _SETTINGS.format(park_memory=host_models * (slice_bytes + (4 << 20)))
    report: dict[str, Any] = {
        "card": card["name"],
        "driver": card["driver"],
        "models": models,
        "host_models": host_models,
        "model_bytes": size_bytes,
        "on": vram_bytes,
    }
    with private_daemon(driver, vram=(str(vram_bytes),), settings=settings) as address:
        report["parked"] = _measure_parked(address, slice_bytes, plan, log)
        report["loaded again"] = _measure_loaded(address, slice_bytes, plan, log)
    return report


def is_right(report: dict[str, Any]) -> bool:
    """Return whether every pattern had requests that returned data, no wrong word, and no refusal."""
    requests = [*report["parked"].values(), *report["loaded again"].values()]
    return all(figures["requests"] and not figures["wrong"] and not figures["refused"] for figures in requests)


def _builder(address: str, size_bytes: int) -> GpuBuilder:
    # All models share one card, however many the host has.
    builder = GpuBuilder(address).min_vram(size_bytes).lease_secs(LEASE_S).timeout(WAIT_S).parkable().device("0")
    return builder.exclusivity(GpuExclusivityClass.SHARED)


def _measure_parked(address: str, slice_bytes: int, plan: ParkPlan, log: LogLine) -> dict[str, Figures]:
    with contextlib.ExitStack() as stack:
        log(f"{plan.models} models of {plan.size_bytes >> 20} MiB")
        models: list[tuple[GpuLease, WovenData]] = []
        for number in range(plan.models):
            lease = stack.enter_context(_builder(address, slice_bytes).acquire())
            session = stack.enter_context(GpuSession(lease))
            models.append((lease, WovenData(session, plan.size_bytes, 2 * number + 1)))
            models[-1][1].begin()
        # Use each model once, so that the host memory is populated.
        for _, model in models:
            model.begin()

        def request(number: int) -> tuple[bool, float, int]:
            lease, model = models[number]
            is_resident = _phase(address, lease) == "resident"
            began = time.perf_counter()
            model.begin()
            took_s = time.perf_counter() - began
            return is_resident, took_s, model.check()

        return _run(request, plan, log, "parked")


def _phase(address: str, lease: GpuLease) -> str:
    return str(ask(Opcode.LEASE_QUERY, LeaseRef(lease.lease_id), address).report["park"]["phase"])


class _LoadedModels:
    """Leases that are filled from a file. If there is no room, the one used least recently is freed."""

    def __init__(self, address: str, slice_bytes: int, plan: ParkPlan, source: mmap.mmap) -> None:
        self._address, self._source = address, source
        self._slice_bytes, self._plan = slice_bytes, plan
        self._models: OrderedDict[int, tuple[GpuLease, WovenData]] = OrderedDict()

    def request(self, number: int) -> tuple[bool, float, int]:
        is_loaded, began = number in self._models, time.perf_counter()
        if not is_loaded:
            self._load(number)
        self._models.move_to_end(number)
        model = self._models[number][1]
        model.begin()
        took_s = time.perf_counter() - began
        return is_loaded, took_s, model.check()

    def _load(self, number: int) -> None:
        if len(self._models) == self._plan.resident:
            self._end(self._models.popitem(last=False)[1])
        lease = _builder(self._address, self._slice_bytes).acquire()
        size_bytes = self._plan.size_bytes
        model = WovenData(GpuSession(lease), size_bytes, 1, is_woven=False)
        with memoryview(self._source) as view:
            for at in range(0, size_bytes, PIECE_BYTES):
                model.session.mem_write(model.block, at, view[at : min(at + PIECE_BYTES, size_bytes)])
        self._models[number] = (lease, model)

    def _end(self, model: tuple[GpuLease, WovenData]) -> None:
        model[1].session.close()
        model[0].free()

    def close(self) -> None:
        while self._models:
            self._end(self._models.popitem()[1])


def _measure_loaded(address: str, slice_bytes: int, plan: ParkPlan, log: LogLine) -> dict[str, Figures]:
    size_bytes = plan.size_bytes
    log("the same from the page cache")
    with tempfile.TemporaryFile() as file:
        # Let the card compute the bytes of the file from which every model is loaded, with 0 as the origin.
        with _builder(address, slice_bytes).acquire() as lease, GpuSession(lease) as session:
            model = WovenData(session, size_bytes, 1, is_woven=False)
            model.weave(model.block)
            for at in range(0, size_bytes, PIECE_BYTES):
                file.write(session.mem_read(model.block, at, min(PIECE_BYTES, size_bytes - at)))
        file.flush()
        with mmap.mmap(file.fileno(), size_bytes, prot=mmap.PROT_READ) as source:
            models = _LoadedModels(address, slice_bytes, plan, source)
            try:
                return _run(models.request, plan, log, "loaded again")
            finally:
                models.close()


def _run(
    request: Callable[[int], tuple[bool, float, int]], plan: ParkPlan, log: LogLine, label: str
) -> dict[str, Figures]:
    figures: dict[str, Figures] = {}
    for name, numbers in patterns(plan.models).items():
        log(f"{label}: requests {name}")
        counted, deadline_s = PatternFigures(), time.monotonic() + plan.pattern_s
        while time.monotonic() < deadline_s:
            try:
                is_resident, took_s, wrong = request(next(numbers))
            except Busy:
                counted.refused += 1
                continue
            (counted.hits_s if is_resident else counted.misses_s).append(took_s)
            counted.wrong += wrong
        figures[name] = counted.figures()
    return figures


def park_table(report: dict[str, Any]) -> str:
    """Lay out a row for each pattern, parked and loaded again."""
    names = ("requests", "hit_rate", "back_p50_ms", "back_p99_ms", "there_p50_ms", "there_p99_ms", "refused", "wrong")
    title = f"{report['models']} models of {report['model_bytes'] >> 20} MiB on {report['card']}"
    head = [f"{title}, host memory for {report['host_models']}", *names]
    rows = [
        [f"{start_kind}, {pattern}", *(f"{figures[name]:.3g}" if name in figures else "" for name in names)]
        for start_kind in ("parked", "loaded again")
        for pattern, figures in report[start_kind].items()
    ]
    return table([text.replace("_", " ") for text in head], rows)
