"""What `gpulease info`, `leases` and `health` say of a node to people."""

from collections.abc import Callable
from typing import Any

import pytest
from click.testing import CliRunner

from gpulease.client.cli import metrics, node
from gpulease.client.cli.__main__ import main
from gpulease.protocol import Opcode
from gpulease.protocol.messages import Body, Inventory, Report
from helpers.web_rig import GIB, card, lease


@pytest.fixture
def shown(monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[str]]:
    """The lines of a command, from a daemon that answers so."""

    def lines(command: str, *, cards: list[Any] | None = None, answer: Body | None = None) -> list[str]:
        def ask(op: Opcode, body: Body) -> Body | None:
            return Inventory((), cards or [card()]) if op == Opcode.GET_INVENTORY else answer

        for module in (node, metrics):
            monkeypatch.setattr(module, "ask", ask)
        return CliRunner(env={"COLUMNS": "300"}).invoke(main, [command]).stdout.splitlines()

    return lines


def test_fenced_memory_comes_with_what_to_do(shown: Callable[..., list[str]]) -> None:
    cards = [card(), card(index=1, fenced_bytes=2 * GIB)]
    head, _, _, hint = shown("info", cards=cards)
    assert head.split()[:2] == ["GPU", "card"]
    assert hint == (
        "GPU 1: 2 GiB could not be proved free, and can't be granted. If you are sure that no program uses this memory:"
        " `gpulease fence clear 1`."
    )


def test_warm_contexts_are_told_in_words(shown: Callable[..., list[str]]) -> None:
    warm = card(warm_contexts=1, warm_wanted=2, recycled_contexts=3, warm_bytes=GIB)
    assert "1 of 2 ready, 3 reused, 1 GiB" in shown("info", cards=[warm])[1]


def test_a_lease_s_row_says_why_it_ends_and_who_has_its_buffers(shown: Callable[..., list[str]]) -> None:
    leases = [
        lease(1, "ann", orphaned_in_ms=3000, unheld_bytes=2 * GIB),
        lease(2, "bob", state="fenced", cause="revoked", remaining_ms=0),
        lease(3, "bob", connections=[{"number": 1, "pid": 12, "held_bytes": GIB}], kept_memory_bytes=GIB),
        lease(4, "bob", parent=f"{3:032x}"),
    ]
    _, *rows, blank, head, unheld, held, hint = shown("leases", answer=Report(leases))
    assert "active (unconnected, ends in 3.0 s)" in rows[0]
    assert "fenced (revoked)" in rows[1]
    assert rows[3].startswith(f"- {4:032x}")
    assert (blank, head.split(maxsplit=1)) == ("", ["lease", "holders of buffers"])
    assert unheld == f"{1:032x}  no session: 2 GiB"
    assert held == f"{3:032x}  pid 12: 1 GiB, kept by name: 1 GiB"
    assert hint == "`gpulease free --memory LEASE` frees what no connection holds, and what is kept by name."


def test_each_check_has_a_result_and_a_reason_where_it_is_not_met(shown: Callable[..., list[str]]) -> None:
    checks = [{"check": "cards", "ok": True, "detail": ""}, {"check": "memory", "ok": False, "detail": "it is full"}]
    assert [line.split(maxsplit=2) for line in shown("health", answer=Report({"ready": False, "checks": checks}))] == [
        ["check", "result", "what is wrong"],
        ["cards", "ok", "-"],
        ["memory", "FAILS", "it is full"],
    ]


def test_sessions_that_can_only_be_parked_warm_show_in_use_and_parked(shown: Callable[..., list[str]]) -> None:
    resident, reason = {"phase": "resident", "depth": "warm", "warm_only": ""}, "a module calls malloc"
    parks = [
        resident,
        resident | {"warm_only": reason},
        resident | {"phase": "parked", "parked_for_ms": 12_000, "warm_only": reason},
        # An older daemon sends the reason only after an attempt.
        {"phase": "parked", "depth": "warm", "stays_here": "it has a graph"},
        None,
    ]
    lines = shown("leases", answer=Report([lease(at, "ann", park=park) for at, park in enumerate(parks)]))
    states = ["", " (warm only)", " (parked 12.0 s, warm only)", " (parked, warm only)", ""]
    assert all(f"active{state} " in line for state, line in zip(states, lines[1:6], strict=True))
    head = next(at for at, line in enumerate(lines) if "can only be parked warm" in line)
    assert [line.split(maxsplit=1)[1] for line in lines[head + 1 :]] == [reason, reason, "it has a graph"]


@pytest.mark.parametrize("command", ["info", "leases"])
def test_a_card_whose_parks_have_to_wait_says_when_the_next_may_begin(
    shown: Callable[..., list[str]], command: str
) -> None:
    cards = [card(tenant_park_wait_ms=4000, park_wait_ms=0), card(index=1, tenant_park_wait_ms=0), card(index=2)]
    lines = [
        line for line in shown(command, cards=cards, answer=Report([lease(1, "ann")])) if "parks_per_minute" in line
    ]
    assert lines == [
        "GPU 0 has reached parks_per_minute: tenants' requests and idleness may park a session in 4.0 s, other leases'"
        " need and operators at once."
    ]
