"""Old names of modules that have moved: each is the module of its new name, and warns."""

import subprocess
import sys
import warnings
from importlib import import_module

import pytest

from gpulease.client.moved_modules import MOVED, new_name


@pytest.fixture(autouse=True)
def _old_names_are_imported_for_the_first_time(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if new_name(name) is not None]:
        monkeypatch.delitem(sys.modules, name)


@pytest.mark.parametrize("old", MOVED)
def test_an_old_name_is_the_module_of_its_new_name(old: str) -> None:
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        assert import_module(old) is import_module(MOVED[old])
    # Its package's old name comes first.
    assert str(warned[-1].message) == f"{old} has moved: import {MOVED[old]}"


def test_programs_of_the_version_before_import_what_they_know() -> None:
    program = (
        "import warnings; warnings.simplefilter('ignore');"
        "from gpulease.client.serve.decode import Decoder, checkpoint;"
        "from gpulease.client.serve.decode.checkpoint.tensors import Tensor;"
        "from gpulease.client.serve.decode.scheduler import SchedulerSettings;"
        "import gpulease.client.engine.lease as lease, gpulease.client.decode as new, gpulease.client.core.lease;"
        "print(Decoder is new.Decoder, lease is gpulease.client.core.lease, checkpoint.__name__, Tensor.__module__)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=60)
    names = "gpulease.client.decode.checkpoint gpulease.client.decode.checkpoint.tensors"
    assert done.stdout == f"True True {names}\n"


def test_a_warning_names_the_line_that_imports() -> None:
    program = "import gpulease.client.engine"
    done = subprocess.run(
        [sys.executable, "-W", "default", "-c", program], capture_output=True, text=True, check=True, timeout=60
    )
    assert "<string>:1: DeprecationWarning: gpulease.client.engine has moved" in done.stderr


def test_python_runs_a_package_by_its_old_name() -> None:
    command = [sys.executable, "-P", "-m", "gpulease.client.serve.slurm", "--help"]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.startswith("Usage:")


def test_python_runs_a_module_by_its_old_name() -> None:
    """A decode server that began before an upgrade starts the processes that read texts by it."""
    program = "import runpy; print(runpy.run_module('gpulease.client.serve.decode.text.text_fork_server')['__file__'])"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.endswith("client/decode/text/text_fork_server.py\n")


@pytest.mark.filterwarnings("ignore:gpulease.client.serve.decode has moved")
def test_what_has_not_moved_is_not_found_by_an_old_name() -> None:
    assert new_name("gpulease.client.serve.gateway") is None
    with pytest.raises(ModuleNotFoundError, match=r"gpulease\.client\.serve\.decode\.nothing"):
        import_module("gpulease.client.serve.decode.nothing")
