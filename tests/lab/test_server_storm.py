"""The storm on a server detects a wrong answer, a reply that no request should get, and growth."""

from typing import Any

import pytest

from .server_storm import KINDS, VARIANTS, Findings, is_same, is_sound, report_of

CHAT, HANG_UP = KINDS["chat"], KINDS["chat_hang_up"]


def findings() -> Findings:
    found = Findings(revoked=3)
    found.answers["chat"] = 9
    return found


def samples(**last: float) -> list[dict[str, float]]:
    every = [{"at_s": 60.0 * number, "tasks": 35.0, "server_kib": 100_000.0} for number in range(1, 9)]
    every[-1] |= last
    return every


def test_a_storm_is_sound_unless_an_answer_is_wrong_or_something_grows() -> None:
    assert is_sound(report_of(findings(), samples()))
    assert not is_sound(report_of(Findings(revoked=3), samples()))
    assert not is_sound(report_of(findings(), samples(server_kib=120_000.0)))
    wrong, failed = findings(), findings()
    wrong.wrong_count = 1
    failed.failed["chat: 500"] = 1
    assert not any(is_sound(report_of(one, samples())) for one in (wrong, failed))


@pytest.mark.parametrize(
    ("kind", "found", "expected", "said"),
    [
        (CHAT, (200, ["a"]), (200, ["a"]), True),
        (CHAT, (200, ["a"]), (200, ["b"]), False),
        (CHAT, (503, {}), (200, ["a"]), False),
        # One event may contain several tokens.
        (HANG_UP, (200, ({0: "ab"}, {})), (200, ({0: "abc"}, {})), True),
        (HANG_UP, (200, ({0: "ac"}, {})), (200, ({0: "abc"}, {})), False),
        (HANG_UP, (500, {}), (200, ({0: "abc"}, {})), False),
    ],
)
def test_answers_are_compared_whole_unless_their_caller_hung_up(
    kind: Any, found: Any, expected: Any, said: bool
) -> None:
    assert is_same(kind, found, expected) is said


def test_each_variant_has_a_body_of_its_own() -> None:
    for name, kind in KINDS.items():
        bodies = [kind.body(variant) for variant in range(VARIANTS)]
        assert all(body != bodies[0] for body in bodies[1:]), name
