"""JSON without spaces, as bytes, for the log and the audit log. msgspec encodes ten times as fast as `json`."""

import json
from collections.abc import Callable


def compact_encoder(*, sorts_keys: bool = False) -> Callable[[object], bytes]:
    """Return an encoder to UTF-8. Falls back to `json`, which is slower, if msgspec is missing.

    The encoder escapes the same characters as RFC 8785, section 3.2.2.2, with the same letters. Objects that JSON lacks
    become their `str`. It raises UnicodeEncodeError for half of a surrogate pair.

    Args:
        sorts_keys: Whether the keys of each object, which are ASCII, are sorted.
    """
    try:
        import msgspec
    except ImportError:
        encode = json.JSONEncoder(
            ensure_ascii=False, sort_keys=sorts_keys, separators=(",", ":"), check_circular=False, default=str
        ).encode
        return lambda value: encode(value).encode()
    return msgspec.json.Encoder(enc_hook=str, order="sorted" if sorts_keys else None).encode
