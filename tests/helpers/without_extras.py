"""An environment in which gpulease is installed without extras."""

import importlib.util
import os
from pathlib import Path

from helpers.daemon import python_environment

BASE = ("gpulease", "click", "construct", "msgpack", "numpy")
"""The packages that a bare `pip install .` installs, by import name. `gpulease` may also be in site-packages."""

_SITE = """
import sys
sys.path[:] = [place for place in sys.path if "-packages" not in place] + [{links!r}]
"""


def environment_without_extras(folder: Path) -> dict[str, str]:
    """Return an environment whose Python finds only gpulease and its required packages. `folder` must be empty."""
    links = folder / "links"
    links.mkdir()
    for name in BASE:
        found = importlib.util.find_spec(name)
        assert found is not None
        assert found.origin is not None
        package = Path(found.origin).parent
        # A wheel of numpy has its shared libraries in a folder next to the package.
        for part in (package, package.with_name(f"{name}.libs")):
            if part.exists():
                (links / part.name).symlink_to(part)
    (folder / "sitecustomize.py").write_text(_SITE.format(links=str(links)))
    environment = python_environment()
    return environment | {"PYTHONPATH": os.pathsep.join([str(folder), environment["PYTHONPATH"]])}
