"""The timer that frees what nobody has any more in idle asyncio sessions (`core.idle_frees`)."""

import asyncio
import weakref

from gpulease.client.core.idle_frees import LOOK_S, IdleLook
from gpulease.client.core.session import Session


def look_after(session: Session) -> None:
    """Free what nobody has any more in a session that is asked for nothing, until it ends. Runs in its event loop."""
    loop, known = asyncio.get_running_loop(), weakref.ref(session)
    look = IdleLook(weakref.proxy(session.operations))

    def now() -> None:
        session = known()
        if session is None or look.is_over:
            return
        # Somebody who holds the lock asks for something, and frees by that.
        if look.has_found() and not session.attachment.lock.locked():
            look.free()
        loop.call_later(LOOK_S, now)

    loop.call_later(LOOK_S, now)
