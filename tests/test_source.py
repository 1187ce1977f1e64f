"""Rules about the source itself: what is imported in one place only, and what must not be in the tree."""

import ast
import builtins
import importlib
import re
import subprocess
import sys
import tokenize
from collections.abc import Iterable, Iterator
from dataclasses import fields
from functools import cache
from pathlib import Path

import pytest

from gpulease.protocol.lease_options import LeaseOptions
from gpulease.protocol.operations import SESSION_OPCODES
from helpers.source_files import PARTS, ROOT, SOURCES, TESTS, imports_of, kept_trees, name_of, statements_of, tree_of

# Who may import what is slow to load, needs hardware, or would be a second definition of the wire format.
ONLY_IN: dict[str, str | tuple[str, ...]] = {
    "pycuda": ("daemon/drivers/cuda/", "client/bench/pycuda_peer.py"),
    "cuda": (
        "daemon/drivers/cuda/",
        "client/kernels/cuda_c.py",
        "client/bench/decode_direct.py",
        "client/bench/bindings_peer.py",
    ),
    "llvmlite": "daemon/native/",
    "construct": "protocol/",
    "cryptography": "daemon/remote/pki/",
    # Minting and verifying; a holder's own narrowing.
    "biscuit_auth": ("daemon/capabilities/tokens.py", "client/narrowing.py"),
    # What a gateway alone needs.
    "psycopg": "client/serve/gateway/postgres_store.py",
    "starlette": (
        "client/http/",
        "client/serve/gateway/",
        "client/serve/models/model_server.py",
        "client/decode/openai/",
        "client/decode/page/decode_page.py",
        "daemon/web/",
    ),
    "uvicorn": ("client/http/", "daemon/web/"),
    # Their threads start with the import, and most processes of the daemon fork.
    "grpc": (
        "daemon/fleet/etcd/client.py",
        "daemon/fleet/etcd/etcd_messages.py",
        "client/integrations/kubernetes/kubelet_plugin.py",
        "client/integrations/kubernetes/driver_probe.py",
    ),
    # The cluster's API server: one place knows the client library.
    "lightkube": "client/integrations/kubernetes/cluster.py",
    # Models' files, and their text.
    "gguf": "client/decode/checkpoint/",
    "safetensors": "client/decode/checkpoint/",
    "tokenizers": "client/decode/text/",
    "jinja2": "client/decode/text/",
    "llguidance": "client/decode/text/",
    # The example's weights are made from what it ships; nothing that serves needs it.
    "sklearn": "client/serve/models/example/digits.py",
    # Reports on the wire; messages between the daemon's own processes, and a decode server's; what is kept of images,
    # and of parked sessions.
    "msgpack": (
        "protocol/primitives.py",
        "daemon/host/ipc.py",
        "daemon/ptx/image.py",
        "daemon/contract/session_image.py",
        "daemon/drivers/cuda/context.py",
        "daemon/ptx/parked_memory.py",
        "client/decode/text/text_jobs.py",
    ),
}

# Put together here, so that this file does not hold what it forbids.
UNFINISHED = ("TO" + "DO", "FIX" + "ME", "XX" + "X:", "HA" + "CK:")
NOT_PORTABLE = tuple(
    "".join(parts)
    for parts in (
        ("/wo", "rk/"),
        ("/tmp/", "venv"),
        ("/ro", "ot/"),
        ("/ho", "me/"),
        ("/Us", "ers/"),
        ("pypi", ".org"),
        ("python", "hosted.org"),
        ("test.", "pypi"),
        ("index", "-url"),
        ("nvcr", ".io"),
        ("ghcr", ".io"),
        ("docker", ".io"),
        ("conda", ".anaconda"),
    )
)


@pytest.fixture(scope="module", autouse=True)
def _forget_trees() -> Iterator[None]:
    with kept_trees():
        yield
    for kept in (text_of, modules, names_in, class_files, members_of, comments_of):
        kept.cache_clear()


def committed() -> list[Path]:
    """The text files of the tree: what git knows, or everything where there is no git."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    try:
        listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.splitlines()
        paths = [ROOT / name for name in listed]
    except (OSError, subprocess.CalledProcessError):
        folders = [ROOT / name for name in (*PARTS, "tests", "systemd", "vectors")]
        paths = [path for folder in folders for path in folder.rglob("*") if "__pycache__" not in path.parts]
    return [path for path in paths if path.is_file() and not path.is_symlink() and b"\0" not in path.read_bytes()]


def test_there_is_something_to_check() -> None:
    assert len(SOURCES) > 12


@pytest.mark.parametrize("package", ONLY_IN)
def test_a_package_is_imported_in_one_place(package: str) -> None:
    importers = [name_of(path) for path in SOURCES if package in {name.split(".")[0] for name in imports_of(path)}]
    assert [name for name in importers if not name.startswith(ONLY_IN[package])] == []


def test_nothing_says_to_install_a_published_package() -> None:
    """No package index has a gpulease of ours: what is to be installed is the repository's folder, `.[extra]`."""
    told = re.compile(r"\bgpulease\[|pip install '?gpulease")
    texts = [path for path in committed() if path.suffix in {".py", ".md", ".html", ".js", ".toml", ".service"}]
    tell = [name_of(path) for path in texts if path != Path(__file__) and told.search(path.read_text("utf-8"))]
    # The extra for tests names others of the same package, which pip takes from the folder it installs.
    assert tell == [name for name in ["pyproject.toml"] if (ROOT / name) in texts]


def test_each_program_that_imports_without_garbage_collections_allows_them_afterwards() -> None:
    texts = {name_of(path): path.read_text("utf-8") for path in SOURCES}
    begin = {name for name, text in texts.items() if "    begin_imports()\n" in text}
    assert begin
    assert not {name for name in begin if "    end_imports()\n" not in texts[name]}


def test_each_session_operation_has_a_client_and_each_generator_a_caller() -> None:
    texts = {path: path.read_text("utf-8") for path in SOURCES if name_of(path).startswith("client/")}
    everything = "\n".join(texts.values())
    library = "\n".join(
        text for path, text in texts.items() if name_of(path).startswith(("client/core/", "client/aio/"))
    )
    assert [op.name for op in SESSION_OPCODES if not re.search(rf"\bOpcode\.{op.name}\b", library)] == []
    # An operation's generator that neither API calls is out of reach; that both have it, another test compares.
    generators = {
        method.name
        for path in texts
        if name_of(path).startswith("client/core/")
        for kind in ast.walk(tree_of(path))
        if isinstance(kind, ast.ClassDef)
        for method in kind.body
        if isinstance(method, ast.FunctionDef) and "Procedure" in ast.dump(method.returns or ast.Constant(None))
    }
    assert len(generators) > 50
    assert {name for name in generators if not re.search(rf"\.{name}\b", everything)} == set()


def test_each_setting_is_read_and_each_lease_option_is_obeyed() -> None:
    """A declaration alone is documented, parsed and recorded: only its reader gives it a meaning."""
    texts = {name_of(path): path.read_text("utf-8") for path in SOURCES}
    everything = "\n".join(texts.values())
    settings = {
        item.target.id
        for path in SOURCES
        if "Setting(" in texts[name_of(path)]
        for kind in ast.walk(tree_of(path))
        if isinstance(kind, ast.ClassDef)
        for item in kind.body
        if isinstance(item, ast.AnnAssign) and isinstance(item.target, ast.Name)
        if "Setting(" in ast.unparse(item.annotation)
    }
    assert len(settings) > 100
    assert {name for name in settings if not re.search(rf"\.{name}\b", everything)} == set()
    # The journal's rows and the reports copy every option; neither obeys it.
    copies = ("daemon/record/journal/rows.py", "daemon/broker/reports.py")
    obeying = "\n".join(text for name, text in texts.items() if name.startswith("daemon/") and name not in copies)
    options = {item.name for item in fields(LeaseOptions)}
    assert {name for name in options if not re.search(rf"\.{name}\b", obeying)} == set()


def exports_of(path: Path) -> list[str] | None:
    if "__all__" not in path.read_text(encoding="utf-8"):
        # Most modules: parsing them all takes seconds, and this is asked while tests are collected.
        return None
    for node in tree_of(path).body:
        if isinstance(node, ast.Assign) and any(isinstance(t, ast.Name) and t.id == "__all__" for t in node.targets):
            return [str(name) for name in ast.literal_eval(node.value)]
    return None


PACKAGES = [path for path in SOURCES if path.name == "__init__.py"]


@pytest.mark.parametrize("path", PACKAGES, ids=name_of)
def test_what_a_package_imports_it_exports(path: Path) -> None:
    imported = [
        alias.asname or alias.name
        for node in tree_of(path).body
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("gpulease")
        for alias in node.names
    ]
    exported = exports_of(path)
    if imported or exported is not None:
        assert exported is not None, "a package that imports names lists them in __all__"
        assert sorted(exported) == sorted(set(exported)), "a name is listed twice"
        assert set(imported) <= set(exported)


@pytest.mark.parametrize("path", [path for path in SOURCES if exports_of(path)], ids=name_of)
def test_every_exported_name_exists(path: Path) -> None:
    if name_of(path).startswith(ONLY_IN["pycuda"]):
        pytest.importorskip("pycuda")
    parts = [part for part in path.relative_to(ROOT).with_suffix("").parts if part != "__init__"]
    module = importlib.import_module(".".join(["gpulease", *parts]))
    assert [name for name in exports_of(path) or [] if not hasattr(module, name)] == []


@pytest.mark.parametrize("words", [UNFINISHED, NOT_PORTABLE], ids=["unfinished", "not portable"])
def test_nothing_in_the_tree_says(words: tuple[str, ...]) -> None:
    found = [
        f"{name_of(path)}:{number}: {word}"
        for path in committed()
        for number, line in enumerate(path.read_text(encoding="utf-8", errors="replace").splitlines(), 1)
        for word in words
        if word in line
    ]
    assert found == []


# --- What docstrings and comments name is there. ---

NAMED_FILE = re.compile(r"(?<![\w./*-])[\w./-]*\w\.(?:py|ll)\b(?!\]\()")
NAMED_CODE = re.compile(r"`((?:[A-Za-z_]\w*\.)+\w+|_?[A-Z][A-Z\d]*[a-z]\w*)(?:\(\))?`")
"""A module's or class's name, or two and more names with dots between, alone between backticks."""

CLASS = re.compile(r"^ *class (\w+)", re.MULTILINE)

NAMING = {".cu", ".html", ".js", ".ll", ".md", ".service", ".socket", ".toml", ".yml"}
"""Endings of texts, beside Python's, that name files of the tree."""

MADE_FILES = {"json", "key", "ll", "md", "pem", "py", "weights"}
"""Endings of files: `ca.key` is no member of anything."""

MAX_BASES_DEEP = 4
"""Classes above a class whose members it has, one above the other."""

NOT_OURS = {
    **dict.fromkeys(
        ("atom", "brx", "cp", "cvt", "cvta", "elect", "mad", "match", "max", "mbarrier", "min", "mul"), "PTX"
    ),
    **dict.fromkeys(("redux", "rsqrt", "setp", "shfl", "vote", "wmma"), "PTX"),
    "data": "an audit record's member",
}
"""First words of dotted names that are neither ours nor Python's, and what they are of."""


def missing_files(path: Path, text: str) -> list[str]:
    """The files that a text names and that are not there.

    They are named from a folder that the text's file is in, or behind another of the same folder.
    """
    missing = []
    folders = [folder for folder in path.parents if folder.is_relative_to(ROOT)]
    before: list[Path] = []
    for named in NAMED_FILE.findall(text):
        found = [folder / named for folder in [*before, *folders] if (folder / named).is_file()]
        before = [file.parent for file in found[:1]]
        if not found:
            missing.append(named)
    return missing


def targets_of(node: ast.AST) -> set[str]:
    """Names that a statement defines or assigns to."""
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        return {node.name}
    targets = node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
    return {name.id for target in targets for name in ast.walk(target) if isinstance(name, ast.Name)}


@cache
def text_of(path: Path) -> str:
    return path.read_text(encoding="utf-8")


@cache
def modules() -> dict[str, list[Path]]:
    """The files of each module, by every tail of its dotted name."""
    found: dict[str, list[Path]] = {}
    for path in SOURCES + TESTS:
        parts = path.relative_to(ROOT).with_suffix("").parts
        if path.stem == "__init__":
            parts = parts[:-1]
        for start in range(len(parts)):
            found.setdefault(".".join(parts[start:]), []).append(path)
    return found


@cache
def names_in(path: Path) -> set[str]:
    """The names in a module. A package has what it imports and exports."""
    names = {name for node in tree_of(path).body for name in targets_of(node)}
    if path.stem == "__init__":
        names |= {name.rpartition(".")[2] for name in imports_of(path)} | set(exports_of(path) or ())
    return names


def is_in_module(module: str, name: str) -> bool:
    return any(name in names_in(path) for path in modules().get(module, ()))


@cache
def class_files() -> dict[str, list[Path]]:
    """The files that define each class, found in their texts: to parse all files takes ten times as long."""
    found: dict[str, list[Path]] = {}
    for path in SOURCES + TESTS:
        for name in CLASS.findall(text_of(path)):
            found.setdefault(name, []).append(path)
    return found


@cache
def members_of(name: str, bases_deep: int = MAX_BASES_DEEP) -> set[str]:
    """The members of the classes of that name, those of their bases among them."""
    members: set[str] = set()
    for path in class_files().get(name, ()):
        for node in ast.walk(tree_of(path)):
            if not isinstance(node, ast.ClassDef) or node.name != name:
                continue
            members.update(*(targets_of(member) for member in node.body))
            for inner in ast.walk(node):
                if isinstance(inner, ast.Attribute) and isinstance(inner.value, ast.Name) and inner.value.id == "self":
                    members.add(inner.attr)
            for base in node.bases if bases_deep else ():
                members |= members_of(ast.unparse(base).partition("[")[0].rpartition(".")[2], bases_deep - 1)
    return members


def is_ours(named: str) -> bool:
    """Return whether a module, a class or a variable named for its class has what the dotted name says."""
    named = named.removeprefix("gpulease.")
    *owner, member = named.split(".")
    if not owner:
        if member in class_files():
            return True
        return any(member in text_of(path) and member in names_in(path) for path in SOURCES + TESTS)
    if named in modules() or is_in_module(".".join(owner), member):
        return True
    *package, last = owner
    if package:
        return is_in_module(".".join(package), last) and member in members_of(last)
    alike = (name for name in class_files() if name == last or name.lower().endswith(last))
    return any(member in members_of(name) for name in alike)


def is_of_python(path: Path, named: str) -> bool:
    """Return whether a dotted name is one of Python's, or of a standard module that the file imports."""
    imported = {name.split(".")[0] for name in imports_of(path)} & sys.stdlib_module_names
    first, *rest = named.split(".")
    places: list[object] = [builtins, *map(importlib.import_module, imported)]
    if first in sys.stdlib_module_names:
        places = [importlib.import_module(first)]
    else:
        rest = [first, *rest]
    for place in places:
        for name in rest:
            place = getattr(place, name, None)
        if place is not None:
            return True
    return False


def prose_of(path: Path, naming: re.Pattern[str]) -> Iterator[tuple[int, str]]:
    """Yield a file's strings that are statements, and its comments if any may match `naming`, with their lines."""
    for node in statements_of(tree_of(path)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            yield node.lineno, node.value.value
    # To tell comments from strings takes longer than all else, so look first for a line that may end with such a one.
    if any(naming.search(line.partition("#")[2]) for line in text_of(path).splitlines()):
        yield from comments_of(path)


@cache
def comments_of(path: Path) -> tuple[tuple[int, str], ...]:
    """The comments of a file, with their lines."""
    with path.open("rb") as file:
        tokens = tokenize.tokenize(file.readline)
        return tuple((token.start[0], token.string) for token in tokens if token.type == tokenize.COMMENT)


def test_the_files_that_a_text_names_exist() -> None:
    wrong = []
    for path in committed():
        # Most files name none, and to find the comments of Python takes long.
        if path.suffix not in {*NAMING, ".py"} or not NAMED_FILE.search(text := path.read_text(encoding="utf-8")):
            continue
        lines: Iterable[tuple[int, str]] = enumerate(text.splitlines(), 1)
        if path.suffix == ".py":
            lines = prose_of(path, NAMED_FILE)
        wrong += [f"{name_of(path)}:{line}: {name}" for line, text in lines for name in missing_files(path, text)]
    assert wrong == []


@pytest.mark.exhaustive
def test_what_docstrings_and_comments_name_exists() -> None:
    wrong = [
        f"{name_of(path)}:{line}: {named}"
        for path in SOURCES + TESTS
        if NAMED_CODE.search(text_of(path))
        for line, text in prose_of(path, NAMED_CODE)
        for named in NAMED_CODE.findall(text)
        if named.partition(".")[0] not in NOT_OURS
        and named.rpartition(".")[2] not in MADE_FILES
        and not is_ours(named)
        and not is_of_python(path, named)
    ]
    assert wrong == []
