"""Regions on a card: they are zero, separate from one another, exact to the byte, and gone once they have ended."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from helpers.daemon import python_environment
from helpers.nvml import Cards

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("cards")]

ROOT = Path(__file__).parents[2]


def scene(name: str) -> dict[str, Any]:
    """Return the observations of a scene of region_scenes.py, which runs in a separate process."""
    command = [sys.executable, "-m", "tests.gpu.region_scenes", name]
    done = subprocess.run(command, cwd=ROOT, env=python_environment(), capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    seen: dict[str, Any] = json.loads(done.stdout)
    return seen


def test_each_call_takes_and_gives_exactly_its_bytes(cards: Cards) -> None:
    for size, seen in scene("quiet").items():
        assert seen["taken"] == [seen["expected"]], size


def test_regions_are_zero_when_they_open_and_when_they_have_ended() -> None:
    seen = scene("zeroed")
    assert set(seen["fresh"]) == {0}
    assert set(seen["stale"]) == {0}


def test_a_stale_writer_reaches_no_other_region() -> None:
    seen = scene("isolated")
    assert seen == {"both": [0, 0], "other": 0, "third": 0, "ended other": 0, "later": 0, "fault": ""}


def test_a_kernel_on_another_region_computes_on() -> None:
    seen = scene("beside")
    assert [(many["wrong"], many["regions"] > 0) for many in seen.values()] == [(0, True), (0, True)]


def test_no_address_is_used_twice() -> None:
    assert scene("addresses") == {"overlaps": 0, "aligned": True}


def test_a_mark_is_done_when_its_stream_is() -> None:
    assert scene("marked") == {"during": [False, True], "after": [True, True]}


def test_a_region_without_room_takes_nothing() -> None:
    seen = scene("too_large")
    print(f"the card gave 64 MiB after {seen['took_ms']} ms")
    assert len(seen["said"]) == 2
    assert (seen["taken"], seen["wrong"]) == (64 << 20, 0)


def test_a_context_that_had_regions_is_nobody_elses() -> None:
    seen = scene("misused")
    assert len(seen["said"]) == 5
    assert all("region" in said for said in seen["said"])
    assert seen["wrong"] == 0


def test_an_access_where_nothing_is_mapped_costs_the_context() -> None:
    seen = scene("used_after_release")
    assert seen["lost"], seen
    assert "illegal" in seen["said"].lower()


def test_a_region_that_ends_under_its_kernel_costs_the_context_or_meets_the_scratch() -> None:
    # On an H200 either may happen. An H100 lost the context each time.
    seen = scene("ended_too_early")
    assert "illegal" in seen["said"].lower() if seen["lost"] else seen["wrong"] == 0, seen
