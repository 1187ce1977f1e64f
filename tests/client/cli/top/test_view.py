"""The effect of each key on the view."""

from collections.abc import Sequence

import pytest

from gpulease.client.cli.top.sample import ScreenSamples
from gpulease.client.cli.top.view import (
    DEFAULT_REASON,
    Effect,
    Mode,
    Quit,
    Refresh,
    Revoke,
    View,
    press,
    visible,
)
from helpers.node_reports import CARD, lease, sample

IDS = [f"{number:08x}{'0' * 24}" for number in range(5)]
TWO_CARDS = (CARD, CARD | {"index": 1, "uuid": "GPU-1"})
SCENE = ScreenSamples(sample(lease(1), lease(2), lease(3, card_uuid="GPU-1"), cards=TWO_CARDS))


def typed(*keys: str, samples: ScreenSamples = SCENE) -> tuple[View, list[Effect]]:
    """Return the view after those keys, each a name or characters, and their effects."""
    view, effects = View(2.0), []
    for key in keys:
        for part in [key] if key in NAMED else key:
            view, effect = press(view, part, samples)
            effects += [effect] if effect is not None else []
    return view, effects


NAMED = {"up", "down", "home", "end", "pageup", "pagedown", "enter", "esc", "backspace", "left", "right"}


def test_regions_come_under_their_lease_whatever_sorts_them() -> None:
    region = lease(4, parent=IDS[1], size_bytes=1)
    samples = ScreenSamples(sample(lease(1), lease(2), region, lease(3)))
    for title in ("LEASE", "SLICE"):
        shown = [line.lease_id for line in visible(View(2.0, sort=title), samples)]
        assert shown.index(IDS[4]) == shown.index(IDS[1]) + 1


def test_leaving() -> None:
    assert typed("q")[1] == [Quit()]
    assert typed("/", "q", "esc")[1] == []


@pytest.mark.parametrize(
    ("keys", "chosen"),
    [
        (["down"], 1),
        (["up"], 1),
        (["end"], 3),
        (["down", "down"], 2),
        (["down", "down", "up", "up"], 1),
        (["pagedown", "home"], 1),
        (["R", "down"], 3),
    ],
)
def test_choosing(keys: Sequence[str], chosen: int) -> None:
    assert typed(*keys)[0].selected == IDS[chosen]
    assert typed(*keys, samples=ScreenSamples())[0].selected == ""


@pytest.mark.parametrize(
    ("keys", "sort"),
    [("M", "USED"), ("T<", "OP/S"), ("T>", "LEFT"), ("N<", "LEASE"), ("N>", "TENANT"), ("C>", "TENANT")],
)
def test_sorting(keys: str, sort: str) -> None:
    assert typed(keys)[0].sort == sort
    assert typed(keys, "R")[0].is_reversed


def test_filters() -> None:
    view, _ = typed("/", "NANT-2", "enter")
    assert [line.lease_id for line in visible(view, SCENE)] == [IDS[2]]
    view, _ = typed("/", IDS[1][:8].upper(), "enter")
    assert [line.lease_id for line in visible(view, SCENE)] == [IDS[1]]
    view, _ = typed("/", "x", "backspace", "enter")
    assert len(visible(view, SCENE)) == 3
    cards = [typed(*"c" * times)[0] for times in range(4)]
    assert [len(visible(view, SCENE)) for view in cards] == [3, 2, 1, 3]
    assert typed("c", "/", "a", "enter", "esc")[0] == View(2.0)


@pytest.mark.parametrize(
    ("words", "every_s", "says"),
    [("0.5", 0.5, ""), ("0", 2.0, "not '0'"), ("nan", 2.0, "not 'nan'"), ("x", 2.0, "not 'x'")],
)
def test_pace(words: str, every_s: float, says: str) -> None:
    view, effects = typed("s", words, "enter")
    assert view.every_s == every_s
    assert says in view.notice
    assert effects == ([] if says else [Refresh()])
    assert typed("p")[0].is_paused
    assert typed(" ")[1] == [Refresh()]


def test_help_is_left_by_any_key() -> None:
    assert typed("?")[0].mode == Mode.HELP
    assert typed("?", "q") == (View(2.0), [])


@pytest.mark.parametrize(
    ("keys", "effects", "says"),
    [
        (["down", "k", "enter", "0000", "enter"], [Revoke(IDS[1], DEFAULT_REASON)], "Revoking"),
        (["down", "k", " a reason ", "enter", "0000", "enter"], [Revoke(IDS[1], "a reason")], "Revoking"),
        (["down", "k", "enter", "y", "enter"], [], "not revoked"),
        (["down", "k", "enter", "enter"], [], "not revoked"),
        (["down", "k", "enter", "0000", "esc"], [], "not revoked"),
        (["down", "k", "esc"], [], "not revoked"),
        (["k"], [], "Choose a lease"),
        (["down", "/", "3", "enter", "k"], [], "Choose a lease"),
    ],
)
def test_revoking(keys: Sequence[str], effects: list[Effect], says: str) -> None:
    view, done = typed(*keys)
    assert done == effects
    assert says in view.notice
    assert (view.mode, view.target) == (Mode.BROWSE, "")


def test_what_is_revoked_is_what_was_chosen_when_it_began() -> None:
    view, _ = typed("down", "k", "enter")
    elsewhere = ScreenSamples(sample(lease(2), lease(3)))
    for key in "0000":
        view, _ = press(view, key, elsewhere)
    assert press(view, "enter", elsewhere)[1] == Revoke(IDS[1], DEFAULT_REASON)


def test_a_line_has_a_bound_and_takes_no_controls() -> None:
    view, _ = typed("/", "x" * 1000)
    assert len(view.typed) == 200
    assert typed("/", "a\x1b\tb", "enter")[0].pattern == "ab"
