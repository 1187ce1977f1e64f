"""The thread that frees what nobody has any more in blocking sessions that are asked for nothing (`core.idle_frees`).

It is one thread for all sessions of the process. It ends with the last of them, and never keeps a program from ending.
"""

import os
import threading
import weakref
from _thread import start_new_thread
from contextlib import suppress

from gpulease.client.core.idle_frees import LOOK_S, IdleLook
from gpulease.client.core.session import Session


class _Looker:
    def __init__(self) -> None:
        self._sessions: weakref.WeakKeyDictionary[Session, IdleLook] = weakref.WeakKeyDictionary()
        self._begins_or_ends = threading.RLock()
        self._bell = threading.Lock()
        self._bell.acquire()
        # The thread's ident; 0 for none.
        self._thread = 0

    def add(self, session: Session) -> None:
        """Look at a session that is open, until it ends."""
        session.attachment.at_end.append(self.ring)
        with self._begins_or_ends:
            self._sessions[session] = IdleLook(weakref.proxy(session.operations))
            if not self._thread:
                # Not threading.Thread: see `coalescing_socket`. Where the interpreter ends already, no thread starts.
                with suppress(RuntimeError):
                    self._thread = start_new_thread(self._run, ())

    def ring(self) -> None:
        """Have the thread look now whether it is still needed."""
        with suppress(RuntimeError):  # rung already
            self._bell.release()

    def _run(self) -> None:
        while self._goes_on():
            self._bell.acquire(timeout=LOOK_S)
            for session, look in self._listed():
                lock = session.attachment.lock
                # Somebody who holds the lock asks for something, and frees by that.
                if look.has_found() and lock.acquire(blocking=False):
                    try:
                        look.free()
                    finally:
                        lock.release()
                del session, look  # nothing here keeps a session until the next look

    def _listed(self) -> list[tuple[Session, IdleLook]]:
        with self._begins_or_ends:
            return list(self._sessions.items())

    def _goes_on(self) -> bool:
        with self._begins_or_ends:
            for session, look in list(self._sessions.items()):
                if look.is_over:
                    del self._sessions[session]
            # Another thread looks if the one who started this was interrupted before it could say so.
            if self._thread != threading.get_ident():
                return False
            if not self._sessions:
                self._thread = 0
            return self._thread != 0


_looker = _Looker()


def look_after(session: Session) -> None:
    """Free what nobody has any more in a blocking session that is asked for nothing, until it ends."""
    _looker.add(session)


def _after_fork() -> None:
    global _looker
    _looker = _Looker()


os.register_at_fork(after_in_child=_after_fork)
