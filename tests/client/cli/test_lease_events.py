"""An event's line says what its time counts down to."""

import pytest
from click.testing import CliRunner

from gpulease.client.cli.__main__ import main
from gpulease.client.cli.lease_events import event_text, refusal_text
from gpulease.client.core.events import ForwardRevoked, LeaseEvent
from gpulease.protocol import Phase, Status
from gpulease.protocol.lease_ids import LeaseId

ID = "000000000000000000000000000000ab"


@pytest.mark.parametrize(
    ("phase", "left_s", "more", "line"),
    [
        (Phase.ACTIVE, 54.0, {}, "active  its warning comes in 54.0 s, unless it is renewed"),
        (
            Phase.WARNING,
            5.91,
            {"reason": "the lease ends unless it is renewed"},
            "warning  it ends in 6.0 s at the latest  the lease ends unless it is renewed",
        ),
        (
            Phase.GRACE,
            0.02,
            {"cause": "drained", "reason": "the node was drained"},
            "grace  its process is killed in 0.1 s at the latest  drained  the node was drained",
        ),
        (
            Phase.TEARDOWN,
            10.0,
            {"cause": "freed"},
            "teardown  its memory is proved free or fenced within 10.0 s  freed",
        ),
        (Phase.TEARDOWN, 0.0, {"cause": "freed"}, "teardown  freed"),
        (Phase.ENDED, 0.0, {"cause": "revoked", "reason": "maintenance"}, "ended  revoked  maintenance"),
        (77, 3.0, {}, "phase 77"),
        (
            Phase.ENDED,
            0.0,
            {"cause": "revoked", "reason": "\x1b]0;x\a\n\u202e"},
            r"ended  revoked  \x1b]0;x\x07\n\u202e",
        ),
        (Phase.ENDED, 0.0, {"lost": 1}, "ended  1 event before this one was lost (read too slowly)"),
        (Phase.ENDED, 0.0, {"lost": 3}, "ended  3 events before this one were lost (read too slowly)"),
    ],
)
def test_lines(phase: Phase | int, left_s: float, more: dict[str, str | int], line: str) -> None:
    fields = {"generation": 1, "cause": "", "reason": "", "lost": 0} | more
    assert event_text(LeaseEvent(lease_id=LeaseId(0xAB), phase=phase, left_s=left_s, **fields)) == f"{ID}  {line}"  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("status", "kernel", "lost", "line"),
    [
        (Status.REVOKED, "scale", 0, "revoked: launch 3 of scale was not started  position 4096  noticed 20 us after"),
        (-1000, "", 0, "status -1000: a graph was not started  position 4096  noticed 20 us after"),
        (Status.FENCED, "\x1b]0;x\a", 0, r"fenced: launch 3 of \x1b]0;x\x07 was not started"),
    ],
)
def test_refused_launches(status: Status | int, kernel: str, lost: int, line: str) -> None:
    told = ForwardRevoked(LeaseId(0xAB), status, kernel, 3, 4096, 1_000, 21_000, lost)
    assert refusal_text(told).startswith(f"{ID}  {line}")


def test_a_refused_launch_tells_what_was_lost() -> None:
    told = ForwardRevoked(LeaseId(0xAB), Status.CANCELLED, "k", 0, 0, 0, 0, 2)
    assert refusal_text(told).endswith("2 events before this one were lost (read too slowly)")


def test_the_id_0_names_no_lease() -> None:
    """In the protocol, a subscription to this id is one to all leases."""
    done = CliRunner().invoke(main, ["events", "0" * 32], env={"GPULEASE_ADDRESS": "unix:/nowhere"})
    assert (done.exit_code, "no lease has the id" in done.output) == (1, True), done.output
