"""Parks that are copied ahead on a card: kernels that follow addresses in their data go on, and no byte is old."""

from collections.abc import Iterator

import pytest

from helpers.copies_ahead import CopiesAhead
from helpers.daemon import Daemon, running
from helpers.nvml import Cards
from helpers.parking import park_limits

pytestmark = pytest.mark.gpu

GIB = 1 << 30
SIZE = 2 * GIB
CONFIG = park_limits("10GiB")


@pytest.fixture
def models(cards: Cards) -> Iterator[CopiesAhead]:
    """Two slices and three contexts take less than 6.5 GiB, and a third slice does not fit."""
    with running(Daemon(driver="cuda", vram=("7GiB",), config=CONFIG)) as node, CopiesAhead(node, SIZE) as models:
        yield models


def test_models_in_turn_are_copied_ahead_and_keep_every_byte(models: CopiesAhead) -> None:
    models.serve_in_turn(8)
    copied_bytes = models.count("gpu_lease_parked_ahead_bytes_total")
    print(f"{models.count('gpu_lease_parked_ahead_total'):.0f} parks were copied ahead, {copied_bytes / GIB:.1f} GiB")
    assert copied_bytes > 0


def test_a_model_that_is_used_after_its_copy_keeps_what_it_changed(models: CopiesAhead) -> None:
    models.serve_what_was_copied(4)
    print(f"{models.count('gpu_lease_park_ahead_discarded_bytes_total') / GIB:.1f} GiB were copied in vain")
    assert models.count("gpu_lease_park_ahead_discarded_bytes_total") > 0
