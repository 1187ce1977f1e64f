"""A part of an image: its IR, and native code from the first launch of one of its kernels.

Most kernels of a large module are never launched, and LLVM takes ten times as long as parsing and translating. So an
image is parsed, translated and perhaps refused when it is loaded, and each part is compiled on demand. IR is kept
compressed to a fifth: it is some seven times as long as the code that it becomes.
"""

import zlib

from gpulease.daemon import ptx
from gpulease.daemon.drivers.interface import LaunchRejected
from gpulease.daemon.native.code_cache import keep, key_of, read_kept
from gpulease.daemon.native.compiler import BadIr, Effort, NativeCode, emit_object, load_object
from gpulease.protocol.fast_dataclass import dataclass

# zlib's fastest level: the default level makes IR a sixth smaller and takes three times as long.
_COMPRESSION = 1


@dataclass(frozen=True, slots=True)
class PartSource:
    """The source of a part's code, and how it is compiled.

    Attributes:
        effort: The value of its Effort.
        key: The key under which its object code is kept for other processes.
        packed: Its IR, compressed.
    """

    effort: str
    key: bytes
    packed: bytes

    @classmethod
    def of(cls, text: str, effort: Effort) -> "PartSource":
        data = text.encode()
        key = key_of(b"part " + effort.value.encode(), data, ptx)
        return cls(effort.value, key, zlib.compress(data, _COMPRESSION))


def compile_source(source: PartSource) -> bytes:
    """Compile a part to object code. Raises LaunchRejected for IR that LLVM refuses."""
    try:
        return emit_object(zlib.decompress(source.packed).decode(), Effort(source.effort))
    except BadIr as error:
        raise LaunchRejected(f"the embedded driver failed to translate this kernel: {error}") from None


class PartCode:
    """A part's code in this process.

    Attributes:
        size_bytes: Memory that it takes, compiled or not.
    """

    def __init__(self, source: PartSource) -> None:
        self._source = source
        self._native: NativeCode | None = None
        self._addresses: dict[str, int] = {}
        self.size_bytes = len(source.packed)

    @property
    def is_compiled(self) -> bool:
        """Say whether its functions can be called at once."""
        return self._native is not None

    def address(self, symbol: str) -> int:
        """Return a function's address; compiles the part if needed. Raises LaunchRejected like `compile_source`."""
        known_address = self._addresses.get(symbol)
        if known_address is None:
            known_address = self._addresses[symbol] = self._compiled().address(symbol)
        return known_address

    def _compiled(self) -> NativeCode:
        # Three places, cheapest first: this process, the directory of kept code, LLVM.
        if self._native is None:
            data = read_kept(self._source.key)
            if data is None:
                data = compile_source(self._source)
                keep(self._source.key, data)
            self._native = load_object(data)
            self.size_bytes += len(data)
        return self._native
