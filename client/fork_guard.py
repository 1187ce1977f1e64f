"""After fork(): the child inherits its parent's leases, sessions and connections, and must not use them.

If two processes sent requests over one connection, each could get the other's replies. So every connection, lease and
session registers here. In the child, each is marked as the parent's, and its descriptors are closed. Checks that every
operation makes anyway find the mark, so a launch does not take longer.
"""

import os
import weakref
from typing import Final, Protocol

from gpulease.protocol import Failure, Status

OWNED_BY_PARENT: Final = Failure(
    Status.INVALID_REQUEST,
    "it was created by the process that forked this one, and only that process can use it",
    "Acquire a lease in this process, or start the process with multiprocessing's spawn method; the "
    "parent's lease continues",
)
"""The failure with which an inherited lease or session ends for the child."""


class Inherited(Protocol):
    """A connection, lease or session, which a forked child inherits."""

    def disown(self) -> object:
        """Leave the object to the parent: send nothing, close this process's descriptors, and refuse every use."""


_inheritable: "weakref.WeakSet[Inherited]" = weakref.WeakSet()


def register(inherited: Inherited) -> None:
    """Leave an object to the parent in every child that is forked while the object exists."""
    _inheritable.add(inherited)


def _disown_all() -> None:
    # Use a copy, because disowning may drop last references and so change the set.
    for inherited in list(_inheritable):
        inherited.disown()


# This runs only in the child. The parent's objects stay unchanged.
os.register_at_fork(after_in_child=_disown_all)
