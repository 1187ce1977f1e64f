"""The imports at a command's start, without garbage collection. This file itself imports nothing slow.

Modules are never garbage. To walk them, during the imports and again when the process ends, takes up to a third of the
time of a short command.
"""

import gc


def begin_imports() -> None:
    """Collect no garbage until `end_imports`."""
    gc.disable()


def end_imports() -> None:
    """Collect garbage again, but examine nothing of what was imported. Does nothing without `begin_imports`."""
    if not gc.isenabled():
        gc.freeze()
        gc.enable()
