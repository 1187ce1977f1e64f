"""The product's source files, and what each imports."""

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2]
PARTS = ("client", "daemon", "protocol")

SOURCES = sorted(path for part in PARTS for path in (ROOT / part).rglob("*.py"))
TESTS = sorted((ROOT / "tests").rglob("*.py"))


def name_of(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


@cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"), name_of(path))


@cache
def imports_of(path: Path) -> tuple[str, ...]:
    """Return the full name of every module that a file imports, at its top or inside a function."""
    return tuple(_imports_of(path))


def _imports_of(path: Path) -> Iterator[str]:
    package = ("gpulease", *path.relative_to(ROOT).with_suffix("").parts)
    for node in ast.walk(tree_of(path)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            start = ".".join(package[: -node.level]) + "." if node.level else ""
            for alias in node.names:
                yield f"{start}{node.module or ''}.{alias.name}".replace("..", ".")
