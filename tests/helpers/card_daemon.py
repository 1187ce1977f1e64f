"""A daemon on real cards; after it, all memory of the cards must be free again."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from helpers.daemon import Daemon
from helpers.nvml import Cards


@contextmanager
def daemon_on(
    cards: Cards, *, vram: Sequence[str] = ("8GiB",), config: str = "", tcp: bool = False
) -> Iterator[Daemon]:
    """One that leases so much of each card, and answers; stopped behind the block, then NVML shows the memory back.

    Where the block fails, it is taken away, and what it has logged is printed.
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
