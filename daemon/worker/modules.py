"""A session's modules: loading, telling what is in them, unloading."""

import time
from typing import Final

from gpulease.daemon.drivers.interface import ImageRejected, Module
from gpulease.daemon.worker.desks import Desk, Holdings
from gpulease.daemon.worker.launching import Planner
from gpulease.daemon.worker.page import Counter
from gpulease.daemon.worker.replies import done, empty
from gpulease.daemon.worker.signatures import parameter_types
from gpulease.protocol.codec import parse_body
from gpulease.protocol.errors import LocalProtocolError
from gpulease.protocol.fastpath import HANDLE, parse_fixed
from gpulease.protocol.framing import Frame
from gpulease.protocol.messages import Handle, KernelEntry, ModuleLoad, ModuleLoaded, ModuleParameters

_COMPILING_SINCE_NS: Final = int(Counter.COMPILING_SINCE_NS)


class ModuleDesk(Desk):
    """See Desk."""

    def __init__(self, holdings: Holdings, planner: Planner, counters: memoryview) -> None:
        super().__init__(holdings)
        self._planner = planner
        self._counters = counters
        self._types: dict[int, tuple[bytes, ...]] = {}

    def load(self, frame: Frame) -> bytes:
        """MODULE_LOAD."""
        image = parse_body(ModuleLoad, frame.payload).image
        number, module = self.take(image)
        try:
            reply = done(frame, ModuleLoaded(number, _entries(module)))
            self._types[number] = parameter_types(image, module.kernels)
            return reply
        except LocalProtocolError as error:
            # Too many kernels, or names too long to be told.
            self._give_back(number)
            raise ImageRejected(f"the module's kernels can't be listed: {error}") from None

    def parameters(self, frame: Frame) -> bytes:
        """MODULE_PARAMETERS."""
        (number,) = parse_fixed(HANDLE, Handle, memoryview(frame.payload))
        self._ledger.module(number)
        return done(frame, ModuleParameters(self._types.get(number, ())))

    def take(self, image: bytes) -> tuple[int, Module]:
        """Load an image: the number it is known by, and the module.

        The compiler can't be asked to stop, so its time is told on the page for the broker to look at. It is over when
        the compiled image is weighed: what comes then may wait for kernels.
        """
        self._ledger.check_load(len(image))
        self._counters[_COMPILING_SINCE_NS] = time.monotonic_ns()
        try:
            module = self._context.module_load(image, self._admit)
        finally:
            self._counters[_COMPILING_SINCE_NS] = 0
        self._holdings.may_have_grown = True
        number = self._ledger.add_module(module, len(image))
        self._count()
        return number, module

    def _admit(self, device_bytes: int, shared_bytes: int, kept_bytes: int) -> None:
        self._counters[_COMPILING_SINCE_NS] = 0
        self._ledger.check_module(device_bytes, shared_bytes, kept_bytes)

    def unload(self, frame: Frame) -> bytes:
        """MODULE_UNLOAD."""
        (number,) = parse_fixed(HANDLE, Handle, memoryview(frame.payload))
        self._ledger.module(number)
        self._planner.forget()
        self._give_back(number)
        return empty(frame)

    def _give_back(self, number: int) -> None:
        self._context.module_unload(self._ledger.module(number), self._check_lease)
        self._ledger.remove_module(number)
        self._types.pop(number, None)
        self._count()


def _entries(module: Module) -> tuple[KernelEntry, ...]:
    return tuple(
        KernelEntry(name, kernel.max_threads_per_block, tuple(part.size for part in kernel.parameters))
        for name, kernel in module.kernels.items()
    )
