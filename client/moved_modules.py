"""Old names of modules that have moved: importable until the next release, each with a DeprecationWarning.

A module imported by its old name is the same object as by its new one, so classes and exceptions are, too. `python -m`
takes old names as well: during an upgrade, a program of the version before starts helpers by them.
"""

import sys
import warnings
from collections.abc import Sequence
from importlib import import_module
from importlib.abc import InspectLoader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import CodeType, ModuleType
from typing import Final

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
"""Modules of the decode engine that stood in its one folder, by the room where they are now."""

MOVED: Final = {
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
"""Modules and packages by their old names. A package stands for all in it that has no row of its own."""

_PREFIXES: Final = ("gpulease.client.engine", "gpulease.client.serve.")


def new_name(old: str) -> str | None:
    """Return the name that a module has now; None if it has not moved."""
    package, suffix = old, ""
    # The longest old name that has a row wins; what follows it is kept.
    while package:
        if package in MOVED:
            return MOVED[package] + suffix
        package, _, last = package.rpartition(".")
        suffix = f".{last}{suffix}"
    return None


class _Moved(InspectLoader):
    """Loads a module by its old name: as what its new name has."""

    def __init__(self, new: str) -> None:
        self._new = new

    # None: the module is made by the usual means.
    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return None

    def exec_module(self, module: ModuleType) -> None:
        old = module.__name__
        warnings.warn(f"{old} has moved: import {self._new}", DeprecationWarning, stacklevel=2)
        # The import system returns what stands there afterwards.
        sys.modules[old] = import_module(self._new)

    def get_code(self, fullname: str) -> CodeType | None:
        # Only `python -m` asks.
        spec = find_spec(self._new)
        return spec.loader.get_code(self._new) if spec and isinstance(spec.loader, InspectLoader) else None

    def get_source(self, fullname: str) -> str | None:
        return None


class _Finder(MetaPathFinder):
    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        # Cheap first: every import of every program passes here.
        if not fullname.startswith(_PREFIXES) or (new := new_name(fullname)) is None:
            return None
        # The old name was of a part that is gone in both places.
        if (new_spec := find_spec(new)) is None:
            return None
        is_package = new_spec.submodule_search_locations is not None
        return ModuleSpec(fullname, _Moved(new), origin=new_spec.origin, is_package=is_package)


def install() -> None:
    """Have old names imported. First of all finders: the others would load modules of a moved package a second time."""
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())
