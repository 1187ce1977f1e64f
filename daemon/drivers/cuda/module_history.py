"""Determines whether variables keep their addresses in another process that loads a context's modules in their order.

A module's place depends on what the driver has placed before it (H200, driver 580): on modules that were unloaded since
and on streams. Another process loads only the modules that are left, and creates the streams after them. So a variable
keeps its address only if nothing lay before it that another process lacks at that moment. A module that was unloaded
last leaves no trace, unless it made the driver take its print buffer.

Streams before modules. The driver destroys no stream of a session (streams.py), so only their number when a module was
loaded affects its place. With this number in the image's record of each module, another process could create as many
streams before it loads the module, and give them to the connections afterwards. First a card must show that streams
take the same places in every process, also in a warm context, which has one already; that nothing else takes memory
between a stream and a module, such as graphs, launches with more local memory, or the print buffer; and that the rule
for unloaded modules still holds then.
"""

from typing import Final

MAX_MODULES_BYTES: Final = 24 << 20
"""Maximum number of bytes of all modules of a session that leaves its process with variables. The context begins with
that many for large sections (H200, driver 580). Further ones lie where the process has room at that moment, which
differs between processes."""


class ModuleHistory:
    """The modules of one context, by the numbers that `add` returns, in the order in which they were loaded."""

    def __init__(self) -> None:
        # The bytes of each loaded module, and whether it has variables.
        self._loaded: dict[int, tuple[int, bool]] = {}
        self._last = 0
        # The first number of a module that was unloaded before one that is still loaded.
        self._first_gap: int | None = None
        # The first module that calls the driver's functions, and whether it was unloaded.
        self._first_caller: int | None = None
        self._is_caller_gone = False
        # The number of the last module before the first stream.
        self._before_streams: int | None = None
        self._bytes = self._most_bytes = 0

    def add(self, size_bytes: int, *, has_variables: bool, calls_driver: bool = False) -> int:
        """Record a load. `calls_driver`: whether its kernels call the driver's functions, such as vprintf."""
        self._last += 1
        self._loaded[self._last] = size_bytes, has_variables
        self._bytes += size_bytes
        self._most_bytes = max(self._most_bytes, self._bytes)
        if calls_driver and self._first_caller is None:
            self._first_caller = self._last
        return self._last

    def add_stream(self) -> None:
        if self._before_streams is None:
            self._before_streams = self._last

    def remove(self, number: int) -> None:
        size_bytes, _ = self._loaded.pop(number)
        self._bytes -= size_bytes
        self._is_caller_gone = self._is_caller_gone or number == self._first_caller
        last = next(reversed(self._loaded), 0)
        if number < last:
            self._first_gap = number if self._first_gap is None else min(self._first_gap, number)
        elif self._first_gap is not None and self._first_gap > last:
            # Nothing is left after the gap: the next module is placed as if the gap had never existed.
            self._first_gap = None
        if not self._loaded:
            self._most_bytes = 0

    def why_elsewhere(self) -> str:
        """Return why variables may be at other places in another process; "" if they are at the same ones."""
        last_with_variables = next((at for at in reversed(self._loaded) if self._loaded[at][1]), 0)
        if not last_with_variables:
            return ""
        if self._first_gap is not None and self._first_gap < last_with_variables:
            return "a module was unloaded that was loaded before a module with variables, which would move"
        if self._is_caller_gone and self._first_caller is not None and self._first_caller < last_with_variables:
            return "a module that prints was unloaded, and a module with variables that was loaded after it would move"
        if self._before_streams is not None and self._before_streams < last_with_variables:
            return "a stream was created before a module with variables was loaded, which would move"
        if self._most_bytes > MAX_MODULES_BYTES:
            return (
                f"its modules took {self._most_bytes} bytes; variables keep their addresses only if all modules take "
                f"at most {MAX_MODULES_BYTES}"
            )
        return ""
