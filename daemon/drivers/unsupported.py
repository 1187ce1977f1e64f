"""What no lease supports, on any driver: managed memory, and kernels that need a cooperative launch.

The driver keeps tens of MiB of a card for managed memory, which belong to no lease, until the card's last context
ends. A kernel that synchronises its grid traps unless it was launched cooperatively, and the trap costs the context.
"""

import re
from typing import Final

from gpulease.daemon.drivers.interface import ImageRejected, LaunchRejected

# ptxas 13.0 reads strings over line ends and without escapes. Every alternative is linear: what is never closed ends
# the search instead of being looked for again.
_MANAGED: Final = re.compile(
    rb"""//[^\n]*|/\*.*?(?:\*/|\Z)|"[^"]*(?:"|\Z)|(?P<managed>\.managed(?![\w$]))""", re.DOTALL
)
_WORD: Final = re.compile(
    rb"""//[^\n]*|/\*.*?(?:\*/|\Z)|"[^"]*(?:"|\Z)|\.[\w$]+|\d[\w$]*|(?P<word>[A-Za-z_$%][\w$]*)""", re.DOTALL
)

_SHOWN_NAME_CHARACTERS: Final = 200


def text_of(image: bytes) -> bytes:
    """The PTX text of an image: all before its first NUL, as cuModuleLoadData and cuLinkAddData take a C string."""
    return image.partition(b"\0")[0]


def refuse_managed_text(ptx: bytes) -> None:
    """Raise ImageRejected for PTX text that declares a managed variable (PTX ISA section 11.4, `.attribute`).

    The declaration may stand anywhere, so this looks for the attribute itself, outside of comments and strings.
    """
    if b".managed" not in ptx:
        return
    for found in _MANAGED.finditer(ptx):
        if found["managed"] is not None:
            line = ptx.count(b"\n", 0, found.start()) + 1
            raise managed_refused(_variable_behind(ptx, found.end()), line=line)


def _variable_behind(ptx: bytes, position: int) -> str:
    """The first name behind an attribute: the variable's, as all else in a declaration begins with a dot or digit."""
    for found in _WORD.finditer(ptx, position):
        if found["word"] is not None:
            return found["word"].decode("ascii")
    return ""


def managed_refused(variable: str, *, line: int = 0) -> ImageRejected:
    """The error for an image with a managed variable."""
    name = variable[:_SHOWN_NAME_CHARACTERS]
    where = f"line {line}: " if line else ""
    said = f"{where}the variable {name!r} is __managed__; managed memory is not supported on a lease"
    hint = "Declare it __device__, or pass a buffer of mem_alloc to the kernel."
    return ImageRejected(said, log=said, line=line, hint=hint)


def cooperative_refused(kernel: str) -> LaunchRejected:
    """The error for the launch of a kernel that synchronises its grid."""
    why = "it synchronises its whole grid, which is not supported on a lease"
    return LaunchRejected(
        f"kernel {kernel} needs a cooperative launch: {why}",
        hint="Launch one kernel for each part between two grid synchronisations: launches of a stream run in order.",
    )
