"""A daemon on real cards. After it has stopped, all memory of the cards must be free again."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from helpers.daemon import Daemon
from helpers.nvml import Cards


@contextmanager
def daemon_on(
    cards: Cards, *, vram: Sequence[str] = ("8GiB",), config: str = "", tcp: bool = False
) -> Iterator[Daemon]:
    """Yield a daemon that leases `vram` of each card and replies. After the block, NVML must show that the memory is
    free.

    If the block fails, the daemon is discarded and its log is printed.
    """
    used = cards.used_bytes()
    daemon = Daemon(driver="cuda", vram=vram, config=config, tcp=tcp)
    try:
        daemon.wait_until_it_answers()
        yield daemon
    except BaseException:
        print(daemon.log())
        daemon.discard()
        raise
    daemon.stop()
    cards.check_back_to(used)
