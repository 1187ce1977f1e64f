import os

import pytest

from gpulease.daemon.contract.control_page import BrokerPage, Counter, WorkerPage, overran, overran_on

S = 1_000_000_000
SAID = "a kernel ran for more than 1.5 s"


@pytest.mark.parametrize(
    ("polled_ns", "since_ns", "bound_ms", "said"),
    [
        (10 * S, 0, 1500, ""),
        (10 * S, 9 * S, 1500, ""),
        (10 * S, 8 * S + S // 2 + 1, 1500, ""),
        (10 * S, 8 * S + S // 2, 1500, SAID),
        (10 * S, 1, 1500, SAID),
        (10 * S, 1, 0, ""),
        # It has not looked since, or says what makes no sense: then nothing is known.
        (8 * S, 9 * S, 1500, ""),
    ],
)
def test_what_ran_for_too_long_by_what_is_on_the_page(polled_ns: int, since_ns: int, bound_ms: int, said: str) -> None:
    assert overran(polled_ns, since_ns, bound_ms) == said
    page = BrokerPage()
    try:
        worker_page = WorkerPage(page.fds)
        worker_page.counters[Counter.LAST_POLL_NS] = polled_ns
        worker_page.counters[Counter.KERNEL_SINCE_NS] = since_ns
        worker_page.close()
        fd = os.dup(page.fds.claims)
        assert overran_on(fd, bound_ms) == said
        os.close(fd)
    finally:
        page.close()
