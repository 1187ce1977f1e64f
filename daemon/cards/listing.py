"""A look that takes the driver long enough to be shared: many ask for it at a time, and each wants one that is not old.

A look answers all who asked before it began. Who asks while one is under way waits for the next, and shares it.
"""

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Generic, TypeVar

T = TypeVar("T")


class Shared(Generic[T]):
    """Looks, one at a time, in the threads that ask."""

    def __init__(self, look: Callable[[], T]) -> None:
        self._look = look
        self._is_looking = threading.Lock()
        self._books = threading.Lock()
        self._next: Future[T] | None = None

    def ask(self) -> T:
        """What a look says that began after this was called; raises what it raises."""
        with self._books:
            wanted, is_first = self._next, self._next is None
            if wanted is None:
                wanted = self._next = Future()
        if is_first:
            with self._is_looking:
                with self._books:
                    self._next = None
                self._answer(wanted)
        return wanted.result()

    def _answer(self, wanted: Future[T]) -> None:
        try:
            wanted.set_result(self._look())
        except BaseException as error:
            wanted.set_exception(error)
