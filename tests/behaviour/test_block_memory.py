"""Shared memory of a thread block up to the most of a 9.0 card, with every way to launch.

More is refused with an error.
"""

import pytest

from gpulease.client import LaunchFailed
from helpers.block_memory import FOUND, MOST_BYTES, WAYS, Way
from helpers.daemon import Daemon

SLICE = 1 << 20


@pytest.mark.parametrize("way", WAYS)
def test_a_block_gets_what_the_card_has_and_no_byte_more(daemon: Daemon, way: Way) -> None:
    with daemon.builder(SLICE).submits(SLICE).acquire() as lease:
        assert way(lease, "reach", MOST_BYTES) == FOUND
        with pytest.raises(LaunchFailed, match=f"{MOST_BYTES + 1} bytes .* exceed the {MOST_BYTES} ") as caught:
            way(lease, "reach", MOST_BYTES + 1)
        assert "reach" in str(caught.value)
        assert caught.value.failure.hint
