"""What the operator wants of the sandbox."""

import json
from dataclasses import dataclass
from typing import Final

from gpulease.daemon.sandbox.measures import Measure

MODES: Final = ("available", "required")

ALWAYS_ON: Final = frozenset({Measure.DESCRIPTORS, Measure.PRIVILEGES})
"""What others rest on, and no driver can have a use for the lack of."""


@dataclass(frozen=True, slots=True)
class SandboxSettings:
    """How workers are to be shut in.

    Attributes:
        is_required: Whether the daemon is not to start where a measure can't be had.
        user: Who workers are to be; None for the default user if the daemon is root, and for its own user if not.
        without: Measures that the operator does without.
    """

    is_required: bool = False
    user: str | None = None
    without: frozenset[Measure] = frozenset()

    def to_text(self) -> str:
        """For a command line."""
        without = sorted(measure.value for measure in self.without)
        return json.dumps({"required": self.is_required, "user": self.user, "without": without})

    @classmethod
    def from_text(cls, text: str) -> "SandboxSettings":
        """As it came over a command line of ours."""
        found = json.loads(text)
        return cls(found["required"], found["user"], frozenset(map(Measure, found["without"])))
