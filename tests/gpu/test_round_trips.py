"""Round trips on a card, compared with every caller of the CUDA driver on this host. Each checks its results."""

import pytest

from gpulease.client.bench.peers import BINDINGS, CALLERS, PYCUDA, ROWS, C, measure_with_peers
from gpulease.client.cli.bench import round_trip_table
from gpulease.client.console.reports import first_card
from helpers.daemon import Daemon

pytestmark = pytest.mark.gpu


def test_every_caller_gives_every_figure(daemon: Daemon) -> None:
    report = measure_with_peers(daemon.address, first_card(daemon.address), 1, 2_000, 100, print)
    print(round_trip_table(report))
    # Every host with the driver has these two callers. A C compiler may be missing.
    assert not {BINDINGS, PYCUDA} & set(report["absent"])
    for name in CALLERS:
        if name in report["absent"]:
            assert (name, "no C compiler" in report["absent"][name]) == (C, True)
            continue
        figures = report["figures"][name]
        missing = [row.stem for row in ROWS if not figures.get(row.figure(50), 0) > 0]
        assert missing in ([], ["session_start"])
