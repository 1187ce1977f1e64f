"""Runs every supported instruction on a real card and stores the results, with which the embedded driver is compared.

On a GPU host, from the repository's root, with a daemon that leases the card:

    GPULEASE_ADDRESS=unix:/run/gpulease/gpuleased.sock PYTHONPATH=.dev:tests python -m tests.gpu.record_parity OUT.json
"""

import json
import sys
from pathlib import Path
from typing import Any

from gpulease.client import GpuBuilder, GpuSession, KernelArgs, LoadFailed
from gpulease.client.sync.driver import ask
from gpulease.protocol import Opcode
from gpulease.protocol.messages import Empty
from helpers.parity import ROWS, Spelled, results_of, spelled_instructions
from helpers.rows import RESULT_BYTES, ROW_BYTES, rows_bytes


def record() -> dict[str, Any]:
    """Return the results of each instruction on this host's first card."""
    card = ask(Opcode.GET_INVENTORY, Empty()).details[0]
    if card["driver"] != "cuda":
        raise SystemExit("this daemon computes on the host: start one with --driver cuda")
    results: dict[str, Any] = {}
    refused: dict[str, str] = {}
    with GpuBuilder().min_vram(64 << 20).lease_secs(600).acquire() as lease, GpuSession(lease) as session:
        for spelled in spelled_instructions():
            try:
                results[spelled.text] = _run(session, spelled)
            except LoadFailed as error:
                refused[spelled.text] = error.log.splitlines()[0] if error.log else str(error)
    return {"card": card["name"], "results": results, "refused": refused}


def _run(session: GpuSession, spelled: Spelled) -> dict[str, Any]:
    rows = session.mem_alloc(ROWS * ROW_BYTES)
    results = session.mem_alloc(ROWS * RESULT_BYTES)
    session.mem_write(rows, 0, rows_bytes(spelled.rows()))
    module = session.module_load(spelled.ptx)
    session.launch(module, "row", (1,), (ROWS,), KernelArgs().push_buffer(rows).push_buffer(results))
    data = session.mem_read(results, 0, ROWS * RESULT_BYTES)
    return {
        "operands": spelled.operands,
        "result": spelled.result,
        "values": " ".join(results_of(data, spelled.result)),
    }


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(json.dumps(record(), indent=0, sort_keys=True) + "\n")
