"""`python -m helpers.faulty_daemon FAULTS [gpuleased's arguments]`: the real daemon with something broken on purpose.

FAULTS is JSON: `constants`, module constants to set ("gpulease.daemon.broker.control_connection:HELLO_TIMEOUT_S": 0.3);
`leaks_descriptors`, whether one is left open with each worker; `has_hostile_workers`, whether its zygote's workers of
`helpers.hostile_worker.HOSTILE_BYTES` are taken over; `stops_workers_at`, the file that names the step of
`helpers.stopping_worker` at which its workers stop themselves; `fleet_design`, that of `helpers.broken_fleet` by which
its fleet process decides; and paths. As long as `withhold_proof_while` exists, no card shows a dead worker's bytes
back; as long as `inflate_while` does, every worker seems to hold a TiB; as long as `hang_syncs_while` does, no file
gets to the disk; as long as `hang_commits_while` does, no row gets to the journal.
`others_in` is a file of two numbers: the bytes of each card that belong to no process, and those of a program outside
the daemon; while it is not there, there are none.
`names_in` is a folder in which `helpers.local_claims` keeps the claims of names.
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
    if faults["withhold_proof_while"] is not None:
        for cards in card_sources():
            withhold_proof(cards, Path(faults["withhold_proof_while"]))
    if faults["others_in"] is not None:
        let_others_in(Path(faults["others_in"]))
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
    """As somebody does who forgets to close one."""
    spawn = Workers.spawn

    def leaking(self: Workers, spec: WorkerSpec) -> None:
        os.open(os.devnull, os.O_RDONLY)
        spawn(self, spec)

    Workers.spawn = leaking  # type: ignore[method-assign]


def run_instead(module: str, instead: str, *arguments: str) -> None:
    """Have a process of another program started in the place of one of the daemon's, with more arguments."""
    start = subprocess.Popen.__init__

    def starting(self: Any, command: list[str], **options: Any) -> None:
        if module in command:
            command = [*(instead if part == module else part for part in command), *arguments]
        start(self, command, **options)

    subprocess.Popen.__init__ = starting  # type: ignore[method-assign, assignment]


def hang_syncs(flag: Path, call: str = "fdatasync") -> None:
    """A disk that takes its time: fdatasync(2), or that call, returns when the flag is gone."""
    hang_while(flag, os, call)


def hang_while(flag: Path, of: Any, name: str) -> None:
    """Have a function of a class or module begin only when the flag is gone; it says in the flag that a call waits."""
    call = getattr(of, name)

    def hanging(*arguments: Any) -> Any:
        while flag.exists():
            with contextlib.suppress(FileNotFoundError), flag.open("r+") as file:
                file.write("waits")
            time.sleep(0.01)
        return call(*arguments)

    setattr(of, name, hanging)


def card_sources() -> list[type[CardSource]]:
    """Those that this daemon may use; the real cards' need NVML's bindings."""
    if "cuda" not in sys.argv:
        return [EmbeddedCards]
    return [importlib.import_module("gpulease.daemon.gpus.nvidia").NvidiaCards]


def withhold_proof(cards: type[CardSource], flag: Path) -> None:
    """A fault injected from outside: production code has no switch for it."""
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
