"""Refuses unsolicited descriptors: any peer that writes to a Unix socket may pass some (unix(7), SCM_RIGHTS).

The reader must close them; the kernel closes those in messages that are never read. Closing a descriptor that a peer
sent can block for as long as the peer likes: the last close of a TCP connection waits for its peer (socket(7),
SO_LINGER).
"""

import contextlib
import signal
import socket
from collections.abc import Iterator
from typing import Final

SO_PASSRIGHTS: Final = 83
"""Socket option: whether a Unix socket accepts descriptors (asm-generic/socket.h). Linux 6.16 and later have it."""

INTERRUPT_S: Final = 0.25
"""Longest time that a close may block if the kernel can't refuse descriptors."""


def refuse_descriptors(sock: socket.socket) -> bool:
    """Make the kernel refuse descriptors that are sent to a Unix socket, with EPERM. Returns whether this kernel can.

    A listening socket passes this on to the connections that it accepts from now on.
    """
    try:
        sock.setsockopt(socket.SOL_SOCKET, SO_PASSRIGHTS, 0)
    except OSError:
        return False
    return True


@contextlib.contextmanager
def interrupting_closes() -> Iterator[None]:
    """Repeatedly interrupt closes that block the main thread, if the kernel can't refuse descriptors.

    A signal ends the wait for one descriptor, and the waits for the other descriptors of the same message.
    """
    # Kernels with SO_PASSRIGHTS need none of this.
    with socket.socket(socket.AF_UNIX) as tried:
        if refuse_descriptors(tried):
            yield
            return
    # The handler does nothing. It exists only so that the signal interrupts the system call (EINTR).
    before = signal.signal(signal.SIGALRM, lambda *_: None)
    signal.setitimer(signal.ITIMER_REAL, INTERRUPT_S, INTERRUPT_S)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
