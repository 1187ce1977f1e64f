"""The matrix: each fault beside a neighbour at work, and what the neighbour and the card saw of it."""

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from gpulease.client import GpuLeaseError
from gpulease.client.verify.faults import Fault, Told
from gpulease.client.verify.neighbour import Neighbour, Window
from gpulease.client.verify.scene import Breach, Scene


@dataclass(frozen=True, slots=True)
class Row:
    """One fault and what came of it; `breach` is "" if every promise held."""

    fault: str
    told: Told | None
    quiet: Window
    during: Window
    more_mib: int
    breach: str


def run_matrix(scene: Scene, beside: Neighbour, rows: list[Fault], quiet_s: float) -> Iterator[Row]:
    """One row after the other."""
    for fault in rows:
        yield _run(scene, beside, fault, quiet_s)


def _run(scene: Scene, beside: Neighbour, fault: Fault, quiet_s: float) -> Row:
    breach = _breach_of(scene.wait_for_pool)
    used_mib, held_bytes, leases = scene.used_mib(), scene.held_bytes(), scene.lease_ids()
    beside.window()
    time.sleep(quiet_s)
    quiet = beside.window()
    told = None
    try:
        told = fault.run(scene)
    except (Breach, GpuLeaseError) as error:
        breach = breach or f"{type(error).__name__}: {error}"
        for lease_id in scene.lease_ids() - leases:
            scene.free(lease_id)
    during = beside.window()
    breach = breach or _breach_of(scene.wait_for_pool)
    more_mib = scene.card_is_back_to(used_mib)
    if not breach and during.error:
        breach = f"the neighbour: {during.error}"
    if not breach and scene.held_bytes() != held_bytes:
        breach = f"the daemon holds {scene.held_bytes() - held_bytes} bytes more than before"
    if not breach and more_mib > 0:
        breach = f"the card shows {more_mib} MiB more than before"
    return Row(fault.name, told, quiet, during, more_mib, breach)


def _breach_of(proof: Callable[[], None]) -> str:
    try:
        proof()
    except (Breach, GpuLeaseError) as error:
        return f"{type(error).__name__}: {error}"
    return ""
