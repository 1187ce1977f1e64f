"""The product's source files, and what each imports."""

import ast
import gc
from collections.abc import Iterator
from contextlib import contextmanager
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


@contextmanager
def kept_trees() -> Iterator[None]:
    """Let a module's tests keep the trees of all files, without garbage collections, which would walk the trees.

    There are a few million nodes. While they are made, collections take three times as long as the parser.
    """
    gc.disable()
    try:
        yield
    finally:
        for kept in (tree_of, imports_of):
            kept.cache_clear()
        gc.enable()


def statements_of(tree: ast.Module) -> Iterator[ast.stmt]:
    """Yield all statements of a file. Walking their expressions as well takes ten times as long."""
    containers: list[ast.AST] = [tree]
    while containers:
        container = containers.pop()
        for name in ("body", "orelse", "finalbody", "handlers", "cases"):
            parts = getattr(container, name, ())
            # Lambdas and conditional expressions also have parts with these names.
            for part in parts if isinstance(parts, list) else ():
                containers.append(part)
                if isinstance(part, ast.stmt):
                    yield part


@cache
def imports_of(path: Path) -> tuple[str, ...]:
    """Return the full name of every module that a file imports, at its top or inside a function."""
    return tuple(_imports_of(path))


def _imports_of(path: Path) -> Iterator[str]:
    package = ("gpulease", *path.relative_to(ROOT).with_suffix("").parts)
    for node in statements_of(tree_of(path)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            start = ".".join(package[: -node.level]) + "." if node.level else ""
            for alias in node.names:
                yield f"{start}{node.module or ''}.{alias.name}".replace("..", ".")
