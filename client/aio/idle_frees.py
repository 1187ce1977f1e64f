"""The timer that frees dropped objects in idle asyncio sessions (`core.idle_frees`)."""

import asyncio
import weakref

from gpulease.client.core.idle_frees import POLL_INTERVAL_S, IdlePoller
from gpulease.client.core.session import SessionCore


def free_when_idle(session: SessionCore) -> None:
    """Free what the program has dropped in a session while it is idle, until it ends.

    Runs in the session's event loop.
    """
    loop, session_ref = asyncio.get_running_loop(), weakref.ref(session)
    poller = IdlePoller(weakref.proxy(session.operations))

    # Weak references only: a timer must not keep the session alive.
    def now() -> None:
        # The session was dropped, or has ended: the timer is not set again.
        session = session_ref()
        if session is None or poller.is_over:
            return
        # A task that holds the lock is sending a request, which frees the dropped objects itself.
        if poller.has_found() and not session.attachment.lock.locked():
            poller.free()
        loop.call_later(POLL_INTERVAL_S, now)

    loop.call_later(POLL_INTERVAL_S, now)
