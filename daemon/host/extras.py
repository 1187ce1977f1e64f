"""Checks for the packages of gpulease's optional extras."""

import importlib.util
from collections.abc import Sequence


def check_installed(packages: Sequence[str], extra: str) -> None:
    """Check that packages can be imported. Raises ValueError, which names the extra that installs them."""
    if missing := [name for name in packages if not _is_installed(name)]:
        raise ValueError(
            f"{' and '.join(missing)} must be installed for this: pip install '.[{extra}]' in gpulease's repository"
        )


def _is_installed(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except ModuleNotFoundError:
        # The package that contains it is missing, too.
        return False
