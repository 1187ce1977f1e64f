"""Parks that are copied ahead: they are counted, and so are copies in vain, and no byte is an earlier one."""

from collections.abc import Iterator

import pytest

from helpers.copies_ahead import CopiesAhead
from helpers.daemon import Daemon, running
from helpers.parking import park_limits

MIB = 1 << 20
SIZE = 128 * MIB
CONFIG = park_limits("2GiB")


@pytest.fixture
def models() -> Iterator[CopiesAhead]:
    with running(Daemon(vram=("330MiB",), config=CONFIG)) as node, CopiesAhead(node, SIZE) as models:
        yield models


def test_models_in_turn_are_copied_ahead_and_keep_every_byte(models: CopiesAhead) -> None:
    models.serve_in_turn(4)
    assert models.count("gpu_lease_parked_ahead_bytes_total") > 0
    assert models.count("gpu_lease_parked_ahead_total") <= models.count("gpu_lease_parked_total")


def test_a_model_that_is_used_after_its_copy_keeps_what_it_changed(models: CopiesAhead) -> None:
    models.serve_what_was_copied(3)
    assert models.count("gpu_lease_park_ahead_discarded_bytes_total") > 0
