"""GPT-2's letters: one printable character for each byte. Byte-level vocabularies are written in these letters."""

from typing import Final


def _letters() -> dict[str, int]:
    """Return the byte of each of GPT-2's letters (bytes_to_unicode). Printable bytes stand for themselves."""
    # Printable Latin-1 characters stand for themselves; the other bytes get the code points from 256 on, in order.
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + n): byte for n, byte in enumerate(others)}


LETTERS: Final = _letters()
