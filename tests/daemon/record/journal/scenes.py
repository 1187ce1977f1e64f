"""Journals with rows, as a daemon leaves them that was killed or stopped."""

import os
import shutil
from dataclasses import fields
from pathlib import Path

from gpulease.daemon.leases.model import Cause, LeaseSnapshot, LeaseState, LeaseTerms
from gpulease.daemon.leases.persisted import LeaseRow
from gpulease.daemon.record.journal.database import Store, prepare
from gpulease.daemon.record.journal.rows import (
    DRAIN_KEY,
    Change,
    Contents,
    RelayRow,
    RowKind,
    lease_key,
    number_key,
    spent_key,
)
from gpulease.protocol.opcodes import Exclusivity, Waiting

BOOT = "a1" * 16
RELAY = RelayRow(70, 12, "ann", "1A2B")


def kept(lease_id: int, state: LeaseState = LeaseState.ACTIVE, **more: object) -> LeaseRow:
    """Return the record of a lease of 100 bytes on GPU-a."""
    cause = None if state is LeaseState.ACTIVE else Cause.EXPIRED
    ended_ns = 7 if state is LeaseState.FENCED else None
    values: dict[str, object] = {
        "lease_id": lease_id,
        "tenant": "ann",
        "card_uuid": "GPU-a",
        "charge_bytes": 110,
        "generation": 2,
        "state": state,
        "cause": cause,
        "reason": "",
        "fault": "",
        "created_ns": 5,
        "deadline_ns": 90,
        "ended_ns": ended_ns,
        "worker_pid": 77,
    }
    special = {item.name: more.pop(item.name) for item in fields(LeaseTerms) if item.name in more}
    chosen = {"exclusivity": Exclusivity.SHARED, "max_kernel_ms": 3, "waiting": Waiting.BLOCK, "orphan_ms": 0}
    terms = LeaseTerms(100, 50, **(chosen | special))  # type: ignore[arg-type]
    return LeaseRow(terms=terms, **(values | more))  # type: ignore[arg-type]


def tombstone(lease_id: int) -> LeaseSnapshot:
    return LeaseSnapshot(
        lease_id, "ann", "GPU-a", 100, Exclusivity.SHARED, 1, LeaseState.TORNDOWN, Cause.FREED, "x", "", 1, 2, 3, 4
    )


def put(lease: LeaseRow) -> Change:
    return Change(RowKind.LEASE, lease_key(lease.lease_id), lease)


def some_changes() -> list[list[Change]]:
    """Return the changes of several commits: leases, one of which is removed again, tombstones, revoked ids, a spent
    token, a drain, a relay.
    """
    commits = [[put(kept(number))] for number in range(1, 9)]
    commits.append([Change(RowKind.LEASE, lease_key(3), None), Change(RowKind.TOMBSTONE, number_key(0), tombstone(3))])
    commits.append([Change(RowKind.REVOKED, number_key(3), 1), put(kept(4, LeaseState.FENCED))])
    commits.append([Change(kind, spent_key(5, b"nonce"), 1234) for kind in (RowKind.SPENT, RowKind.REVOKED_TOKEN)])
    commits.append([Change(RowKind.DRAIN, DRAIN_KEY, 4321), Change(RowKind.RELAY, number_key(70), RELAY)])
    commits.append([Change(RowKind.CARD_DRAIN, b"GPU-b", 5432)])
    return commits


def opened(folder: Path, boot: str = BOOT) -> tuple[Store, Contents]:
    contents = Contents()
    return Store(folder, boot, contents.take), contents


def left_behind(folder: Path) -> Contents:
    """Write `some_changes` to a journal. Returns its contents.

    `folder / "killed"` has the files that a killed daemon leaves, and `folder / "stopped"` those of one that has
    stopped.
    """
    stopped = folder / "stopped"
    os.close(prepare(stopped))
    store, _ = opened(stopped)
    store.begin([])
    for changes in some_changes():
        store.apply(changes)
    shutil.copytree(stopped, folder / "killed")
    store.close()
    again, contents = opened(stopped)
    again.close()
    return contents
