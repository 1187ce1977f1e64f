"""A package's exported names, imported when the first of them is accessed: many commands and processes need none."""

from collections.abc import Callable
from importlib import import_module
from typing import Any


def imported_on_access(package: dict[str, Any], module: str) -> Callable[[str], Any]:
    """Return the `__getattr__` of a package, which imports all that `module` exports.

    `package` is the package's `globals()`. A stub beside it shows type checkers the same names.
    """

    def imported(name: str) -> Any:
        if name == "__all__" or not name.startswith("__"):
            public = import_module(module)
            package.update({exported: getattr(public, exported) for exported in public.__all__}, __all__=public.__all__)
            if name in package:
                return package[name]
        raise AttributeError(f"module {package['__name__']!r} has no attribute {name!r}")

    return imported
