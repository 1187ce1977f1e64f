"""The timer that frees dropped objects in idle asyncio sessions (`core.idle_frees`)."""

import asyncio
import weakref

from gpulease.client.core.idle_frees import POLL_INTERVAL_S, IdlePoller
from gpulease.client.core.session import SessionCore


def free_when_idle(session: SessionCore) -> None:
    """Until a session ends, free the objects that its program drops while the session is idle.

    Runs in the session's event loop.
    """
    loop, session_ref = asyncio.get_running_loop(), weakref.ref(session)
    poller = IdlePoller(weakref.proxy(session.operations))

    # Use only weak references, because a timer must not keep the session alive.
    def now() -> None:
        # If the session was dropped or has ended, do not set the timer again.
        session = session_ref()
        if session is None or poller.is_over:
            return
        # If a task holds the lock, it is sending a request, which frees the dropped objects itself.
        if poller.has_found() and not session.attachment.lock.locked():
            poller.free()
        loop.call_later(POLL_INTERVAL_S, now)

    loop.call_later(POLL_INTERVAL_S, now)
