"""The server of `lab.server_storm`, in a separate process, so that its memory is measured without its callers'.

    PYTHONPATH=.dev:tests python -m lab.storm_server ADDRESS FOLDER

It prints its address. Then it replies to each command on its standard input with one line of JSON, until the input
ends:

| command | reply |
|---|---|
| `revoke` | whether a region of a loaded model was revoked |
| `unfinished` | what is still running or in use |
| `at_rest` | the numbers of tasks, open decoders, threads and descriptors, and the tasks' names |
| `changes` | how many models were loaded, parked and unloaded |
"""

import asyncio
import json
import logging
import os
import random
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, Final

from gpulease.client.decode import DecoderSettings, SharedPrefix, TenantConfig, open_model
from gpulease.client.decode.scheduler.model_residency import ModelState, ResidencyLimits
from gpulease.client.decode.supervisor.decoder import engine_bytes
from gpulease.client.decode.supervisor.model_pool import ModelSpec
from gpulease.client.decode.text.named_prefixes import NamedPrefix
from gpulease.client.errors import GpuLeaseError
from helpers.decode.many_models import PoolRig, pool_rig

TENANTS: Final = (TenantConfig("ann", 4, 40), TenantConfig("bob", 2, 20))
SETTINGS: Final = DecoderSettings(
    max_rows=8, prefill_rows=8, max_sequences=6, positions=160, text_processes=1, rebinds_at_once=1_000_000_000
)
MODELS: Final = ("a", "b", "c", "d", "e")
RESIDENT: Final = 3
PARKED: Final = 1

PREFIX_SHARE: Final = 0.03
"""The share of revocations that revoke a shared prefix."""

PREFIX: Final = [7 + number * 13 % 480 for number in range(80)]
"""Five full blocks with which some prompts of all tenants begin. The first four are a named shared prefix."""

SHARED: Final = NamedPrefix("shared", token_ids=tuple(PREFIX[:64]))

STOP_LIMIT_S: Final = 120.0


def model_paths(folder: Path) -> dict[str, Path]:
    return {name: folder / name for name in MODELS}


def lease_bytes(folder: Path) -> int:
    """Return the bytes of the lease of the largest model."""
    shared = SharedPrefix(SHARED.name, SHARED.token_ids)
    paths = model_paths(folder).values()
    return max(engine_bytes(open_model(path), TENANTS, SETTINGS, [shared]) for path in paths)


class StormServer:
    """The server's process, as its callers see it. Several threads may use it."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process, self._turn = process, threading.Lock()
        self.pid, self.url = process.pid, self._line()

    def ask(self, command: str) -> Any:
        """Return the answer to a command. Raises EOFError if the process has ended."""
        assert self._process.stdin
        with self._turn:
            print(command, file=self._process.stdin, flush=True)
            return self._line()

    def _line(self) -> Any:
        assert self._process.stdout
        if not (line := self._process.stdout.readline()):
            raise EOFError("the server's process has ended")
        return json.loads(line)


@contextmanager
def storm_server(address: str, folder: Path) -> Iterator[StormServer]:
    """Start a server with the models in this folder on this daemon. It ends with the block."""
    command = [sys.executable, "-P", "-m", "lab.storm_server", address, str(folder)]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        yield StormServer(process)
    finally:
        assert process.stdin
        process.stdin.close()
        try:
            process.wait(STOP_LIMIT_S)
        finally:
            process.kill()
            process.wait()
            assert process.stdout
            process.stdout.close()


async def _revoke_one(rig: PoolRig, chooser: random.Random) -> bool:
    pool = rig.pool
    loaded = [it for name, it in pool.decoders.items() if pool.state_of(name) is ModelState.LOADED]
    regions = [one.region for decoder in loaded for one in decoder.regions.pools.values()]
    # A prefix is computed again only with the next load of its model, so revoke few of them.
    if chooser.random() < PREFIX_SHARE:
        regions = [one.region for decoder in loaded for _, one in decoder.regions.prefixes.values()]
    regions = [region for region in regions if region.is_alive]
    if not regions:
        return False
    await chooser.choice(regions).revoke("storm")
    return True


def _revoke(rig: PoolRig, chooser: random.Random) -> bool | str:
    try:
        return bool(rig.wait_for(_revoke_one(rig, chooser)))
    except GpuLeaseError as error:
        return f"{type(error).__name__}: {error}"


def _unfinished(rig: PoolRig) -> list[str]:
    found = []
    for name, decoder in rig.pool.decoders.items():
        for tenant, state in decoder.scheduler.tenants.items():
            counts = {
                "waiting": len(state.waiting),
                "live": len(state.live),
                "blocks": state.blocks.used,
                "coming": decoder.prompts.coming[tenant],
            }
            found += [f"{name} {tenant} {what} {count}" for what, count in counts.items() if count]
    for name, model in rig.pool.residency.models.items():
        found += [f"{name} waiting"] * bool(model.waiting) + [f"{name} in use"] * bool(model.in_use)
    return found + [f"coming of {tenant}" for tenant, count in rig.models.coming.items() if count]


def _at_rest(rig: PoolRig) -> dict[str, Any]:
    names = Counter(task.get_coro().__qualname__ for task in asyncio.all_tasks())  # type: ignore[union-attr]
    return {
        "tasks": names.total(),
        "names": dict(names.most_common(8)),
        "decoders": len(rig.pool.decoders),
        "threads": threading.active_count(),
        "fds": len(os.listdir("/proc/self/fd")),
    }


def _changes(rig: PoolRig) -> dict[str, int]:
    changes: Counter[str] = Counter()
    for (_, kind), count in rig.pool.counts.items():
        changes[kind] += count
    return changes


def _serve(address: str, folder: Path) -> None:
    size = lease_bytes(folder)
    specs = {name: ModelSpec(path, TENANTS, SETTINGS, prefixes=(SHARED,)) for name, path in model_paths(folder).items()}
    limits = ResidencyLimits(RESIDENT * size, PARKED * size, min_stay_s=1.0)
    chooser = random.Random(len(MODELS))
    in_loop = {"unfinished": _unfinished, "at_rest": _at_rest, "changes": _changes}
    with pool_rig(address, specs, limits, http_processes=1, tenants=TENANTS) as rig:
        print(json.dumps(rig.url), flush=True)
        for line in sys.stdin:
            act = in_loop.get(line.strip())
            print(json.dumps(rig.do(partial(act, rig)) if act else _revoke(rig, chooser)), flush=True)


if __name__ == "__main__":
    # A log line for each request would be most of the output.
    logging.getLogger("httpx").setLevel(logging.WARNING)
    _serve(sys.argv[1], Path(sys.argv[2]))
