"""The folders at the top of the repository install as one package, and under no other name."""

import importlib.metadata
import importlib.util
import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import gpulease
from gpulease import client

ROOT = Path(__file__).parents[1]
FOLDERS = ("client", "daemon", "protocol")
FILES = ("__init__.py", "entry_points.py", "imports.py", "interrupts.py", "py.typed")
LINKS = ROOT / ".dev" / "gpulease"


def import_root() -> Path:
    """The folder on sys.path that holds `gpulease`: `.dev`, or site-packages."""
    spec = importlib.util.find_spec("gpulease")
    assert spec is not None
    assert spec.submodule_search_locations is not None
    return Path(next(iter(spec.submodule_search_locations))).parent


@pytest.mark.skipif(not LINKS.exists(), reason="a source distribution has no links")
def test_the_links_mirror_the_folders() -> None:
    targets = {name: f"../../{name}" for name in FOLDERS} | {name: f"../{name}" for name in FILES}
    assert sorted(link.name for link in LINKS.iterdir() if link.name != "__pycache__") == sorted(targets)
    for name, target in targets.items():
        link = LINKS / name
        assert link.is_symlink(), name
        assert os.readlink(link) == target, "absolute links do not travel with the checkout"
        assert link.exists(), name


def test_gpulease_is_a_regular_package() -> None:
    spec = importlib.util.find_spec("gpulease")
    assert spec is not None
    assert spec.origin == str(import_root() / "gpulease" / "__init__.py"), (
        "as a namespace, any folder could be part of it"
    )
    assert (import_root() / "gpulease" / "py.typed").is_file()


@pytest.mark.parametrize("name", ["client", "protocol", "nothing_of_that_name"])
def test_a_submodule_is_there_when_it_is_first_asked_for(name: str) -> None:
    code = f"import gpulease; print([hasattr(gpulease, {name!r}) for _ in range(2)], {name!r} in dir(gpulease))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    is_there = name != "nothing_of_that_name"
    assert done.stdout == f"{[is_there, is_there]} {is_there}\n"


@pytest.mark.parametrize("way", ["a script beside it", "a command in its folder"])
def test_a_folder_of_that_name_does_not_hide_the_package(way: str, tmp_path: Path) -> None:
    clone = tmp_path / "gpulease"
    for part in FOLDERS:
        (clone / part).mkdir(parents=True)
        (clone / part / "__init__.py").write_text("raise RuntimeError('the clone was imported')")
    code = "import gpulease.protocol; print(gpulease.GpuBuilder.__name__, list(gpulease.__path__))"
    (tmp_path / "program.py").write_text(code)
    words = ["program.py"] if way == "a script beside it" else ["-c", code]
    done = subprocess.run(
        [sys.executable, *words],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(import_root())},
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert done.stdout == f"GpuBuilder ['{import_root() / 'gpulease'}']\n"


def test_the_package_has_the_clients_names() -> None:
    assert gpulease.GpuBuilder is client.GpuBuilder
    for name in client.__all__:
        assert getattr(gpulease, name) is getattr(client, name)
    assert {*client.__all__, "__version__"} <= set(dir(gpulease))
    imported: dict[str, object] = {}
    exec("from gpulease import *", imported)
    assert imported.keys() >= set(client.__all__)
    for name in ("GpuBuidler", "_nothing", "__wrapped__"):
        with pytest.raises(AttributeError, match=name):
            getattr(gpulease, name)


def test_the_package_tells_its_version() -> None:
    try:
        installed = importlib.metadata.version("gpulease")
    except importlib.metadata.PackageNotFoundError:
        pytest.skip("run from a checkout that was not installed")
    assert gpulease.__version__ == installed


def test_the_license_is_shipped() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    (name,) = project["license-files"]
    text = (ROOT / name).read_text()
    assert text.startswith(f"{project['license']} License\n")
    assert "The gpulease authors" in text


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
        "print([n for n in sys.modules if n.startswith(('gpulease.client', 'gpulease.daemon', 'importlib.metadata'))])"
    )
    command = [sys.executable, "-c", code, str(import_root())]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True, cwd=ROOT / "tests")
    assert done.stdout.strip() == "[]"


def test_the_decode_engine_is_imported_without_its_extra() -> None:
    code = (
        "import sys; sys.path.insert(0, sys.argv[1]);"
        "sys.modules.update(dict.fromkeys(['gguf', 'safetensors', 'tokenizers', 'jinja2', 'triton', 'jax']));"
        "import gpulease.client.decode as decode; print(len([getattr(decode, name) for name in decode.__all__]))"
    )
    command = [sys.executable, "-c", code, str(import_root())]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    assert int(done.stdout) > 20
