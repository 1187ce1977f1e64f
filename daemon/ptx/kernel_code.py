"""A part of an image: its IR and, from the first launch of one of its kernels on, its native code.

Most kernels of a large module are never launched, and LLVM takes ten times as long as parsing and translating. So an
image is parsed, translated and perhaps refused when it is loaded, and each part is compiled on demand. IR is kept
compressed to a fifth: it is some seven times as long as the code that it becomes.

Most kernels that are launched run only for a moment. So a part is first compiled in a fraction of the time
(`FIRST_EFFORTS`), and again with its own effort once one of its kernels has run for long (`CpuKernel.entry_for`). Both
codes compute the same bits.
"""

import hashlib
import zlib
from collections.abc import Mapping
from typing import Final

from gpulease.daemon import ptx
from gpulease.daemon.drivers.interface import LaunchRejected
from gpulease.daemon.native.code_cache import keep, key_of, read_kept
from gpulease.daemon.native.compiler import BadIr, Effort, NativeCode, emit_object, load_object
from gpulease.daemon.ptx.limits import FIRST_CODE_NS, FIRST_CODE_NS_PER_BYTE, FIRST_CODE_NS_PER_SIMPLIFIED_BYTE
from gpulease.protocol.fast_dataclass import dataclass

# zlib's fastest level: the default level makes IR a sixth smaller and takes three times as long.
_COMPRESSION = 1

FIRST_EFFORTS: Final[Mapping[Effort, Effort]] = {
    Effort.FULL: Effort.FIRST,
    Effort.FEW: Effort.FIRST,
    # As in the full compilation, inline nothing, because the code is long.
    Effort.SOME: Effort.LEAST,
}
"""The effort for a part's first code, by its full effort, which takes several times as long. Parts with other efforts
are compiled only once.
"""


@dataclass(frozen=True, slots=True)
class PartSource:
    """The source of a part's code, and how it is compiled.

    Attributes:
        effort: The value of its Effort.
        key: The key under which its object code is kept for other processes.
        packed: Its IR, compressed.
        is_once: Whether it is compiled only once, with its own effort. Otherwise it is first compiled quickly.
    """

    effort: str
    key: bytes
    packed: bytes
    is_once: bool

    @classmethod
    def of(cls, text: str, effort: Effort, *, is_once: bool) -> "PartSource":
        data = text.encode()
        key = key_of(b"part " + effort.value.encode(), data, ptx)
        return cls(effort.value, key, zlib.compress(data, _COMPRESSION), is_once or effort not in FIRST_EFFORTS)

    @property
    def first_effort(self) -> Effort:
        """The effort of the part's first code. Raises KeyError if the part is compiled only once."""
        return FIRST_EFFORTS[Effort(self.effort)]

    @property
    def first_key(self) -> bytes:
        """The key of its first code."""
        return hashlib.sha256(self.first_effort.value.encode() + self.key).digest()


def compile_source(source: PartSource, effort: Effort | None = None) -> bytes:
    """Compile a part to object code, with its own effort or another. Raises LaunchRejected for IR that LLVM refuses."""
    try:
        return emit_object(zlib.decompress(source.packed).decode(), effort or Effort(source.effort))
    except BadIr as error:
        raise LaunchRejected(f"the embedded driver failed to translate this kernel: {error}") from None


class PartCode:
    """A part's code in this process.

    Attributes:
        size_bytes: Memory that it takes, compiled or not.
        first_code_ns: For how long launches may run its first code before it is optimised.
    """

    def __init__(self, source: PartSource) -> None:
        self._source = source
        # Keep both codes, because a launch may still run the first code while later ones run the optimised code.
        self._first: NativeCode | None = None
        self._optimised: NativeCode | None = None
        self.size_bytes = len(source.packed)
        is_simplified = source.effort == Effort.SOME.value
        per_byte = FIRST_CODE_NS_PER_SIMPLIFIED_BYTE if is_simplified else FIRST_CODE_NS_PER_BYTE
        self.first_code_ns = max(FIRST_CODE_NS, per_byte * self.size_bytes)

    @property
    def is_compiled(self) -> bool:
        """Return whether its functions can be called at once."""
        return self._first is not None or self._optimised is not None

    @property
    def is_optimised(self) -> bool:
        """Return whether `address` returns code of the part's own effort from now on."""
        return self._optimised is not None

    def address(self, symbol: str, *, is_hot: bool = False) -> int:
        """Return a function's address; compiles the part if needed, with its own effort if `is_hot`.

        Raises LaunchRejected like `compile_source`.
        """
        return self._code(is_hot=is_hot).address(symbol)

    def _code(self, *, is_hot: bool) -> NativeCode:
        # Look for each code in this process, then in the directory of kept code, and only then compile it. Use
        # optimised code at once if another process has made it.
        if self._optimised is None and (is_hot or self._first is None):
            data = read_kept(self._source.key)
            if data is None and (is_hot or self._source.is_once):
                data = compile_source(self._source)
                keep(self._source.key, data)
            if data is not None:
                self._optimised = self._load(data)
        if self._optimised is not None:
            return self._optimised
        if self._first is None:
            data = read_kept(self._source.first_key)
            if data is None:
                data = compile_source(self._source, self._source.first_effort)
                keep(self._source.first_key, data)
            self._first = self._load(data)
        return self._first

    def _load(self, data: bytes) -> NativeCode:
        code = load_object(data)
        self.size_bytes += len(data)
        return code
