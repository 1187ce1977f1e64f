"""After fork(): the child has copies of its parent's leases, sessions and connections, and must not use them.

Requests of two processes on one connection would get each other's replies. So every connection, lease and session is
registered here; in the child each is marked as the parent's, which the checks that every operation makes anyway find,
and its descriptors are closed. A launch pays nothing for it.
"""

import os
import weakref
from typing import Final, Protocol

from gpulease.protocol import Failure, Status

OF_PARENT: Final = Failure(
    Status.INVALID_REQUEST,
    "it was made by the process that forked this one, and only that process can use it",
    "Acquire a lease of this process's own, or start the process by multiprocessing's spawn; the parent's goes on",
)
"""Why an inherited lease or session can't be used."""


class Inherited(Protocol):
    """Something that a forked child inherits."""

    def disown(self) -> object:
        """Leave it to the parent: send nothing, close this process's descriptors, refuse every use."""


_inheritable: "weakref.WeakSet[Inherited]" = weakref.WeakSet()


def register(thing: Inherited) -> None:
    """Have it disowned in every child that is forked while it lives."""
    _inheritable.add(thing)


def _disown_all() -> None:
    for thing in list(_inheritable):
        thing.disown()


os.register_at_fork(after_in_child=_disown_all)
