"""The embedded driver's architecture. Like a card's, it decides which images load (PTX ISA 11.1.2, `.target`)."""

import re
from typing import Final

from gpulease.protocol.fast_dataclass import dataclass

NEWEST_PTX: Final = (9, 5)
"""The newest PTX version that this driver accepts."""

_TARGET: Final = re.compile(r"sm_([1-9]\d{1,2})([af]?)", re.ASCII)
# Each is the major version times 10 plus the minor version.
_KNOWN: Final = frozenset((50, 52, 53, 60, 61, 62, 70, 72, 75, 80, 86, 87, 88, 89, 90, 100, 101, 103, 110, 120, 121))
"""The compute capabilities of real cards. Any other number in a setting is refused as a typing mistake, which would
otherwise reject images that the user's card accepts.
"""


@dataclass(frozen=True, slots=True)
class Architecture:
    """A compute capability, as the major version times 10 plus the minor: 90 for 9.0."""

    number: int = 90

    def __str__(self) -> str:
        return f"sm_{self.number}"

    def rejection(self, version: tuple[int, int], target: str) -> str:
        """Return the reason why PTX of this version and target can't run here, or ""."""
        # A newer version may have added instructions that the parser would misread.
        if version > NEWEST_PTX:
            written, newest = (".".join(map(str, numbers)) for numbers in (version, NEWEST_PTX))
            return f"the image is PTX {written}, this driver supports PTX up to {newest}"
        match = _TARGET.fullmatch(target)
        if match is None:
            return f"the target must be an architecture like sm_90, not {target[:60]!r}; this device is {self}"
        number, suffix = int(match[1]), match[2]
        # A card runs code for older cards, never code for newer ones.
        if number > self.number:
            return f"the image is for {target}, this device is {self}"
        # With the suffix "a", code is for exactly this capability; with "f", for its family, which is one major
        # version.
        if suffix == "a" and number != self.number:
            return f"the image is for {target}, which runs on sm_{number} alone; this device is {self}"
        if suffix == "f" and number // 10 != self.number // 10:
            return f"the image is for {target}, which runs on that family alone; this device is {self}"
        return ""


def takes_long_parameters(version: tuple[int, int], target: str) -> bool:
    """Return whether kernels of an image may have more than 4352 bytes of parameters (PTX ISA section 5.1.6.1)."""
    match = _TARGET.fullmatch(target)
    return match is not None and version >= (8, 1) and int(match[1]) >= 70


SM_90: Final = Architecture()
"""The default architecture, on which most PTX in use runs."""


def parse_architecture(text: str) -> Architecture:
    """Parse a setting like "sm_90". Raises ValueError for a suffix, or a capability that no card has."""
    match = _TARGET.fullmatch(text)
    if match is None or match[2] or int(match[1]) not in _KNOWN:
        known_targets = ", ".join(f"sm_{number}" for number in sorted(_KNOWN))
        raise ValueError(f"the architecture must be one of {known_targets}, not {text!r}")
    return Architecture(int(match[1]))
