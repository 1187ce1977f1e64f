"""Images that are compiled already: in this process, or by another one before (kept_code.py)."""

from collections import OrderedDict
from dataclasses import dataclass

from gpulease.daemon.drivers import cpu
from gpulease.daemon.drivers.cpu.architecture import SM_90, Architecture
from gpulease.daemon.drivers.cpu.compiled import CompiledImage, check_size, compile_image
from gpulease.daemon.drivers.cpu.limits import MAX_HELD_CODE_BYTES
from gpulease.daemon.drivers.cpu.native.library import bind_library
from gpulease.daemon.native.compiler import NativeCode, load_object
from gpulease.daemon.native.kept_code import keep, key_of, read_kept


@dataclass(frozen=True, slots=True, eq=False)
class LoadedCode:
    """A compiled image and its code in this process, one piece for each part."""

    image: CompiledImage
    codes: tuple[NativeCode, ...]

    @property
    def size_bytes(self) -> int:
        """What its objects take."""
        return sum(map(len, self.image.objects))


# By key, the one used last at the end.
_held: OrderedDict[bytes, LoadedCode] = OrderedDict()


def ready_to_look_up() -> None:
    """Read what keys are made of: this driver's own sources, which a worker can't open."""
    key_of(b"image", b"", cpu)


def load_code(image: bytes, *, slice_bytes: int, architecture: Architecture = SM_90) -> LoadedCode:
    """An image's code, compiled now or before for that architecture. Raises ImageRejected."""
    key = key_of(f"image for {architecture}".encode(), image, cpu)
    code = _held.get(key)
    if code is None:
        bind_library()
        compiled = _kept_image(key) or _compile_and_keep(key, image, slice_bytes, architecture)
        code = LoadedCode(compiled, tuple(map(load_object, compiled.objects)))
        _hold(key, code)
    _held.move_to_end(key)
    check_size(code.image.variables, slice_bytes)
    return code


def forget_code() -> None:
    """Let go of all that this process holds."""
    _held.clear()


def _kept_image(key: bytes) -> CompiledImage | None:
    data = read_kept(key)
    if data is None:
        return None
    try:
        return CompiledImage.from_bytes(data)
    except (ValueError, TypeError):
        return None


def _compile_and_keep(key: bytes, image: bytes, slice_bytes: int, architecture: Architecture) -> CompiledImage:
    compiled = compile_image(image, slice_bytes=slice_bytes, architecture=architecture)
    try:
        keep(key, compiled.to_bytes())
    except OverflowError:
        # An addend past 64 bits; no compiler writes one.
        return compiled
    return compiled


def _hold(key: bytes, code: LoadedCode) -> None:
    """Keep it in this process; what was not used for longest goes when there is too much."""
    _held[key] = code
    total = sum(held.size_bytes for held in _held.values())
    while total > MAX_HELD_CODE_BYTES and len(_held) > 1:
        _, dropped = _held.popitem(last=False)
        total -= dropped.size_bytes
