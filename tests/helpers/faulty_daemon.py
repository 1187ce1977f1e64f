"""`python -m helpers.faulty_daemon FAULTS [gpuleased's arguments]`: the real daemon with faults.

FAULTS is a JSON object with these members:

- `constants`: module constants to set, such as "gpulease.daemon.broker.control_connection:HELLO_TIMEOUT_S": 0.3
- `leaks_descriptors`: whether the daemon leaks a descriptor with each worker
- `has_hostile_workers`: whether workers of `helpers.hostile_worker.HOSTILE_BYTES` are hostile
- `stops_workers_at`: a file that names the step of `helpers.stopping_worker` at which workers stop themselves
- `fleet_design`: the design of `helpers.broken_fleet` that the fleet process follows
- `withhold_proof_while`: a path; while it exists, no card shows that a dead worker's bytes are free
- `inflate_while`: a path; while it exists, every worker appears to hold a TiB
- `hang_syncs_while`: a path; while it exists, syncs of files hang
- `hang_commits_while`: a path; while it exists, commits of the journal hang
- `others_in`: a file with two numbers: for each card, the bytes that belong to no process, and those of a program
  outside the daemon; without the file both are 0
- `names_in`: a folder in which `helpers.local_claims` stores claims of names
"""

import contextlib
import importlib
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from gpulease.imports import begin_imports

if __name__ == "__main__":
    begin_imports()

from gpulease.daemon.__main__ import main
from gpulease.daemon.contract.worker_spec import WorkerSpec
from gpulease.daemon.gpus.emulated_cards import EmbeddedCards
from gpulease.daemon.gpus.source import CardReading, CardSource, CardsUnavailable
from gpulease.daemon.record.journal.journal import _StoreTarget
from gpulease.daemon.workers.registry import Workers
from helpers.local_claims import serve_names


def break_things(faults: dict[str, Any]) -> None:
    for place, value in faults["constants"].items():
        module, _, name = place.partition(":")
        found = importlib.import_module(module)
        assert hasattr(found, name), place
        setattr(found, name, value)
    if faults["others_in"] is not None:
        let_others_in(Path(faults["others_in"]))
    if faults["withhold_proof_while"] is not None:
        for cards in card_sources():
            withhold_proof(cards, Path(faults["withhold_proof_while"]))
    if faults["names_in"] is not None:
        serve_names(Path(faults["names_in"]))
    if faults["leaks_descriptors"]:
        leak_descriptors()
    if faults["has_hostile_workers"]:
        run_instead("gpulease.daemon.zygote", "helpers.hostile_worker")
    if faults["stops_workers_at"] is not None:
        run_instead("gpulease.daemon.zygote", "helpers.stopping_worker", faults["stops_workers_at"])
    if faults["fleet_design"] is not None:
        run_instead("gpulease.daemon.fleet", "helpers.broken_fleet", faults["fleet_design"])
    if faults["hang_syncs_while"] is not None:
        hang_syncs(Path(faults["hang_syncs_while"]))
    if faults["hang_commits_while"] is not None:
        hang_while(Path(faults["hang_commits_while"]), _StoreTarget, "commit")
    if faults["inflate_while"] is not None:
        inflated = Path(faults["inflate_while"])

        def process_bytes(self: EmbeddedCards, card_uuid: str, pid: int) -> int:
            return 1 << 40 if inflated.exists() else 0

        EmbeddedCards.process_bytes = process_bytes  # type: ignore[method-assign]


def leak_descriptors() -> None:
    """Leak a descriptor with each new worker."""
    spawn = Workers.spawn

    def leaking(self: Workers, spec: WorkerSpec) -> None:
        os.open(os.devnull, os.O_RDONLY)
        spawn(self, spec)

    Workers.spawn = leaking  # type: ignore[method-assign]


def run_instead(module: str, instead: str, *arguments: str) -> None:
    """Start the module `instead`, with additional arguments, whenever the daemon starts a process of `module`."""
    start = subprocess.Popen.__init__

    def starting(self: Any, command: list[str], **options: Any) -> None:
        if module in command:
            command = [*(instead if part == module else part for part in command), *arguments]
        start(self, command, **options)

    subprocess.Popen.__init__ = starting  # type: ignore[method-assign, assignment]


def hang_syncs(flag: Path, call: str = "fdatasync") -> None:
    """Make fdatasync(2), or another function of `os`, wait while the file `flag` exists."""
    hang_while(flag, os, call)


def hang_while(flag: Path, of: Any, name: str) -> None:
    """Make a function of a class or module wait while the file `flag` exists. It writes "waits" into the file."""
    call = getattr(of, name)

    def hanging(*arguments: Any) -> Any:
        while flag.exists():
            with contextlib.suppress(FileNotFoundError), flag.open("r+") as file:
                file.write("waits")
            time.sleep(0.01)
        return call(*arguments)

    setattr(of, name, hanging)


def card_sources() -> list[type[CardSource]]:
    """Return the card sources that this daemon may use. That of real cards needs NVML's bindings."""
    if "cuda" not in sys.argv:
        return [EmbeddedCards]
    return [importlib.import_module("gpulease.daemon.gpus.nvidia").NvidiaCards]


def withhold_proof(cards: type[CardSource], flag: Path) -> None:
    """Make readings of cards fail while the file `flag` exists."""
    read = cards.read

    def reading(self: CardSource, card_uuid: str) -> CardReading:
        if flag.exists():
            raise CardsUnavailable("the test withholds the proof", hint="")
        return read(self, card_uuid)

    cards.read = reading  # type: ignore[method-assign]


def let_others_in(path: Path) -> None:
    def read(self: EmbeddedCards, card_uuid: str) -> CardReading:
        try:
            unowned, outside = map(int, path.read_text().split())
        except FileNotFoundError:
            unowned = outside = 0
        return CardReading(unowned, {os.getpid(): outside})

    EmbeddedCards.read = read  # type: ignore[method-assign]
    EmbeddedCards.has_others = True


if __name__ == "__main__":
    break_things(json.loads(sys.argv.pop(1)))
    main()
