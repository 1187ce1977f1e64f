"""The header of a GGUF file: its metadata, and the places of its tensors.

The format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md. The `gguf` library's own reader takes seconds for
a vocabulary, and never ends if a list is longer than the file. Here every count is compared with the remaining bytes
before memory is allocated for it.
"""

import mmap
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np

from gpulease.client.decode.checkpoint.tensors import TensorType, row_bytes
from gpulease.client.decode.decode_errors import ModelRejected
from gpulease.client.texts import quoted

MAGIC: Final = b"GGUF"
VERSIONS: Final = (2, 3)
"""Supported versions. Version 1 had 32-bit counts, and big-endian files have another number here."""

MAX_ITEMS: Final = 4 << 20
"""Maximum number of items in all lists of a file together. Without it, a file of empty texts could fill the host's
memory with Python objects. The largest vocabularies have about 700,000 tokens and merges."""

MAX_PAIRS: Final = 4096
"""Maximum number of keys of metadata that a file may have."""

MAX_TENSORS: Final = 1 << 16
"""Maximum number of tensors; a model of 1,024 layers has about 12,000."""

MAX_DIMENSIONS: Final = 4
"""Maximum number of dimensions of GGML's tensors."""

STRING: Final = 8
LIST: Final = 9
SCALARS: Final = {0: "<u1", 1: "<i1", 2: "<u2", 3: "<i2", 4: "<u4", 5: "<i4", 6: "<f4", 7: "?", 10: "<u8", 11: "<i8",
                  12: "<f8"}  # fmt: skip
"""The types of metadata values, except texts and lists, by GGUF's numbers."""

TYPES: Final = {
    0: TensorType.F32,
    1: TensorType.F16,
    2: TensorType.Q4_0,
    3: TensorType.Q4_1,
    6: TensorType.Q5_0,
    8: TensorType.Q8_0,
    12: TensorType.Q4_K,
    14: TensorType.Q6_K,
    30: TensorType.BF16,
}
"""The supported types of tensors, by GGML's numbers."""


@dataclass(frozen=True, slots=True)
class GgufTensor:
    """A tensor in the file.

    Attributes:
        shape: Rows, then columns; the file has them in reverse order.
        kind: Its type; None if it is not supported.
        kind_number: GGML's number of its type.
        offset: The offset of its first byte in the file.
    """

    shape: tuple[int, ...]
    kind: TensorType | None
    kind_number: int
    offset: int


@dataclass(frozen=True, slots=True)
class GgufHeader:
    """The header of a file.

    Attributes:
        metadata: The values, keyed by name: int, float, bool, str, or a list of one of them.
        tensors: The tensors, keyed by name, in GGUF's names.
    """

    metadata: dict[str, Any]
    tensors: dict[str, GgufTensor]


def gguf_header(mapped: mmap.mmap, path: Path) -> GgufHeader:
    """Return the header, after checking that all tensors are inside the file. Raises ModelRejected."""
    try:
        return _HeaderReader(mapped, path).header()
    except UnicodeDecodeError as error:
        raise ModelRejected(f"{path}: corrupt: a text in its header is not UTF-8: {error}") from None


class _HeaderReader:
    def __init__(self, mapped: mmap.mmap, path: Path) -> None:
        self._mapped = mapped
        self._path = path
        self._at = 0
        self._items = 0

    def header(self) -> GgufHeader:
        # Step 1: magic, version and counts. The counts are bounded before they are used.
        magic = self._read(4, "its first bytes")
        if magic != MAGIC:
            raise ModelRejected(f"{self._path}: a GGUF file must begin with {MAGIC!r}, not {magic!r}")
        (version,) = self._numbers("<I")
        if version not in VERSIONS:
            raise ModelRejected(f"{self._path}: the GGUF version must be one of {VERSIONS}, not {version}")
        tensors, pairs = self._numbers("<QQ")
        if pairs > MAX_PAIRS or tensors > MAX_TENSORS:
            raise ModelRejected(
                f"{self._path}: broken: {pairs} keys and {tensors} tensors; at most {MAX_PAIRS} and {MAX_TENSORS}"
            )
        # Step 2: metadata, then the tensors' entries. A duplicate would let two readers see different models.
        metadata = dict(self._pair() for _ in range(pairs))
        if len(metadata) < pairs:
            raise ModelRejected(f"{self._path}: broken: a key occurs twice in its metadata")
        entries = dict(self._tensor() for _ in range(tensors))
        if len(entries) < tensors:
            raise ModelRejected(f"{self._path}: broken: a tensor occurs twice")
        # Step 3: the tensors' offsets, which count from the end of the header, rounded up to the alignment.
        step = metadata.get("general.alignment", 32)
        if not isinstance(step, int) or step < 1 or step & (step - 1) or step > len(self._mapped):
            raise ModelRejected(f"{self._path}: general.alignment must be a power of two, not {quoted(str(step))}")
        begin = -(-self._at // step) * step
        return GgufHeader(metadata, {name: self._placed(name, entry, begin) for name, entry in entries.items()})

    def _placed(self, name: str, entry: GgufTensor, begin: int) -> GgufTensor:
        offset = begin + entry.offset
        if entry.kind is not None:
            # Python's integers do not overflow, so the size of a hostile shape can't wrap around to a small number.
            rows = 1
            for size in entry.shape[:-1]:
                rows *= size
            end = offset + rows * row_bytes(entry.kind, entry.shape[-1], f"{self._path}: tensor {quoted(name)}")
            if end > len(self._mapped):
                raise ModelRejected(
                    f"{self._path}: truncated: tensor {quoted(name)} ends at byte {end:,}, the file at"
                    f" {len(self._mapped):,}"
                )
        return GgufTensor(entry.shape, entry.kind, entry.kind_number, offset)

    def _pair(self) -> tuple[str, Any]:
        # A pair is a key, the number of its type, and its value; a list also has the type and count of its items.
        key = self._text("a key")
        (kind,) = self._numbers("<I")
        if kind != LIST:
            return key, self._value(kind, key)
        kind, count = self._numbers("<IQ")
        # Count before the items are read: each empty text costs 8 bytes of the file, but far more as a Python object.
        self._items += count
        if self._items > MAX_ITEMS:
            raise ModelRejected(f"{self._path}: broken: lists of more than {MAX_ITEMS:,} items, at {quoted(key)}")
        if kind == STRING:
            return key, [self._text(key) for _ in range(count)]
        dtype = self._dtype(kind, key)
        # Read numbers in one piece. `_read` first compares their size with the rest of the file.
        return key, np.frombuffer(self._read(count * dtype.itemsize, key), dtype).tolist()

    def _tensor(self) -> tuple[str, GgufTensor]:
        # An entry is a name, the sizes (fastest first), the type and the offset.
        name = self._text("a tensor's name")
        (dimensions,) = self._numbers("<I")
        if not 1 <= dimensions <= MAX_DIMENSIONS:
            raise ModelRejected(f"{self._path}: broken: tensor {quoted(name)} has {dimensions} dimensions")
        shape = self._numbers(f"<{dimensions}Q")
        kind, offset = self._numbers("<IQ")
        if 0 in shape:
            raise ModelRejected(f"{self._path}: broken: tensor {quoted(name)} has the shape {list(shape)}")
        return name, GgufTensor(tuple(reversed(shape)), TYPES.get(kind), kind, offset)

    def _value(self, kind: int, key: str) -> Any:
        if kind == STRING:
            return self._text(key)
        dtype = self._dtype(kind, key)
        return np.frombuffer(self._read(dtype.itemsize, key), dtype)[0].item()

    def _dtype(self, kind: int, key: str) -> np.dtype[Any]:
        if kind not in SCALARS:
            raise ModelRejected(f"{self._path}: broken: {quoted(key)} is of type {kind}, which GGUF does not have")
        return np.dtype(SCALARS[kind])

    def _text(self, label: str) -> str:
        # A text is a length of 64 bits and UTF-8 bytes, without a terminator.
        (size,) = self._numbers("<Q")
        return self._read(size, label).decode()

    def _numbers(self, form: str) -> tuple[int, ...]:
        return struct.unpack(form, self._read(struct.calcsize(form), "a number"))

    def _read(self, size: int, label: str) -> bytes:
        # Every read goes through here, so no count or length reaches beyond the file.
        if size > len(self._mapped) - self._at:
            raise ModelRejected(
                f"{self._path}: truncated: {size:,} bytes of {quoted(label)} from byte {self._at:,} on; the file ends"
                f" at {len(self._mapped):,}"
            )
        # Slicing a mapping copies the bytes, so nothing refers to the file afterwards.
        self._at += size
        return self._mapped[self._at - size : self._at]
