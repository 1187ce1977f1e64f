"""Errors of the host as a server's callers may read them: without its sockets, paths and peers."""

from typing import Final

from gpulease.client.errors import Disconnected, GpuLeaseError

NO_DAEMON: Final = "the GPU's daemon does not answer"


def text_for_callers(error: GpuLeaseError) -> str:
    """Return an error's text for a caller who must not learn about the host.

    Hints and addresses are left out: they are for the operator, who finds them in the server's log.
    """
    return NO_DAEMON if isinstance(error, Disconnected) else error.message
