"""The folders at the top of the repository install as one namespace package, and under no other name."""

import importlib.metadata
import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FOLDERS = ("client", "daemon", "protocol")
LINKS = ROOT / ".dev" / "gpulease"


def import_root() -> Path:
    """The folder on sys.path that holds `gpulease`: `.dev`, or site-packages."""
    spec = importlib.util.find_spec("gpulease")
    assert spec is not None
    assert spec.submodule_search_locations is not None
    return Path(next(iter(spec.submodule_search_locations))).parent


@pytest.mark.skipif(not LINKS.exists(), reason="a source distribution has no links")
def test_the_links_mirror_the_folders() -> None:
    assert sorted(link.name for link in LINKS.iterdir()) == sorted(FOLDERS)
    for name in FOLDERS:
        link = LINKS / name
        assert link.is_symlink(), name
        assert os.readlink(link) == f"../../{name}", "absolute links do not travel with the checkout"
        assert link.resolve() == ROOT / name


def test_gpulease_is_a_namespace_package() -> None:
    spec = importlib.util.find_spec("gpulease")
    assert spec is not None
    assert spec.origin is None, "an __init__ would shadow the other parts of the namespace"
    assert not list((import_root() / "gpulease").glob("__init__.*"))


@pytest.mark.parametrize("name", FOLDERS)
def test_a_part_is_typed(name: str) -> None:
    assert (ROOT / name / "py.typed").is_file()
    assert (import_root() / "gpulease" / name / "py.typed").is_file()


def test_the_folders_have_no_name_of_their_own() -> None:
    """What `pip install` puts on sys.path must not make a generic `import client` work."""
    code = (
        "import sys, importlib.util; sys.path.insert(0, sys.argv[1]);"
        f"print([n for n in {FOLDERS} if importlib.util.find_spec(n)], bool(importlib.util.find_spec('gpulease')))"
    )
    command = [sys.executable, "-I", "-c", code, str(import_root())]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.split() == ["[]", "True"]


def test_the_installed_distribution_holds_nothing_generic() -> None:
    try:
        files = importlib.metadata.files("gpulease") or []
    except importlib.metadata.PackageNotFoundError:
        pytest.skip("gpulease is run from the tree, not installed")
    tops = {Path(file).parts[0] for file in files}
    allowed = ("gpulease", "..", "__editable__")
    assert not [top for top in tops if not top.startswith(allowed) and not top.endswith((".dist-info", ".pth"))]


def test_the_protocol_needs_nothing_of_the_other_parts() -> None:
    code = (
        "import sys; sys.path.insert(0, sys.argv[1]); import gpulease.protocol;"
        "print([n for n in sys.modules if n.startswith(('gpulease.client', 'gpulease.daemon'))])"
    )
    command = [sys.executable, "-c", code, str(import_root())]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True, cwd=ROOT / "tests")
    assert done.stdout.strip() == "[]"
