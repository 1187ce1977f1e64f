"""Descriptors that nobody asked for: whoever writes to a Unix socket may send some along (unix(7), SCM_RIGHTS).

Who reads there, or closes what was not read, closes them too, and is held up by the last close of one for as long as
its sender has chosen: that of a TCP connection waits for the peer (socket(7), SO_LINGER).
"""

import contextlib
import signal
import socket
from collections.abc import Iterator
from typing import Final

SO_PASSRIGHTS: Final = 83
"""Whether a Unix socket takes descriptors (asm-generic/socket.h): from Linux 6.16 on."""

INTERRUPT_S: Final = 0.25
"""How long a close may take where the kernel can't refuse them."""


def refuse_descriptors(sock: socket.socket) -> bool:
    """Have the kernel refuse what is sent along to a Unix socket, and to whoever connects to it from now on: EPERM.

    False if this kernel can't.
    """
    try:
        sock.setsockopt(socket.SOL_SOCKET, SO_PASSRIGHTS, 0)
    except OSError:
        return False
    return True


@contextlib.contextmanager
def interrupting_closes() -> Iterator[None]:
    """Where the kernel can't refuse them, interrupt again and again what the main thread waits for in a close.

    A signal ends the wait, and that of all else that came by the same message.
    """
    with socket.socket(socket.AF_UNIX) as tried:
        if refuse_descriptors(tried):
            yield
            return
    before = signal.signal(signal.SIGALRM, lambda *_: None)
    signal.setitimer(signal.ITIMER_REAL, INTERRUPT_S, INTERRUPT_S)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
