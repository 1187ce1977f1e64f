"""The embedded driver's architecture: as a card's, it decides which images load (PTX ISA section 11.1.2, `.target`)."""

import re
from dataclasses import dataclass
from typing import Final

NEWEST_PTX: Final = (9, 5)
"""The PTX version up to which this driver knows what was added."""

_TARGET: Final = re.compile(r"sm_([1-9]\d{1,2})([af]?)", re.ASCII)
_KNOWN: Final = frozenset((50, 52, 53, 60, 61, 62, 70, 72, 75, 80, 86, 87, 88, 89, 90, 100, 101, 103, 110, 120, 121))
"""Those that a card can have: a mistyped one would refuse images that its card takes."""


@dataclass(frozen=True, slots=True)
class Architecture:
    """A compute capability: 90 for 9.0."""

    number: int = 90

    def __str__(self) -> str:
        """As nvcc writes it."""
        return f"sm_{self.number}"

    def why_not(self, version: tuple[int, int], target: str) -> str:
        """Return the reason that PTX of this version and target can't run here; "" if it can."""
        if version > NEWEST_PTX:
            written, newest = (".".join(map(str, one)) for one in (version, NEWEST_PTX))
            return f"the image is PTX {written}, this driver knows PTX up to {newest}"
        found = _TARGET.fullmatch(target)
        if found is None:
            return f"{target[:60]!r} is no target; this device is {self}"
        number, only = int(found[1]), found[2]
        if number > self.number:
            return f"the image is for {target}, this device is {self}"
        if only == "a" and number != self.number:
            return f"the image is for {target}, which runs on sm_{number} alone; this device is {self}"
        if only == "f" and number // 10 != self.number // 10:
            return f"the image is for {target}, which runs on that family alone; this device is {self}"
        return ""


def takes_long_parameters(version: tuple[int, int], target: str) -> bool:
    """Say whether kernels of such an image may have more than 4352 bytes of parameters (PTX ISA section 5.1.6.1)."""
    found = _TARGET.fullmatch(target)
    return found is not None and version >= (8, 1) and int(found[1]) >= 70


SM_90: Final = Architecture()
"""The default: what most PTX in use runs on."""


def parse_architecture(text: str) -> Architecture:
    """The architecture of that name. Raises ValueError."""
    found = _TARGET.fullmatch(text)
    if found is None or found[2] or int(found[1]) not in _KNOWN:
        known = ", ".join(f"sm_{number}" for number in sorted(_KNOWN))
        raise ValueError(f"{text!r} is no architecture of a card; there are {known}")
    return Architecture(int(found[1]))
