"""Tables on narrow terminals: no line too long, no cell cut, and columns dropped in a fixed order."""

import os
import sys
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from gpulease.client.console.tables import MIN_TEXT, fitted, output_width, shown, table, width_of, wrap, wrapped_text
from gpulease.protocol.address import ADDRESS_VARIABLE
from helpers.daemon import Daemon, python_environment
from helpers.terminal import Terminal

HEAD = ["lease", "tenant", "launches", "copies", "left"]
ROWS = [["b131708a5f1d9537", "ann", "12", "3", "4 min 58 s"], ["0000000000000001", "試験", "9999", "-", "1.0 s"]]
SPARED = ("copies", "launches")


@pytest.mark.parametrize(
    ("width", "heads"),
    [
        (None, HEAD),
        (54, HEAD),
        (53, ["lease", "tenant", "launches", "left"]),
        (46, ["lease", "tenant", "launches", "left"]),
        (45, ["lease", "tenant", "left"]),
        (36, ["lease", "tenant", "left"]),
    ],
)
def test_columns_go_in_their_order(width: int | None, heads: list[str]) -> None:
    assert fitted(HEAD, ROWS, width, droppable=SPARED).splitlines()[0].split() == heads


def test_where_they_do_not_fit_rows_are_stacked_whole() -> None:
    assert fitted(HEAD, ROWS, 35, title_column=0, droppable=SPARED).splitlines() == [
        "b131708a5f1d9537",
        "  tenant ann  launches 12  copies 3",
        "  left 4 min 58 s",
        "0000000000000001",
        "  tenant 試験  launches 9999",
        "  copies -  left 1.0 s",
    ]


def test_text_is_wrapped_beside_its_row_or_below_it() -> None:
    head, rows = ["measure", "", "why not"], [["files", "on", "Landlock ABI 7 and more than that"], ["user", "OFF", ""]]
    begin = "measure       "
    assert fitted(head, rows, len(begin) + MIN_TEXT, is_text_last=True).splitlines() == [
        begin + "why not",
        "files    on   Landlock ABI 7 and more",
        "              than that",
        "user     OFF",
    ]
    assert fitted(head, rows, len(begin) + MIN_TEXT - 1, is_text_last=True).splitlines() == [
        "measure",
        "files  on",
        "  Landlock ABI 7 and more than that",
        "user  OFF",
    ]


CELL = st.text(max_size=30)
TABLES = st.integers(2, 4).flatmap(
    lambda columns: st.lists(st.lists(CELL, min_size=columns, max_size=columns), min_size=2, max_size=4)
)


@given(TABLES, st.integers(2, 60), st.booleans())
@example(
    rows=[["check", "", "what is wrong"], ["", "", "a text of more than one line here"]], width=40, is_text_last=True
)
def test_no_line_is_too_long_and_nothing_is_missing(rows: list[list[str]], width: int, is_text_last: bool) -> None:
    head, *body = rows
    text = fitted(head, body, width, is_text_last=is_text_last)
    if text == table(head, body):
        return
    assert all(width_of(line) <= width for line in text.splitlines())
    letters = "".join(text.split())
    for row in body:
        assert all("".join(shown(cell).split()) in letters for cell in row)


@given(st.text(), st.integers(2, 20))
def test_wrapped_text_is_all_there(text: str, width: int) -> None:
    lines = wrap(shown(text), width)
    assert all(0 < width_of(line) <= width for line in lines)
    assert "".join("".join(lines).split()) == "".join(shown(text).split())


@pytest.mark.parametrize(
    ("told", "width"), [("40", 40), ("", None), ("0", None), ("1001", None), ("x", None), ("٤٠", None)]
)
def test_what_a_pipes_reader_is_said_to_have(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, told: str, width: int | None
) -> None:
    monkeypatch.setenv("COLUMNS", told)
    with (tmp_path / "out").open("w") as file:
        monkeypatch.setattr(sys, "stdout", file)
        assert output_width() == width


def on_a_terminal(daemon: Daemon, width: int, *words: str) -> list[str]:
    command = [sys.executable, "-P", "-c", "from gpulease.entry_points import gpulease; gpulease()", *words]
    # What a shell may have exported before a resize is not what the terminal is.
    environment = python_environment() | {ADDRESS_VARIABLE: daemon.address, "COLUMNS": "200"}
    with Terminal(command, environment, (width, 60)) as terminal:
        assert terminal.wait_for_exit() == 0
        return [line for line in terminal.text().splitlines() if line]


@pytest.mark.exhaustive
@pytest.mark.parametrize("width", [40, 60, 80, 200])
def test_leases_and_cards_on_a_terminal(daemon: Daemon, width: int) -> None:
    tenant, card_uuid = f"uid:{os.getuid()}", daemon.inventory().details[0]["uuid"]
    with (
        daemon.builder(8 << 20, seconds=300).acquire() as first,
        daemon.builder(1 << 20, seconds=300).acquire() as last,
    ):
        leases = on_a_terminal(daemon, width, "leases")
        # A line that was too long would have lost its end on this terminal, or hold a part of the next.
        assert [line[:32] for line in leases if line[0] in "0123456789abcdef"] == [
            first.lease_id_text,
            last.lease_id_text,
        ]
        for shown_once in ("8 MiB", "1 MiB"):
            assert sum(shown_once in line for line in leases) == 1
        assert sum("4 min 5" in line for line in leases) == 2
        assert sum(tenant in line for line in leases) == 2
        info = on_a_terminal(daemon, width, "info", "--sandbox")
    assert sum(card_uuid in line for line in info) == 1
    for told in ("embedded CPU card", "capacity", "free", "fenced", "leases"):
        assert any(told in line for line in info)
    if width == 40:
        assert leases[1] == f"  tenant {tenant}  GPU 0  state active"
        assert info[0] == card_uuid
        assert any(line.startswith("descriptors  o") for line in info)


def test_sentences_are_wrapped() -> None:
    assert wrapped_text("The node is drained: it grants nothing.", 20) == "The node is drained:\nit grants nothing."
    assert wrapped_text("as it is", None) == "as it is"
