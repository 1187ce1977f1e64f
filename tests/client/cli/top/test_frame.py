"""Whole screens, line by line."""

from dataclasses import replace

import pytest

from gpulease.client.cli.top.frame import HINTS, Line, Style, frame, plain
from gpulease.client.cli.top.sample import ScreenSamples
from gpulease.client.cli.top.view import Mode, View
from helpers.node_reports import CARD, lease, sample

VIEW = View(2.0)
SCENE = ScreenSamples(sample(lease(1), lease(2)))


def texts(lines: list[Line]) -> list[str]:
    return ["".join(text for text, _ in line).rstrip() for line in lines]


def screen(
    view: View = VIEW, samples: ScreenSamples = SCENE, width: int = 100, height: int = 8, now_s: float = 100
) -> list[str]:
    return texts(frame(view, samples, "unix:/a", now_s, width, height))


def test_a_screen() -> None:
    assert screen() == [
        "gpulease top  unix:/a  every 2 s",
        "0 [||||||                ] 2 GiB of 8 GiB held, 6 GiB free, 2 leases  a card, cpu",
        "LEASE    TENANT        GPU STATE              SLICE      USED  LAUNCH/S   OP/S       LEFTv",
        "00000001 tenant-1        0 active             1 GiB     1 MiB         -      -       1.0 s [|      ]",
        "00000002 tenant-2        0 active             2 GiB     2 MiB         -      -       2.0 s [|      ]",
        "",
        "",
        HINTS,
    ]


def test_a_narrow_screen() -> None:
    assert screen(width=20, height=5) == [
        "gpulease top  unix:+",
        "LEASE          LEFTv",
        "00000001       1.0 s",
        "00000002       2.0 s",
        "q quit  ? help  < >+",
    ]
    assert [len(screen(width=20, height=height)) for height in range(5)] == list(range(5))


def test_the_chosen_lease_is_in_sight() -> None:
    many = ScreenSamples(sample(*(lease(number) for number in range(1, 100))))
    view = replace(VIEW, selected=f"{50:08x}{'0' * 24}")
    lines = frame(view, many, "unix:/a", 100, 60, 9)
    (at,) = [number for number, line in enumerate(lines) if any(style == Style.CHOSEN for _, style in line)]
    assert texts(lines)[at].startswith("00000032")
    assert sum(line.startswith("0000") for line in texts(lines)) >= 2


def test_every_card_is_shown_where_there_is_room() -> None:
    cards = [CARD | {"index": index, "uuid": f"GPU-{index}"} for index in range(8)]
    assert (
        sum("GiB held" in line for line in screen(samples=ScreenSamples(sample(lease(1), cards=cards)), height=12)) == 8
    )
    assert (
        sum("GiB held" in line for line in screen(samples=ScreenSamples(sample(lease(1), cards=cards)), height=9)) == 5
    )
    assert plain(VIEW, ScreenSamples(sample(cards=cards)), "unix:/a", 80).count("GiB held") == 8


def test_time_goes_on_between_samples() -> None:
    assert "0.5 s" in screen(now_s=100.5)[3]
    assert "0.0 s" in screen(now_s=200)[4]


def test_trouble_is_said_with_the_age_of_what_is_shown() -> None:
    assert screen(samples=replace(SCENE, trouble="can't connect"), now_s=103)[1] == (
        "the table is 3.0 s old: can't connect"
    )
    assert screen(samples=ScreenSamples(trouble="can't connect"))[1] == "can't connect"
    assert screen(now_s=105)[1] == "the daemon does not answer; the table is 5.0 s old"
    assert "does not answer" not in "".join(screen(replace(VIEW, is_paused=True), now_s=500) + screen(now_s=103))
    assert "waiting for the daemon" in screen(samples=ScreenSamples())[0]


def test_a_drain_a_fence_and_filters_show() -> None:
    card = CARD | {"drain_left_ms": 90_000, "fenced_bytes": 1 << 30, "warm_wanted": 2, "warm_contexts": 1}
    lines = screen(replace(VIEW, card=0, pattern="x", is_paused=True), ScreenSamples(sample(lease(1), cards=[card])))
    assert lines[0] == "gpulease top  unix:/a  paused  GPU 0 only  filter 'x'"
    assert lines[1] == "DRAINED: no new leases, and the remaining leases end in 1 min 30 s"
    assert "1 GiB FENCED, 2 leases, 1 of 2 warm" in lines[2]
    assert lines[3] == "No lease matches the filter."


def test_a_drained_card_shows() -> None:
    lines = screen(VIEW, ScreenSamples(sample(lease(1), cards=[CARD | {"card_drain_left_ms": 90_000}])))
    assert "2 GiB of 8 GiB held, 6 GiB free, DRAINED (1 min 30 s left)" in lines[1]


def test_parked_sessions_and_the_hosts_memory_show() -> None:
    card = CARD | {"parked_bytes": 1 << 30, "park_host_bytes": 1 << 30, "park_host_limit_bytes": 4 << 30}
    parked = {"phase": "parked", "parked_for_ms": 12_000}
    lines = screen(samples=ScreenSamples(sample(lease(1, park=parked), cards=[card])))
    assert "1 GiB parked" in lines[1]
    assert lines[2].startswith("H [|")
    assert "1 GiB of 4 GiB of host memory held for parked sessions" in lines[2]
    assert "parked 12.0 s" in lines[4]


def test_a_card_whose_parks_have_to_wait_shows_when_the_next_may_begin() -> None:
    card = CARD | {"tenant_park_wait_ms": 4000, "park_wait_ms": 0}
    lines = screen(samples=ScreenSamples(sample(lease(1), cards=[card])))
    assert "next park in 4.0 s" in lines[1]
    lines = screen(samples=ScreenSamples(sample(lease(1), cards=[card | {"tenant_park_wait_ms": 0}])))
    assert "next park" not in lines[1]


def test_a_hostile_name_is_shown_escaped_in_its_column() -> None:
    name = "\x1b]0;x\x07\u202e\r\n試験試験試験"
    samples = ScreenSamples(sample(lease(1, tenant=name, state="\x9b2J"), lease(2, tenant="試験試験試験")))
    lines = screen(samples=samples)
    assert lines[3].startswith("00000001 \\x1b]0;x\\x0+    0 \\x9b2J")
    assert lines[4].startswith("00000002 試験試験試験    0 active")


@pytest.mark.parametrize("width", [10, 20, 40, 100])
def test_what_is_typed_stays_in_sight(width: int) -> None:
    target = f"{1:08x}{'0' * 24}"
    asked = screen(replace(VIEW, mode=Mode.CONFIRM, target=target, typed="0000"), width=width)[-1]
    assert asked.endswith("0000_")
    assert asked.startswith("Type 0000 to revoke 00000001 of tenant-1"[: width - 6])
    assert screen(replace(VIEW, mode=Mode.FILTER, typed="x" * 199 + "y"), width=width)[-1].endswith("xy_")


def test_a_page_of_help() -> None:
    lines = screen(replace(VIEW, mode=Mode.HELP), height=30)
    assert any(line.startswith("k        revoke the chosen lease") for line in lines)
    assert lines[-1] == "Press any key to return"


def test_plain_text_for_a_pipe() -> None:
    text = plain(VIEW, SCENE, "unix:/a", 160)
    assert text.splitlines()[3].startswith(f"00000001{'0' * 24} tenant-1 ")
    assert plain(VIEW, ScreenSamples(sample()), "unix:/a", 160).splitlines()[-1] == "No leases."
