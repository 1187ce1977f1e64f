"""Compiles the decode engine's kernels, checks that the packaged files are the same, and records this.

    PYTHONPATH=.dev:tests python -m helpers.decode.built_kernels

This compiles all kernels with Triton, which takes two minutes, and compares them with the packaged files. It then
stores a digest of the source and the files. As long as neither changes, tests compile only some of the kernels.
"""

import ast
import hashlib
import importlib
import json
from collections.abc import Iterable
from pathlib import Path
from types import ModuleType
from typing import Any, Final

import gpulease.client.decode.kernels as kernels

FOLDER: Final = Path(kernels.__path__[0])
COMPARED: Final = Path(__file__).parents[2] / "client" / "decode" / "kernels" / "compared.sha256"

SOURCES: Final = ("triton_source.py", "gluon_source.py")

FEW: Final = 36
"""Each test run compiles one in this many kernels, enough to notice a change in how kernels are compiled."""


def builder() -> ModuleType:
    """Return the module that compiles the kernels. The call imports Triton."""
    return importlib.import_module("gpulease.client.decode.kernels.build")


def told() -> dict[str, Any]:
    """Return the packaged manifest."""
    found: dict[str, Any] = json.loads((FOLDER / "manifest.json").read_text())
    return found


def digest(jobs: dict[str, Any]) -> str:
    """Return a digest of the packaged files, the source and each kernel's parameters.

    The digest does not cover the code that calls Triton. Comments and docstrings of the source do not change it.
    """
    parts = []
    for name in SOURCES:
        tree = ast.parse((FOLDER / name).read_text())
        for node in ast.walk(tree):
            if isinstance(node, (ast.Module, ast.FunctionDef)) and ast.get_docstring(node) is not None:
                node.body = node.body[1:]
        parts.append(ast.unparse(tree))
    for name, job in sorted(jobs.items()):
        options = (job.types, job.constants, job.warps, job.stages, job.divisible, job.target, job.registers)
        parts.append(f"{name} {job.function.fn.__name__} {options}")
    texts = [path.read_text() for path in sorted(FOLDER.iterdir()) if path.suffix in {".ptx", ".json"}]
    return hashlib.sha256("\0".join([*parts, *texts]).encode()).hexdigest()


def differing(build: ModuleType, names: Iterable[str]) -> list[str]:
    """Return the names of the kernels whose source now compiles to other files than the packaged ones."""
    jobs, entries = build.jobs(), told()["kernels"]
    found = []
    for name in names:
        ptx, entry = build.compiled(name, jobs[name])
        if (ptx, json.loads(json.dumps(entry))) != ((FOLDER / f"{name}.ptx").read_text(), entries[name]):
            found.append(name)
    return found


def main() -> None:
    build = builder()
    jobs = build.jobs()
    if wrong := differing(build, jobs):
        raise SystemExit(f"not what their source compiles to: {', '.join(wrong)}")
    COMPARED.write_text(digest(jobs) + "\n")


if __name__ == "__main__":
    main()
