"""The daemon's version, as it introduces itself.

Which code runs here: builds of one version differ, and so does a build beside other versions of what it needs.
"""

import os
import sys
import sysconfig
from collections.abc import Iterable
from glob import glob
from hashlib import blake2b
from pathlib import Path
from typing import Final

import gpulease

VERSION = gpulease.__version__
AGENT = f"gpuleased/{VERSION}"


DIGEST_BYTES: Final = 16


def build_of(sources: Iterable[Path], installed: Iterable[Path]) -> str:
    """A name for what can be imported, which differs where any of it does.

    Args:
        sources: Folders, of whose Python files every byte counts.
        installed: Folders of distributions, whose names and versions count. They stand in the names of their metadata's
            folders (the core metadata specifications, "Recording installed projects").
    """
    digest = blake2b(sys.version.encode(), digest_size=DIGEST_BYTES)
    for folder in sources:
        for path in sorted(glob("**/*.py", root_dir=folder, recursive=True)):
            content = (folder / path).read_bytes()
            digest.update(f"\0{path}\0{len(content)}\0".encode())
            digest.update(content)
    for folder in sorted(set(installed)):
        digest.update("\0".join(sorted(path.name for path in folder.glob("*.dist-info"))).encode())
    return digest.hexdigest()


def _own() -> str:
    package = Path(__file__).parents[1]
    libraries = (Path(sysconfig.get_path(name)) for name in ("purelib", "platlib"))
    try:
        return build_of((package, package.parent / "protocol"), libraries)
    except OSError:
        # Files that change just now, or can't be read: no other process has the same.
        return os.urandom(DIGEST_BYTES).hex()


BUILD: Final = _own()
"""This process's, from when it imported this module."""
