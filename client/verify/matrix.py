"""The matrix of `gpulease verify`: faults next to a neighbour at work, then promises that do not depend on a fault."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Final

from gpulease.client import GpuLeaseError
from gpulease.client.console.private_daemon import private_daemon
from gpulease.client.console.scene import Breach, MatrixCheck, Scene, breach_of
from gpulease.client.verify.claims import GIB, ClaimResult, check, claims, six_and_no_seventh
from gpulease.client.verify.faults import FaultOutcome, Sizes, faults
from gpulease.client.verify.neighbour import Neighbour, Window, neighbour
from gpulease.client.verify.parked_claims import CARD_VRAM, HOST_VRAM, SETTINGS, parked_claims
from gpulease.client.verify.refused_address import ADDRESS_REFUSED, address_refused
from gpulease.client.verify.region_claims import broker_killed, region_claims

SIX_LEASES: Final = "six leases"
BROKER_KILLED: Final = "regions of a killed broker"
SIX_SLICES_BYTES: Final = 7 * GIB
SIX_VRAM: Final = "48GiB"

WARM_CONTEXTS: Final = 4
"""Number of contexts that are kept ready during the faults, because the driver keeps some memory while any context
exists."""

QUIET_S: Final = 1.0
SMALL_QUIET_S: Final = 0.05

CARD_SIZES: Final = Sizes(launches=1_000_000, long_kernels=150)
HOST_SIZES: Final = Sizes(launches=20_000, long_kernels=4)
"""Sizes on a card, and smaller sizes on the embedded driver, which compiles slowly and is not made for launches."""


@dataclass(frozen=True, slots=True)
class FaultResult:
    """The result of one fault; `breach` is "" if every promise held.

    Attributes:
        fault: The fault's name.
        told: The fault's outcome; None without one. The JSON report uses this name.
        quiet: The neighbour's rounds before the fault.
        during: The neighbour's rounds during the fault.
        more_mib: How many MiB more than before the fault the card shows in use.
        breach: What broke a promise.
    """

    fault: str
    told: FaultOutcome | None
    quiet: Window
    during: Window
    more_mib: int
    breach: str


@dataclass(frozen=True, slots=True)
class MatrixReport:
    """The result of a run: each fault, and each promise."""

    scene: Scene
    faults: list[FaultResult]
    claims: list[ClaimResult]

    @property
    def breaches(self) -> int:
        """Number of rows in which a promise did not hold."""
        breaches = [row.breach for row in self.faults] + [claim.breach for claim in self.claims]
        return sum(map(bool, breaches))


def run_matrix(driver: str, only: str, on_fault: Callable[[FaultResult], object]) -> MatrixReport:
    """Run the faults and promises with `only` in their names, on private daemons.

    Args:
        driver: The daemons' driver.
        only: Part of the names; "" for all.
        on_fault: Receives each fault's result.
    """
    # Use a private daemon, so that only this program changes its figures.
    with private_daemon(driver, warm_contexts=WARM_CONTEXTS) as address:
        scene = Scene.at(address)
        fault_results = _run_faults(scene, only, on_fault)
        promises = [*claims(scene), *region_claims(scene)]
        proved = [check(claim.name, partial(claim.prove, scene)) for claim in promises if only in claim.name]
    # These need separate daemons: some are killed, the others have a card of a defined size.
    if only in BROKER_KILLED:
        proved.append(check(BROKER_KILLED, lambda: broker_killed(scene.driver)))
    if only in ADDRESS_REFUSED:
        proved.append(check(ADDRESS_REFUSED, lambda: address_refused(scene.driver)))
    if _fits_six(scene) and only in SIX_LEASES:
        with private_daemon(driver, (SIX_VRAM,)) as address:
            six = Scene.at(address)
            proved.append(check(SIX_LEASES, lambda: six_and_no_seventh(six, SIX_SLICES_BYTES)))
    if any(only in claim.name for claim in parked_claims(scene)):
        vram = CARD_VRAM if scene.is_card else HOST_VRAM
        with private_daemon(driver, (vram,), settings=SETTINGS) as address:
            parking = Scene.at(address)
            selected = [claim for claim in parked_claims(parking) if only in claim.name]
            proved += [check(claim.name, partial(claim.prove, parking)) for claim in selected]
    return MatrixReport(scene, fault_results, proved)


def _fits_six(scene: Scene) -> bool:
    return not scene.is_card or scene.vram_bytes >= 48 * GIB


def _run_faults(scene: Scene, only: str, on_fault: Callable[[FaultResult], object]) -> list[FaultResult]:
    # On the embedded driver, less time is enough.
    sizes, quiet_s = (CARD_SIZES, QUIET_S) if scene.is_card else (HOST_SIZES, SMALL_QUIET_S)
    selected = [fault for fault in faults(scene, sizes) if only in fault.name]
    results: list[FaultResult] = []
    if not selected:
        return results
    # Use one neighbour for all faults, so that damage from one fault also shows in the figures of the next.
    with neighbour(scene.address, scene.card_uuid) as bystander:
        for fault in selected:
            results.append(_run_fault(scene, bystander, fault, quiet_s))
            on_fault(results[-1])
    return results


def _run_fault(scene: Scene, bystander: Neighbour, fault: MatrixCheck[FaultOutcome], quiet_s: float) -> FaultResult:
    # Step 1: a full pool, and the figures before. Step 2: the neighbour undisturbed. Step 3: the fault. Step 4: the
    # figures must be back, and the neighbour must have noticed nothing.
    breach = _breach_in(scene.wait_for_pool)
    used_mib, held_bytes, leases = scene.used_mib(), scene.held_bytes(), scene.lease_ids()
    bystander.window()
    time.sleep(quiet_s)
    quiet = bystander.window()
    report = None
    try:
        report = fault.prove(scene)
    except (Breach, GpuLeaseError) as error:
        breach = breach or breach_of(error)
        # A failed proof may have left its lease. Free the lease, so that the next fault starts clean.
        for lease_id in scene.lease_ids() - leases:
            scene.free(lease_id)
    during = bystander.window()
    breach = breach or _breach_in(scene.wait_for_pool)
    # Compare three independent sources: the neighbour, the daemon, and the card itself.
    more_mib = scene.card_is_back_to(used_mib)
    if not breach and during.error:
        breach = f"the neighbour: {during.error}"
    if not breach and scene.held_bytes() != held_bytes:
        breach = f"the daemon holds {scene.held_bytes() - held_bytes} bytes more than before"
    if not breach and more_mib > 0:
        breach = f"the card shows {more_mib} MiB more than before"
    return FaultResult(fault.name, report, quiet, during, more_mib, breach)


def _breach_in(proof: Callable[[], None]) -> str:
    try:
        proof()
    except (Breach, GpuLeaseError) as error:
        return breach_of(error)
    return ""
