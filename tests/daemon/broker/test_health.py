"""Readiness, with one condition broken at a time."""

from types import SimpleNamespace
from typing import Any, cast

import pytest

from gpulease.daemon.broker.health import Health
from gpulease.daemon.leases.devices import Card
from gpulease.daemon.leases.events import (
    AcquireRequested,
    DrainRequested,
    Event,
    ReclaimFailed,
    RevokeRequested,
    ShutdownRequested,
    WorkerReady,
)
from gpulease.daemon.leases.model import LeaseTerms
from gpulease.daemon.leases.table import LeaseTable

NOW_NS = 10**12


def health(*events: Event, capacity: int = 100, **broken: Any) -> Health:
    """Of a daemon in which what is not `broken` works."""
    table = LeaseTable([Card("GPU-a", 0, "Test", capacity, 0)])
    for event in events:
        table.handle(event, NOW_NS)
    state = {"zygote": True, "is_short": False, "journal": "", "audit": "", "audit_denial": None, "workers": []}
    state |= broken
    made = Health(
        table,
        cast(Any, SimpleNamespace(can_start=state["zygote"], serving=lambda: state["workers"])),
        cast(Any, SimpleNamespace(problem=lambda: state["journal"])),
        cast(Any, SimpleNamespace(problem=lambda: state["audit"], denial=lambda: state["audit_denial"])),
        cast(Any, SimpleNamespace(is_short=state["is_short"])),
    )
    made.is_listening = not broken.get("deaf", False)
    return made


def all_fenced() -> tuple[Event, ...]:
    return (
        AcquireRequested(1, "ann", 7, LeaseTerms(100, 1000)),
        WorkerReady(7),
        RevokeRequested(2, 7, "because"),
        ReclaimFailed(7, "it shows"),
    )


def test_nothing_is_wrong() -> None:
    report = health().report()
    assert report["ready"] is True
    assert [check["check"] for check in report["checks"]] == [
        *("listening", "zygote", "not_draining", "capacity", "cards", "memory", "journal", "audit")
    ]
    assert {(check["ok"], check["detail"]) for check in report["checks"]} == {(True, "")}


@pytest.mark.parametrize(
    ("made", "name", "detail"),
    [
        (health(deaf=True), "listening", "starting or stopping"),
        (health(ShutdownRequested()), "listening", "starting or stopping"),
        (health(zygote=False), "zygote", "no worker can be started"),
        (health(DrainRequested(1, 1000)), "not_draining", "drained"),
        (health(capacity=0), "capacity", "no card"),
        (health(*all_fenced()), "capacity", "fenced"),
        (health(is_short=True), "memory", "out of memory"),
        (health(journal="No space left on device"), "journal", "No space left"),
        (health(audit="Read-only file system", audit_denial="so"), "audit", "Read-only"),
    ],
)
def test_one_thing_is_wrong(made: Health, name: str, detail: str) -> None:
    report = made.report()
    (broken,) = [check for check in report["checks"] if not check["ok"]]
    assert (report["ready"], broken["check"]) == (False, name)
    assert detail in broken["detail"]


def test_a_log_that_nobody_demands_is_looked_after_all_the_same() -> None:
    report = health(audit="No space left on device").report()
    assert report["ready"]
    assert report["checks"][-1] == {"check": "audit", "ok": True, "detail": "No space left on device"}


def test_what_the_host_lacks_for_the_settings_is_shown_although_leases_are_granted() -> None:
    made = health()
    made.cards_warning, made.missing_cards, made.memory_warning = "emulated", "no card 7", lambda: "64 GiB of 32"
    report = made.report()
    details = {check["check"]: check["detail"] for check in report["checks"]}
    assert (report["ready"], details["cards"], details["memory"]) == (True, "emulated; no card 7", "64 GiB of 32")


def test_workers_of_an_earlier_version_are_worth_a_word() -> None:
    workers = [SimpleNamespace(earlier_version=version) for version in ("", "0.1", "0.1", "0.2")]
    report = health(workers=workers).report()
    (check,) = [check for check in report["checks"] if check["check"] == "zygote"]
    assert (report["ready"], check["ok"]) == (True, True)
    assert check["detail"].startswith("3 workers run the code of an earlier daemon (0.1, 0.2)")
