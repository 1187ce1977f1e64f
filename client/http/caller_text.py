"""What the callers of a server read of an error that is the host's: nothing of its sockets, paths and peers."""

from typing import Final

from gpulease.client.errors import Disconnected, GpuLeaseError

NO_DAEMON: Final = "the GPU's daemon does not answer"


def text_for_callers(error: GpuLeaseError) -> str:
    """Return an error's text for somebody to whom the host is foreign.

    Hints are left out: they are for whoever runs the server, as is the address that nobody answered at. The server's
    log is to have all of it.
    """
    return NO_DAEMON if isinstance(error, Disconnected) else error.message
