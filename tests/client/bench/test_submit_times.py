"""Every row of submits is measured; on a daemon with a pool, only those with ready contexts."""

from collections.abc import Callable

import pytest

from gpulease.client.bench.submit_times import submit_figures
from gpulease.client.cli.bench import SUBMIT_ROWS
from gpulease.client.console.transform import transform_ptx
from gpulease.client.errors import GpuLeaseError
from helpers.daemon import Daemon
from helpers.kernels import FAULTS


@pytest.mark.exhaustive
def test_each_row_is_measured_with_a_pool_or_without(start_daemon: Callable[..., Daemon]) -> None:
    daemon = start_daemon()
    cold = submit_figures(daemon.address, transform_ptx(), 2, has_pool=False)
    pool = start_daemon(config="warm_contexts = 1\n")
    warm = submit_figures(pool.address, transform_ptx(), 2, has_pool=True)
    assert list(cold | warm) == [name for name, _ in SUBMIT_ROWS]
    assert not set(cold) & set(warm)
    for figures in (cold, warm):
        assert all(value > 0 for value in figures.values())
    # A context is made for each of them, and for none of the session's launches.
    assert cold["submit_session_p50_ms"] < cold["submit_p50_ms"]


def test_a_program_without_the_kernel_is_told(daemon: Daemon) -> None:
    with pytest.raises(GpuLeaseError, match="scale"):
        submit_figures(daemon.address, FAULTS, 1, has_pool=False)
