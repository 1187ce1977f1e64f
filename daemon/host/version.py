"""The daemon's version, and its build: a digest of the code that runs here.

One version can have several builds. Installations of the same code with different libraries are different builds, too.
"""

import os
import sys
import sysconfig
from collections.abc import Iterable
from functools import cache
from glob import glob
from hashlib import blake2b
from pathlib import Path
from typing import Final

import gpulease

VERSION: Final = gpulease.__version__
AGENT: Final = f"gpuleased/{VERSION}"

DIGEST_BYTES: Final = 16


def build_of(sources: Iterable[Path], installed: Iterable[Path]) -> str:
    """Return a digest of the code that can be imported.

    Args:
        sources: Folders; every byte of their Python files counts.
        installed: Folders of installed distributions. Only names and versions count, which are the names of the
            metadata folders (the core metadata specifications, "Recording installed projects").
    """
    digest = blake2b(sys.version.encode(), digest_size=DIGEST_BYTES)
    for folder in sources:
        for path in sorted(glob("**/*.py", root_dir=folder, recursive=True)):
            # Create no Path for each file: that takes longer than reading the files.
            with open(f"{folder}/{path}", "rb", buffering=0) as file:
                content = file.read()
            # The path and the length separate the files, so that moving text from one file to the next changes the
            # digest.
            digest.update(f"\0{path}\0{len(content)}\0".encode())
            digest.update(content)
    for folder in sorted(set(installed)):
        digest.update("\0".join(sorted(path.name for path in folder.glob("*.dist-info"))).encode())
    return digest.hexdigest()


@cache
def own_build() -> str:
    """Return the build of this process.

    Call this first when the process starts: later, the files may be newer than the code that runs. Only processes that
    may talk to processes of another daemon need it. It takes about 15 ms.
    """
    package = Path(__file__).parents[1]
    libraries = (Path(sysconfig.get_path(name)) for name in ("purelib", "platlib"))
    try:
        return build_of((package, package.parent / "protocol"), libraries)
    except OSError:
        # Files can't be read, or change at this moment: no other process has the same build.
        return os.urandom(DIGEST_BYTES).hex()
