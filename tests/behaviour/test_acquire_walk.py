"""How many of our modules an acquire passes between the tenant's call and its lease."""

from pathlib import Path

import pytest

from gpulease.client import GpuBuilder
from helpers.call_tracer import CallTracer
from helpers.daemon import Daemon

MAX_MODULES = 54
"""Somebody who looks for a lost acquire reads at most these: in the client, the broker and the zygote. What
`call_tracer.UNTRACED` names is left out: the worker's own start, and reports to log, metrics and subscribers."""

ACQUIRES = 5
"""Number of counts. The walk is what all of them have, because a timer of the daemon may run during some."""


def test_an_acquire_passes_few_modules_between_the_tenants_call_and_its_lease(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tracer = CallTracer(tmp_path, monkeypatch)
    daemon = Daemon()
    leases, walks = [], []
    try:
        daemon.wait_until_it_answers()
        for _ in range(ACQUIRES):
            builder = GpuBuilder(daemon.address).min_vram(1 << 20).lease_secs(60)
            with tracer.traced() as modules:
                leases.append(builder.acquire())
            walks.append(modules)
        for lease in leases:
            lease.free()
    finally:
        daemon.stop()
    walk = set.intersection(*walks)
    assert {"client/sync/lease.py", "daemon/leases/table.py", "daemon/zygote/__main__.py"} <= walk
    assert len(walk) <= MAX_MODULES, "\n".join(sorted(walk))
