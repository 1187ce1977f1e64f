"""The table of rooms holds: who imports whom, which rooms are pure, and what a newcomer reads."""

import ast
import re
from collections.abc import Iterator
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

from helpers.layers import ARCHITECTURE, DOORS, HALL, ROOMS, SHARED, TOOL, WING, WINGS, Room, room_of, with_drawing
from helpers.source_files import PARTS, ROOT, SOURCES, TESTS, imports_of, kept_trees, name_of, tree_of

# protocol imports nothing of ours; client and daemon know protocol and not each other. `imports` and `interrupts` are
# files of the package itself, which must be imported before anything slow, and so before protocol.
MAY_IMPORT = {
    "protocol": {"protocol"},
    "client": {"client", "protocol", "imports", "interrupts"},
    "daemon": {"daemon", "protocol", "imports", "interrupts"},
}

NOT_PURE = frozenset(
    {
        "asyncio",
        "concurrent",
        "ctypes",
        "datetime",
        "fcntl",
        "http.client",
        "io",
        "mmap",
        "multiprocessing",
        "os",
        "pathlib",
        "random",
        "secrets",
        "select",
        "selectors",
        "shutil",
        "signal",
        "socket",
        "ssl",
        "subprocess",
        "tempfile",
        "threading",
        "time",
        "urllib.request",
        "uuid",
    }
)
"""Modules that read a clock, do I/O or draw random numbers."""

NOT_PURE_CALLS = frozenset({"breakpoint", "input", "open", "print"})

BY_NAME = {room.name: room for room in ROOMS}
FILES = {name_of(path) for path in SOURCES}


def file_of(module: str) -> str | None:
    """Return the file of a module of ours, or of the module that has the name."""
    path = "/".join(module.removeprefix("gpulease.").split("."))
    while path:
        for file in (f"{path}.py", f"{path}/__init__.py"):
            if file in FILES:
                return file
        path = path.rpartition("/")[0]
    return None


@pytest.fixture(scope="module", autouse=True)
def _forget_trees() -> Iterator[None]:
    with kept_trees():
        yield


@cache
def arrows() -> list[tuple[str, Room]]:
    """Return each import of another room: the file, and that room.

    Not at import: every process of a run imports this file, and to read all sources takes seconds.
    """
    return sorted(set(_arrows()), key=lambda arrow: (arrow[0], arrow[1].name))


def _arrows() -> Iterator[tuple[str, Room]]:
    for path in SOURCES:
        here = room_of(name_of(path))
        for module in imports_of(path):
            target = file_of(module) if module.startswith("gpulease.") else None
            if target is not None and (there := room_of(target)) != here:
                yield name_of(path), there


@pytest.mark.parametrize("part", PARTS)
def test_parts_import_the_protocol_and_not_each_other(part: str) -> None:
    for path in SOURCES:
        if not name_of(path).startswith(f"{part}/"):
            continue
        ours = {name.split(".")[1] for name in imports_of(path) if name.startswith("gpulease.")}
        assert ours <= MAY_IMPORT[part], f"{name_of(path)} imports {ours - MAY_IMPORT[part]}"
        assert not {name.split(".")[0] for name in imports_of(path)} & set(PARTS), f"{name_of(path)}: say gpulease.NAME"


def test_a_room_imports_what_its_row_says() -> None:
    wrong = [
        f"{file} imports {room.name}"
        for file, room in arrows()
        if room.name not in {*room_of(file).imports, *DOORS.get(file, ()), "protocol"}
    ]
    assert wrong == []


def test_a_row_says_what_its_room_imports() -> None:
    used = {(room_of(file).name, room.name) for file, room in arrows() if room.name not in DOORS.get(file, ())}
    unused = [f"{room.name}: {other}" for room in ROOMS for other in room.imports if (room.name, other) not in used]
    through = {(file, room.name) for file, room in arrows()}
    unused += [f"{file}: {room}" for file, rooms in DOORS.items() for room in rooms if (file, room) not in through]
    assert unused == []


def test_rooms_stand_above_what_they_import() -> None:
    order = list(BY_NAME)
    assert len(order) == len(ROOMS)
    wrong = [
        f"{room.name}: {other}"
        for room in ROOMS
        for other in room.imports
        if order.index(other) <= order.index(room.name)
    ]
    wrong += [
        f"{file}: {room}" for file, rooms in DOORS.items() for room in rooms if _can_reach(room, room_of(file).name)
    ]
    assert wrong == []


def _can_reach(start: str, goal: str) -> bool:
    """Return whether a room imports another one, by others or by doors."""
    seen, todo = set(), [start]
    while todo:
        name = todo.pop()
        if name == goal:
            return True
        if name not in seen:
            seen.add(name)
            todo += BY_NAME[name].imports
            todo += [room for file, rooms in DOORS.items() if room_of(file).name == name for room in rooms]
    return False


ALLOWED = {HALL: {HALL}, SHARED: {HALL, SHARED}, WING: {HALL, SHARED, WING}, TOOL: {HALL, SHARED, WING, TOOL}}


def test_the_hall_knows_no_wing_and_no_wing_knows_another() -> None:
    for room in ROOMS:
        for other in (BY_NAME[name] for name in room.imports):
            assert other.kind in ALLOWED[room.kind], f"{room.name}, {room.kind}: {other.name}, {other.kind}"
            assert not room.kind == other.kind == WING or room.wing == other.wing, f"{room.name}: {other.name}"
    assert {room_of(file).kind for file in DOORS} == {HALL}
    assert [room.name for room in ROOMS if "client/cli" in room.imports] == []


def test_a_pure_room_reads_no_clock_does_no_io_and_draws_no_random_numbers() -> None:
    wrong = []
    for path in (path for path in SOURCES if room_of(name_of(path)).is_pure):
        parts = [name.split(".") for name in imports_of(path)]
        found = {".".join(name[:count]) for name in parts for count in (1, 2)} & NOT_PURE
        calls = (node.func for node in ast.walk(tree_of(path)) if isinstance(node, ast.Call))
        found |= {call.id for call in calls if isinstance(call, ast.Name)} & NOT_PURE_CALLS
        wrong += [f"{name_of(path)}: {', '.join(sorted(found))}"] if found else []
    assert wrong == []


def test_helpers_of_tests_import_no_tests() -> None:
    wrong = [
        f"{name_of(path)} imports {module}"
        for path in TESTS
        if name_of(path).startswith(("tests/helpers/", "tests/lab/")) and not path.name.startswith("test_")
        for module in imports_of(path)
        if any(part.startswith("test_") for part in module.split(".")[:-1])
    ]
    assert wrong == []


def test_every_room_has_files() -> None:
    assert {room_of(file).name for file in FILES} == set(BY_NAME)


def test_the_architecture_draws_the_table() -> None:
    text = ARCHITECTURE.read_text(encoding="utf-8")
    assert with_drawing(text) == text, "write it: PYTHONPATH=.dev python -m tests.helpers.layers"


# --- What a newcomer reads. ---

MOST_FILES, MOST_LINES = 14, 6000
"""Of the hall: what one reads in a day."""

MOST_FILES_OF_A_WING = 5


def reading_list(document: Path) -> list[Path]:
    """Return the files that a document's section "Order of reading" names, from the root or from its folder."""
    text = document.read_text(encoding="utf-8").partition("\n## Order of reading\n")[2].partition("\n## ")[0]
    names = re.findall(r"`([\w/]+\.\w+)`", text)
    return [next(path for path in (ROOT / name, document.parent / name) if path.is_file()) for name in names]


def test_the_reading_list_of_the_hall_is_short() -> None:
    listed = reading_list(ARCHITECTURE)
    assert len(listed) == len(set(listed)) == MOST_FILES
    assert sum(len(path.read_text(encoding="utf-8").splitlines()) for path in listed) <= MOST_LINES
    assert {room_of(name_of(path)).kind for path in listed} == {HALL}


@pytest.mark.parametrize("wing", WINGS)
def test_a_wing_has_a_page_and_a_reading_list(wing: str) -> None:
    listed = reading_list(ROOT / wing / "README.md")
    assert len(set(listed)) == MOST_FILES_OF_A_WING
    assert {room_of(name_of(path)).wing for path in listed} == {wing}


def test_no_circle_of_files_those_for_types_and_in_functions_included() -> None:
    """What two files name in each other's annotations stands in a file below both."""
    files = {name_of(path): {file_of(one) for one in imports_of(path)} - {None, name_of(path)} for path in SOURCES}
    try:
        TopologicalSorter(files).prepare()
    except CycleError as error:
        raise AssertionError(f"files that import each other: {' -> '.join(error.args[1])}") from None
