"""Old names of modules that have moved. They can be imported until the next release, each with a DeprecationWarning.

A module that is imported by its old name is the same object as the module with the new name, so classes and exceptions
are the same, too. `python -m` accepts old names as well, because during an upgrade a program of the previous version
starts its helpers by them.
"""

import sys
import warnings
from collections.abc import Sequence
from importlib import import_module
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import CodeType, ModuleType
from typing import Any, Final

_DECODE_ROOMS: Final = {
    "scheduler": ("cell_rate", "scheduler", "step_plan", "tenant_state"),
    "engine": ("engine", "forward_pass", "kernel_library", "linear_tiles"),
    "checkpoint": ("weights",),
    "supervisor": (
        "background_tasks",
        "decode_audit",
        "decoder",
        "generation",
        "prompt_intake",
        "request_ledger",
        "serving_engine",
        "tenant_moves",
        "tenant_regions",
    ),
    "openai": ("decode_metrics",),
    "page": ("decode_page", "demo_traffic", "page_events", "page_history"),
}
"""Modules of the decode engine that were in its only folder, by their present folder."""

MOVED: Final = {
    "gpulease.client.cli.start": "gpulease.entry_points",
    "gpulease.client.engine": "gpulease.client.core",
    "gpulease.client.engine.memory_views": "gpulease.client.memory_views",
    "gpulease.client.serve.caller_text": "gpulease.client.http.caller_text",
    "gpulease.client.serve.decode": "gpulease.client.decode",
    "gpulease.client.serve.decode.openai_http": "gpulease.client.decode.openai",
    "gpulease.client.serve.dra": "gpulease.client.integrations.kubernetes",
    "gpulease.client.serve.http": "gpulease.client.http",
    "gpulease.client.serve.proved_end": "gpulease.client.integrations.proved_end",
    "gpulease.client.serve.slurm": "gpulease.client.integrations.slurm",
    "gpulease.client.serve.unix_path": "gpulease.client.http.unix_path",
    **{
        f"gpulease.client.serve.decode.{name}": f"gpulease.client.decode.{room}.{name}"
        for room, names in _DECODE_ROOMS.items()
        for name in names
    },
}
"""New names of modules and packages by their old names. A package's row applies to all of its modules that have no
row."""

_PREFIXES: Final = ("gpulease.client.cli.start", "gpulease.client.engine", "gpulease.client.serve.")


def new_name(old: str) -> str | None:
    """Return the name that a module has now; None if it has not moved."""
    package, suffix = old, ""
    # Find the longest old name that has a row, and keep the rest of the name.
    while package:
        if package in MOVED:
            return MOVED[package] + suffix
        package, _, last = package.rpartition(".")
        suffix = f".{last}{suffix}"
    return None


class _Moved:
    """Loads the module with the new name when the old name is imported.

    It derives from no class of importlib.abc, because that module's imports take a tenth of a short command's time.
    """

    def __init__(self, new: str) -> None:
        self._new = new

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return None  # the import system makes an ordinary module

    def exec_module(self, module: ModuleType) -> None:
        old = module.__name__
        warnings.warn(f"{old} has moved: import {self._new}", DeprecationWarning, stacklevel=2)
        # The import system returns the module that is then in sys.modules.
        sys.modules[old] = import_module(self._new)

    def get_code(self, fullname: str) -> CodeType | None:
        # Only `python -m` calls this.
        loader: Any = spec.loader if (spec := find_spec(self._new)) else None
        code: CodeType | None = loader.get_code(self._new) if hasattr(loader, "get_code") else None
        return code


class _Finder:
    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        # Test the prefix first, which is fast, because every import of every program calls this.
        if not fullname.startswith(_PREFIXES) or (new := new_name(fullname)) is None:
            return None
        # The module does not exist under its new name either.
        if (new_spec := find_spec(new)) is None:
            return None
        is_package = new_spec.submodule_search_locations is not None
        loader: Any = _Moved(new)
        return ModuleSpec(fullname, loader, origin=new_spec.origin, is_package=is_package)


def install() -> None:
    """Allow importing old names. The finder comes first, because others would load a moved package's modules twice."""
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())
