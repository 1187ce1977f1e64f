"""The texts of errors for a server's callers, without the host's sockets, paths and peers."""

from typing import Final

from gpulease.client.errors import Disconnected, GpuLeaseError

NO_DAEMON: Final = "the GPU's daemon does not answer"


def text_for_callers(error: GpuLeaseError) -> str:
    """Return an error's text for a caller, who must not learn about the host.

    Hints and addresses are for the operator, so they are left out. The server's log has them.
    """
    # The text of Disconnected names the daemon's address.
    return NO_DAEMON if isinstance(error, Disconnected) else error.message
