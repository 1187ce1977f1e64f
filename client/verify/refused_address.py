"""A parked session has an address that its next worker can't use, so the session must not be resumed there.

Another mapping in the worker's process occupies the address, so the driver really refuses it. A session without a
process then ends with its lease. A session that still has its former worker continues there.
"""

import contextlib
import mmap
import os
import tempfile
from collections.abc import Iterator
from importlib.resources import files
from pathlib import Path
from typing import Final

from gpulease.client import GpuLease, GpuLeaseError, GpuSession
from gpulease.client.bench.woven_data import EXTRA_BYTES, WovenData, woven_bytes
from gpulease.client.console.private_daemon import PrivateDaemon, killable_daemon
from gpulease.client.console.scene import Breach, Scene, worker_pid
from gpulease.client.errors import GpuSessionFailed, Unsupported
from gpulease.client.sync.driver import ask
from gpulease.client.verify.neighbour import neighbour
from gpulease.client.verify.occupant import VARIABLE
from gpulease.client.verify.parked_claims import CARD_VRAM, HOST_VRAM, SETTINGS, leave
from gpulease.protocol import Opcode
from gpulease.protocol.messages import Empty, LeaseMove

ADDRESS_REFUSED: Final = "a parked session's address refused"

OTHER_WORKERS: Final = 'warm_contexts = 1\nrecycle = "same-tenant"\n'
"""Settings of workers: a daemon that is started again with them finds workers that another version started. It has a
warm context, so that the session is refused by workers of both kinds."""

REFUSED: Final = "would begin at"
"""Part of the drivers' reason."""

MISMATCHES: Final = "gpu_lease_image_mismatch_total{"


class Occupant:
    """Occupies addresses in each worker that is forked while the block of `at` lasts.

    Args:
        folder: A folder that is used for nothing else.

    Attributes:
        environment: The variables that the daemon's environment needs.
    """

    def __init__(self, folder: Path) -> None:
        source = files("gpulease.client.verify").joinpath("occupant.py").read_bytes()
        (folder / "sitecustomize.py").write_bytes(source)
        self._list = folder / "addresses"
        path = os.pathsep.join([str(folder), *filter(None, [os.environ.get("PYTHONPATH")])])
        self.environment = {"PYTHONPATH": path, VARIABLE: str(self._list)}

    @contextlib.contextmanager
    def at(self, address: int) -> Iterator[None]:
        self._list.write_text(f"{address // mmap.PAGESIZE * mmap.PAGESIZE:x}\n")
        try:
            yield
        finally:
            self._list.unlink()


def address_refused(driver: str) -> str:
    """Prove that if the next worker has another mapping at a session's address, only an upgraded session survives."""
    vram = CARD_VRAM if driver == "cuda" else HOST_VRAM
    with (
        tempfile.TemporaryDirectory(prefix="gpulease-") as folder,
        killable_daemon(driver, (vram,), settings=SETTINGS, environment=Occupant(Path(folder)).environment) as daemon,
    ):
        occupant, scene = Occupant(Path(folder)), Scene.at(daemon.address)
        with neighbour(scene.address, scene.card_uuid) as bystander:
            held_bytes = scene.held_bytes()
            bystander.window()
            ended = _cold_one_ends(scene, occupant)
            _upgraded_one_goes_back(daemon, scene, occupant)
            window = bystander.window()
            if window.error or not window.rounds:
                raise Breach(f"the neighbour of a refused session: {window.error or 'it did no work'}")
            if (more_bytes := scene.held_bytes() - held_bytes) > 0:
                raise Breach(f"{more_bytes} bytes of refused sessions are left")
    return f"a cold session ended ({ended}), counted once; one that was upgraded went on in its former worker"


def _cold_one_ends(scene: Scene, occupant: Occupant) -> str:
    """Refuse the address of a session without a process. Returns the tenant's error."""
    lease, session, data, address = _begin(scene, 11)
    counted = _mismatches(scene)
    leave(scene, lease)
    with occupant.at(address):
        try:
            data.begin()
            data.check()
        except GpuSessionFailed as error:
            told = str(error)
        else:
            raise Breach("a session was resumed at another address")
    if (cause := scene.wait_for_end(lease.lease_id)) != "faulted" or REFUSED not in told:
        raise Breach(f"a session whose address was refused ended as {cause}: {told}")
    if (more := _mismatches(scene) - counted) != 1:
        raise Breach(f"a session whose address was refused was counted {more:g} times")
    with contextlib.suppress(GpuLeaseError):
        session.close()
    return told


def _upgraded_one_goes_back(daemon: PrivateDaemon, scene: Scene, occupant: Occupant) -> None:
    """Refuse the address of a session in the worker of the next version: it continues in its former worker."""
    lease, session, data, address = _begin(scene, 13)
    with lease, session:
        former, counted = worker_pid(lease.lease_id), _mismatches(scene)
        daemon.kill()
        settings = daemon.folder / "settings.toml"
        settings.write_text(OTHER_WORKERS + settings.read_text())
        with occupant.at(address):
            daemon.start()
            scene.wait_for_pool()
            try:
                ask(Opcode.LEASE_MOVE, LeaseMove(lease.lease_id, scene.card_uuid), scene.address)
            except Unsupported as error:
                if REFUSED not in str(error):
                    raise
            else:
                raise Breach("a session was upgraded although its address was refused")
        data.begin()
        if wrong := data.check():
            raise Breach(f"a session that went back to its former worker has {wrong} wrong words")
        if worker_pid(lease.lease_id) != former:
            raise Breach("a session whose address was refused is in another process")
        if _mismatches(scene) > counted:
            raise Breach("a session that went back was counted as ended")


def _begin(scene: Scene, seed: int) -> tuple[GpuLease, GpuSession, WovenData, int]:
    """Return a parkable lease, its session with checked data, and an address of that data."""
    size_bytes = woven_bytes(scene.vram_bytes // 4)
    lease = scene.builder(size_bytes + EXTRA_BYTES[scene.driver]).parkable().acquire()
    session = GpuSession(lease)
    address = session.mem_alloc(mmap.PAGESIZE).handle
    data = WovenData(session, size_bytes, seed)
    data.begin()
    if wrong := data.check():
        raise Breach(f"a session had {wrong} wrong words before it was parked")
    return lease, session, data, address


def _mismatches(scene: Scene) -> float:
    """Return the number of sessions that ended because they could not be restored exactly."""
    lines = ask(Opcode.METRICS, Empty(), scene.address).exposition.splitlines()
    return sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith(MISMATCHES))
