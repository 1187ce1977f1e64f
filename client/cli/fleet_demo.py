"""`gpulease demo --fleet`: three daemons and a real etcd; a node is killed, and another one takes over its name."""

import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

from gpulease.client import GpuLeaseError
from gpulease.client.console.exit_status import MissingPrerequisite
from gpulease.client.console.named_tenant import ASK_PAUSE_S, Tenant, acquire_name, builder_of, overlaps
from gpulease.client.console.private_daemon import PrivateDaemon, short_folder, unwound_by_signals
from gpulease.client.console.private_fleet import PrivateFleet, private_etcd

NODES: Final = 3
NAME: Final = "model-a"
HORIZON_S: Final = 4
"""The membership deadline (horizon) in seconds. A dead node's names are free this long after its last heartbeat. A
daemon's default is 30 s."""

JOIN_S: Final = 60.0
KERNELS: Final = 100
"""Number of kernels that run on the second node before the demonstration ends."""


def run_fleet_demo(ptx: bytes, say: Callable[[str], Any]) -> dict[str, Any]:
    """Run the demonstration; returns its report. Raises MissingPrerequisite or GpuLeaseError.

    Args:
        ptx: PTX with the kernel `bias`.
        say: Prints a line.
    """
    # End the block in order after a signal, so that no daemon and no etcd is left running.
    with unwound_by_signals(), tempfile.TemporaryDirectory(prefix="gpulease-", dir=short_folder()) as name:
        folder = Path(name)
        with private_etcd(folder / "etcd") as (etcd,), PrivateFleet(folder, [etcd.endpoint], HORIZON_S) as fleet:
            fleet.add(NODES)
            etcd_at = f"one etcd at {etcd.endpoint}"
            say(f"Fleet    {NODES} daemons on the embedded driver, {etcd_at}, a horizon of {HORIZON_S} s")
            return _fail_over(fleet.nodes, ptx, say)


def _fail_over(nodes: list[PrivateDaemon], ptx: bytes, say: Callable[[str], Any]) -> dict[str, Any]:
    # Step 1: node-1 serves the name, and node-2 refuses it to another tenant.
    first = acquire_name(nodes[0].address, NAME, JOIN_S)
    say(f"Named    node-1 serves {NAME} under epoch {first.epoch}: lease {first.lease_id_text}")
    before = Tenant(first, ptx)
    before.start()
    refused = _refusal(nodes[1].address)
    say(f"Refused  at node-2: {refused}")
    # Wait until the session runs kernels, because a dead daemon can't pass its connection to a worker.
    before.await_kernels(1)
    # Step 2: kill only the daemon. Its worker continues, but must stop before another node may serve the name.
    nodes[0].kill()
    killed_s = time.monotonic()
    say("Killed   node-1's daemon, by SIGKILL; its session continues until the last horizon that the daemon wrote")
    # Step 3: acquire the name at node-2. That succeeds once node-1's membership deadline has certainly passed.
    second = acquire_name(nodes[1].address, NAME, JOIN_S)
    back_s = time.monotonic() - killed_s
    after = Tenant(second, ptx)
    after.start()
    before.join()
    after.await_kernels(KERNELS)
    after.stop()
    # The session continued after the daemon's death until its last kernel ended.
    ended_s = before.work.spans[-1][1] - killed_s
    say(f"Ended    node-1's session {ended_s:.1f} s after the kill: {before.work.end}")
    say(f"Back     node-2 serves {NAME} {back_s:.1f} s after the kill under epoch {second.epoch}")
    # Step 4: prove that no kernel of the first session overlaps with one of the second.
    count = overlaps(before.work, after.work)
    say(f"Overlaps {count}: {len(before.work.spans)} kernels before, {len(after.work.spans)} after")
    second.free()
    return {
        "nodes": NODES,
        "name": NAME,
        "horizon_s": HORIZON_S,
        "epochs": [first.epoch, second.epoch],
        "refused": refused,
        "session_ended_after_s": round(ended_s, 3),
        "session_end": before.work.end,
        "served_again_after_s": round(back_s, 3),
        "kernels": [len(before.work.spans), len(after.work.spans)],
        "overlaps": count,
    }


def _refusal(address: str) -> str:
    """Return the text of the error that a second tenant gets when it asks for the name."""
    # At first the node may not have joined the fleet, and refuses the request for that reason.
    until_s = time.monotonic() + JOIN_S
    while True:
        try:
            builder_of(address, NAME).acquire().free()
        except GpuLeaseError as error:
            if "has the name" in str(error) or time.monotonic() >= until_s:
                return str(error)
            time.sleep(ASK_PAUSE_S)
        else:
            raise MissingPrerequisite("two nodes served one name at the same time: please report this")
