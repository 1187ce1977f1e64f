"""Whether the decode engine's packaged kernels are what their source compiles to, and for what that has been seen.

    PYTHONPATH=.dev:tests python -m helpers.decode.built_kernels

compiles all kernels with Triton, which takes two minutes, compares them with the files, and notes the digest of what it
has compared. As long as neither source nor files change, tests compile a few kernels instead of all.
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

FEW: Final = 12
"""One of so many kernels is compiled by each run: a change of how all of them are compiled shows in any."""


def builder() -> ModuleType:
    """The module that compiles the kernels. Importing it imports Triton."""
    return importlib.import_module("gpulease.client.decode.kernels.build")


def told() -> dict[str, Any]:
    """The packaged manifest."""
    found: dict[str, Any] = json.loads((FOLDER / "manifest.json").read_text())
    return found


def digest(jobs: dict[str, Any]) -> str:
    """A digest of all that makes the kernels, but for the code that passes it to Triton, and of the files.

    It is the same where comments and docstrings of the source change.
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
    """Those of some kernels that are not what their source compiles to now."""
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
