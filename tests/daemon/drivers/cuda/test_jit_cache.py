import pickle

import pytest

from gpulease.daemon.drivers.cuda import jit_cache
from gpulease.daemon.drivers.cuda.jit_cache import Compiled

CODE = b"\x7fELF" + bytes(range(256)) * 3


class Compiler:
    """Makes code of an image, and records its calls."""

    def __init__(self) -> None:
        self.asked: list[bytes] = []

    def __call__(self, ptx: bytes) -> bytes:
        self.asked.append(ptx)
        return CODE + ptx


def test_an_image_is_compiled_once() -> None:
    kept, compiler = Compiled(), Compiler()
    for ptx in (b"a", b"b", b"a", b"b", b"a\0", b"", b"a"):
        assert kept.of(ptx, compiler) == CODE + ptx
    assert compiler.asked == [b"a", b"b", b"a\0", b""]


def test_after_a_stranger_attaches_each_load_compiles() -> None:
    """Images loaded before, and images loaded again in the same lease."""
    kept, compiler = Compiled(), Compiler()
    assert kept.of(b"a", compiler) == kept.of(b"a", compiler) == CODE + b"a"
    kept.close()
    for _ in range(2):
        assert kept.of(b"a", compiler) == CODE + b"a"
    assert compiler.asked == [b"a", b"a", b"a"]


def test_kept_code_is_noise_without_its_ptx() -> None:
    kept = Compiled()
    ptx = b"a kernel with a secret in it: 0123456789abcdef"
    code = kept.of(ptx, Compiler())
    held = pickle.dumps(kept)
    assert len(held) > len(code)
    for secret in (code, ptx):
        pieces = [secret[at : at + 8] for at in range(len(secret) - 8)]
        assert not any(piece in held for piece in pieces)


def test_of_two_images_one_mask_does_not_undo_the_other() -> None:
    masks: list[bytearray] = []
    for ptx in (b"a", b"b"):
        kept = Compiled()
        kept.of(ptx, lambda _: bytes(4096))
        masks += kept._masked.values()
    assert sum(one == other for one, other in zip(*masks, strict=True)) < 100


def test_a_failed_compilation_keeps_nothing() -> None:
    kept, compiler = Compiled(), Compiler()

    def refuse(ptx: bytes) -> bytes:
        raise ValueError("no PTX")

    for _ in range(2):
        with pytest.raises(ValueError, match="no PTX"):
            kept.of(b"a", refuse)
    assert kept.of(b"a", compiler) == CODE + b"a"
    assert compiler.asked == [b"a"]


def test_the_latest_are_kept_within_bounds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jit_cache, "MAX_IMAGES", 3)
    kept, compiler = Compiled(), Compiler()
    for ptx in (b"a", b"b", b"c", b"a", b"d", b"a", b"b"):
        kept.of(ptx, compiler)
    assert compiler.asked == [b"a", b"b", b"c", b"d", b"b"], "b was asked for longest ago when d came"
    monkeypatch.setattr(jit_cache, "MAX_KEPT_BYTES", len(CODE) + 100)
    kept, compiler = Compiled(), Compiler()
    for ptx in (b"a", b"b", b"b", b"a", b"too much" * 20, b"a"):
        assert kept.of(ptx, compiler) == CODE + ptx
    assert compiler.asked == [b"a", b"b", b"a", b"too much" * 20]
