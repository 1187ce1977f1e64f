"""How long a worker looks for what it waits for before it sleeps, as its lease's tenant chose."""

import os
from dataclasses import dataclass
from typing import Final

from gpulease.protocol.opcodes import Waiting

SPIN_NS: Final = 150_000
"""How long a served connection is looked at again and again before the worker sleeps. A sleep costs the next request a
wake-up, tens of microseconds on a virtual machine; a tenant that waits for replies is soon back."""

SPINS_PER_REPLY: Final = 2
"""Looks of that kind without a reply in between. A tenant that only launches does not wait for anything: the worker
sleeps while requests gather, and takes many at once."""

MIN_SPIN_CORES: Final = 4
"""Cores this process must have for it to spin while a tenant only launches, or does not read: on fewer it would take
the tenant's."""

_HAS_CORES: Final = len(os.sched_getaffinity(0)) >= MIN_SPIN_CORES


@dataclass(frozen=True, slots=True)
class Patience:
    """One session's.

    Attributes:
        spins_per_reply: How often to look for a while for requests after a reply.
        spins_when_quiet: Whether requests without a reply, too, are worth a while.
        spins_at_all: Whether the card and a peer that does not read are looked at for a while before sleeping.
        yields: Whether others may run between two looks.
    """

    spins_per_reply: int = SPINS_PER_REPLY
    spins_when_quiet: bool = _HAS_CORES
    spins_at_all: bool = True
    yields: bool = False


_BY_CHOICE: Final = {
    None: Patience(),
    Waiting.SPIN: Patience(spins_when_quiet=True),
    # One more: native code, which does not yield, only looks once.
    Waiting.YIELD: Patience(SPINS_PER_REPLY + 1, spins_when_quiet=False, yields=True),
    Waiting.BLOCK: Patience(0, spins_when_quiet=False, spins_at_all=False),
}


def patience_of(waiting: Waiting | None) -> Patience:
    """As chosen; None leaves it to the host's number of cores."""
    return _BY_CHOICE[waiting]
