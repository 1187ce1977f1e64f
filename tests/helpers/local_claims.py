"""Claims of names that a daemon without a fleet keeps in a folder, as if its fleet had one node and a reliable store.

horizon     while it exists, the membership deadline is this number of seconds ahead, and moves ten times a second
lost        if it exists, the claims are lost; it contains the reason
epoch       the last epoch
claims      the claimed names, as JSON
released    each released claim, as a line NAME EPOCH
"""

import asyncio
import json
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path

from gpulease.daemon.broker.name_claims import (
    NameAnswer,
    NameGranted,
    NameRequest,
    QuotaAnswer,
    QuotaGranted,
    QuotaRequest,
)
from gpulease.daemon.broker.runtime import Runtime
from gpulease.daemon.broker.service import Service
from gpulease.daemon.leases.membership_events import ClaimsLost, MembershipDeadlineMoved
from gpulease.protocol.failures import Failure
from gpulease.protocol.opcodes import Status

BEAT_S = 0.1


class LocalClaims:
    labels: Mapping[str, str] = {"zone": "a"}

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def claim_name(self, want: NameRequest, on_answer: Callable[[NameAnswer], None]) -> Callable[[], None]:
        """Report the answer in the event loop's next round, like an answer from another process."""
        handle = asyncio.get_running_loop().call_soon(self._answer, want, on_answer)
        return handle.cancel

    def refusal(self) -> Failure | None:
        return None

    def release(self, name: str, epoch: int) -> None:
        claims = self._claims()
        if claims.get(name) == epoch:
            del claims[name]
            self._keep(claims)
        with (self._folder / "released").open("a") as released:
            released.write(f"{name} {epoch}\n")

    def on_fenced(self) -> None:
        """Do nothing, because a fenced lease keeps its claim."""

    def claim_quota(self, want: QuotaRequest, on_answer: Callable[[QuotaAnswer], None]) -> Callable[[], None]:
        return asyncio.get_running_loop().call_soon(on_answer, QuotaGranted()).cancel

    def give_back(self, tenant: str, lease_id: int) -> None:
        with (self._folder / "released").open("a") as released:
            released.write(f"{tenant} {lease_id:032x}\n")

    def _answer(self, want: NameRequest, on_answer: Callable[[NameAnswer], None]) -> None:
        claims = self._claims()
        if want.name in claims:
            on_answer(Failure(Status.BUSY, f"the name {want.name!r} is taken", hint="Try again later."))
            return
        path = self._folder / "epoch"
        epoch = int(path.read_text()) + 1 if path.exists() else 1
        path.write_text(str(epoch))
        self._keep(claims | {want.name: epoch})
        on_answer(NameGranted(epoch))

    def _claims(self) -> dict[str, int]:
        path = self._folder / "claims"
        return json.loads(path.read_text()) if path.exists() else {}

    def _keep(self, claims: dict[str, int]) -> None:
        (self._folder / "claims").write_text(json.dumps(claims))


def serve_names(folder: Path) -> None:
    start = Service.start

    async def starting(self: Service) -> None:
        self.runtime.claims = LocalClaims(folder)
        await start(self)
        # A task that updates the horizon. The loop keeps it for as long as the daemon runs.
        self.beats = asyncio.create_task(beat(self.runtime, folder))  # type: ignore[attr-defined]

    Service.start = starting  # type: ignore[method-assign]


async def beat(runtime: Runtime, folder: Path) -> None:
    """Move the horizon ahead for as long as the file `horizon` exists."""
    horizon, lost = folder / "horizon", folder / "lost"
    while True:
        # The test removes the file, perhaps between two steps of this process.
        with suppress(FileNotFoundError):
            ahead_ns = int(float(horizon.read_text()) * 1e9)
            boot_ns = time.clock_gettime_ns(time.CLOCK_BOOTTIME)
            runtime.post(MembershipDeadlineMoved(time.monotonic_ns() + ahead_ns, boot_ns + ahead_ns))
        if lost.exists():
            reason = lost.read_text()
            lost.unlink()
            runtime.post(ClaimsLost(reason))
        await asyncio.sleep(BEAT_S)
