"""The beginning of a safetensors file: the length of its header, and the header."""

import json
from collections.abc import Mapping, Sequence
from math import prod
from typing import Final

ITEM_BYTES: Final = {"F8_E4M3": 1, "F8_E5M2": 1, "BF16": 2, "F16": 2, "F32": 4, "I32": 4}
"""Bytes of one value, by the format's name of its type."""


def safetensors_head(tensors: Mapping[str, tuple[str, Sequence[int]]]) -> bytes:
    """Return the bytes before the values. Values follow in the order of `tensors`, which has types and shapes."""
    # transformers refuses a file without metadata.
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, (kind, shape) in tensors.items():
        begin, end = end, end + ITEM_BYTES[kind] * prod(shape)
        header[name] = {"dtype": kind, "shape": list(shape), "data_offsets": [begin, end]}
    encoded = json.dumps(header).encode()
    return len(encoded).to_bytes(8, "little") + encoded
