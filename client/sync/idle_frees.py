"""The thread that frees dropped objects in blocking sessions that are idle (`core.idle_frees`).

A session frees dropped objects with its next request, but an idle session has no next request. One thread serves all
sessions of the process. It ends only LINGER_S after the last session, because a program that opens a session for each
request would otherwise start a thread for each. It never keeps a program from exiting.
"""

import os
import threading
import time
import weakref
from _thread import start_new_thread
from contextlib import suppress
from typing import Final

from gpulease.client.core.idle_frees import POLL_INTERVAL_S, IdlePoller
from gpulease.client.core.session import SessionCore

LINGER_S: Final = 1.0
"""How long the thread waits for another session, in seconds."""


class _IdleThread:
    def __init__(self) -> None:
        self._sessions: weakref.WeakKeyDictionary[SessionCore, IdlePoller] = weakref.WeakKeyDictionary()
        self._thread_lock = threading.RLock()
        # This is the ident of the running thread; 0 if there is none.
        self._thread = 0
        self._last_seen_s = 0.0

    def add(self, session: SessionCore) -> None:
        """Poll an open session until it ends."""
        with self._thread_lock:
            # Use a weak map and a weak proxy, so that the thread keeps no session alive.
            self._sessions[session] = IdlePoller(weakref.proxy(session.operations))
            self._last_seen_s = time.monotonic()
            if not self._thread:
                # `coalescing_socket` explains why this is not a threading.Thread.
                with suppress(RuntimeError):
                    self._thread = start_new_thread(self._run, ())

    def _run(self) -> None:
        while self._continues():
            time.sleep(POLL_INTERVAL_S)
            for session, poller in self._listed():
                lock = session.attachment.lock
                # If another thread holds the lock, it is sending a request, which frees the dropped objects itself.
                if poller.has_found() and lock.acquire(blocking=False):
                    try:
                        poller.free()
                    finally:
                        lock.release()
                del session, poller  # no reference may keep a session alive until the next poll

    def _listed(self) -> list[tuple[SessionCore, IdlePoller]]:
        with self._thread_lock:
            return list(self._sessions.items())

    def _continues(self) -> bool:
        with self._thread_lock:
            # Forget sessions that have ended; dropped ones have left the weak map by themselves.
            for session, poller in list(self._sessions.items()):
                if poller.is_over:
                    del self._sessions[session]
            # If add() was interrupted between starting this thread and storing its ident, a later add() has started
            # another thread, and this one is not needed.
            if self._thread != threading.get_ident():
                return False
            # While there is a session, reset the time after which the thread ends.
            now_s = time.monotonic()
            if self._sessions:
                self._last_seen_s = now_s
            elif now_s - self._last_seen_s > LINGER_S:
                self._thread = 0
            return self._thread != 0


_idle_thread = _IdleThread()


def free_when_idle(session: SessionCore) -> None:
    """Until a blocking session ends, free the objects that its program drops while the session is idle."""
    _idle_thread.add(session)


def _after_fork() -> None:
    # A child process has no such thread, and the parent's sessions do not belong to it.
    global _idle_thread
    _idle_thread = _IdleThread()


os.register_at_fork(after_in_child=_after_fork)
