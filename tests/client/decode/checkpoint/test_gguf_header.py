import mmap
import struct
from dataclasses import replace
from pathlib import Path
from typing import Final

import numpy as np
import pytest
from gguf import GGUFReader
from hypothesis import given, settings
from hypothesis import strategies as st

from gpulease.client.decode.checkpoint.gguf_header import MAX_ITEMS, GgufHeader, gguf_header
from gpulease.client.decode.checkpoint.tensor_file import TensorFile
from gpulease.client.decode.decode_errors import ModelRejected
from helpers.made_models import QWEN2, random_weights, write_gguf

SMALL: Final = replace(QWEN2, layers=1, width=32, heads=1, key_heads=1, inner_width=32, vocabulary=4)
PATH: Final = Path("a.gguf")
SAYS: Final = {
    "a.texts": ["", "ä", "long" * 50],
    "a.numbers": [1, -2, 3],
    "a.floats": [0.5, 1.25],
    "a.flags": [True, False],
    "a.flag": True,
}


def header_of(content: bytes) -> GgufHeader:
    mapped = mmap.mmap(-1, len(content))
    mapped[:] = content
    return gguf_header(mapped, PATH)


def text(value: bytes) -> bytes:
    return struct.pack("<Q", len(value)) + value


def pair(kind: int, value: bytes, key: bytes = b"k") -> bytes:
    return text(key) + struct.pack("<I", kind) + value


def file_of(pairs: list[bytes], tensors: list[bytes] | None = None, more: bytes = b"") -> bytes:
    tensors = tensors or []
    return b"GGUF" + struct.pack("<IQQ", 3, len(tensors), len(pairs)) + b"".join(pairs + tensors) + more


def tensor(shape: list[int], kind: int = 0, offset: int = 0, name: bytes = b"t") -> bytes:
    return text(name) + struct.pack(f"<I{len(shape)}QIQ", len(shape), *shape, kind, offset)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_gguf(tmp_path_factory.mktemp("whole") / "a.gguf", SMALL, random_weights(SMALL), says=SAYS)


def test_a_header_is_what_the_library_reads(whole: Path) -> None:
    """Compare every key and every tensor with what the library gguf reads."""
    header, library = gguf_header(TensorFile(whole).mapped, whole), GGUFReader(whole)
    fields = {key: field.contents() for key, field in library.fields.items() if not key.startswith("GGUF.")}
    assert header.metadata == fields
    assert list(header.tensors) == [tensor.name for tensor in library.tensors]
    for theirs in library.tensors:
        ours = header.tensors[theirs.name]
        assert ours.kind is not None
        assert (ours.shape, ours.kind.name, ours.offset) == (
            tuple(reversed(theirs.shape.tolist())), theirs.tensor_type.name, theirs.data_offset
        )  # fmt: skip


def test_a_version_2_file_is_read() -> None:
    content = bytearray(file_of([pair(4, struct.pack("<I", 7))]))
    content[4] = 2
    assert header_of(bytes(content)).metadata == {"k": 7}


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        (b"GGML" + bytes(30), "a GGUF file must begin with b'GGUF', not b'GGML'"),
        (b"GGUF" + struct.pack(">IQQ", 3, 0, 0), "GGUF version must be .* not 50331648"),
        (b"GGUF" + struct.pack("<IQQ", 3, 1 << 60, 0), "1152921504606846976 tensors; at most"),
        (b"GGUF" + struct.pack("<IQQ", 3, 0, 1 << 60), "1152921504606846976 keys"),
        (file_of([pair(8, struct.pack("<Q", 1 << 62))]), "truncated: 4,611,686,018,427,387,904 bytes of 'k'"),
        (file_of([pair(9, struct.pack("<IQ", 0, 1 << 62))]), f"lists of more than {MAX_ITEMS:,} items, at 'k'"),
        (file_of([pair(9, struct.pack("<IQ", 8, MAX_ITEMS))]), "truncated: 8 bytes"),
        (file_of([pair(9, struct.pack("<IQ", 4, 1000))]), "truncated: 4,000 bytes of 'k'"),
        (file_of([pair(9, struct.pack("<IQ", 9, 1))]), "'k' is of type 9"),
        (file_of([pair(77, b"")]), "'k' is of type 77"),
        (file_of([pair(4, bytes(4)), pair(4, bytes(4))]), "a key occurs twice in its metadata"),
        (file_of([pair(8, text(b"\xff"))]), "a text in its header is not UTF-8"),
        (file_of([pair(4, bytes(4), b"general.alignment")]), "general.alignment must be a power of two, not '0'"),
        (file_of([pair(8, text(b"32"), b"general.alignment")]), "general.alignment must be a power of two, not '32'"),
        (
            file_of([pair(10, struct.pack("<Q", 1 << 40), b"general.alignment")]),
            "general.alignment must be a power of two, not '1099",
        ),
        (file_of([], [tensor([])]), "'t' has 0 dimensions"),
        (file_of([], [text(b"t") + struct.pack("<I", 1 << 31)]), "'t' has 2147483648 dimensions"),
        (file_of([], [tensor([32, 0])]), r"'t' has the shape \[32, 0\]"),
        (file_of([], [tensor([32]), tensor([32])], bytes(256)), "a tensor occurs twice"),
        (file_of([], [tensor([32])], bytes(32)), "tensor 't' ends at byte"),
        (file_of([], [tensor([1 << 63, 1 << 63])], bytes(64)), "truncated: tensor 't' ends at byte"),
        (file_of([], [tensor([32], offset=(1 << 64) - 1)], bytes(256)), "truncated: tensor 't' ends at byte"),
        (file_of([], [tensor([33], kind=8)], bytes(256)), "'t': the number of columns must be a multiple of 32"),
    ],
)
def test_a_broken_header_is_refused_with_what_is_wrong(content: bytes, sentence: str) -> None:
    with pytest.raises(ModelRejected, match=f"a.gguf: .*{sentence}"):
        header_of(content)


@settings(max_examples=50, deadline=None)
@given(st.data())
def test_a_header_with_changed_bytes_is_read_or_refused(whole: Path, data: st.DataObject) -> None:
    content = bytearray(whole.read_bytes())
    for _ in range(data.draw(st.integers(1, 4))):
        content[data.draw(st.integers(4, 1500))] = data.draw(st.integers(0, 255))
    try:
        header = header_of(bytes(content))
    except ModelRejected:
        return
    for entry in header.tensors.values():
        assert entry.kind is None or entry.offset < len(content)


@settings(max_examples=50, deadline=None)
@given(st.data())
def test_a_truncated_file_is_refused(whole: Path, data: st.DataObject) -> None:
    content = whole.read_bytes()
    # The library pads the last tensor's data.
    padding = -int(np.prod(list(gguf_header(TensorFile(whole).mapped, whole).tensors.values())[-1].shape)) * 4 % 32
    length = data.draw(st.integers(1, len(content) - padding - 1) | st.integers(1, 2000))
    with pytest.raises(ModelRejected, match="truncated"):
        header_of(content[:length])
