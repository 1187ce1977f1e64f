"""Where compiled code is kept between processes, and under which names.

What is kept is native code that a worker will run, so a directory or file that another user owns or could change is
passed over, as is one that is damaged (keeping.py). The key is a hash of all that decides what the code is: the text it
was made from, the sources of what made it, LLVM and the processor. Whoever loads the same image gets the same code,
whosever it was first.

What a worker writes there another one runs, so whoever breaks out of one could plant code for the others: workers keep
code only where the operator has named a directory, and in a part of it that the daemon itself never reads.
"""

import hashlib
import os
from functools import cache
from importlib.resources import files
from importlib.resources.abc import Traversable
from pathlib import Path
from types import ModuleType

from gpulease.daemon import native
from gpulease.daemon.native.compiler import NativeCode, emit_object, load_object, target_identity
from gpulease.daemon.native.private_folder import PrivateFolder, open_for

# The directory; an operator's setting. Set to nothing: none.
DIRECTORY_VARIABLE = "GPULEASE_CPU_CACHE"

# In it, with the number of their user: what workers keep for each other.
WORKERS_FOLDER = "workers"

_for_workers: list[PrivateFolder | None] = []


def key_of(kind: bytes, content: bytes, maker: ModuleType) -> bytes:
    """The key for what a package makes from some content."""
    return hashlib.sha256(kind + b"\0" + _identity(maker) + content).digest()


def read_kept(key: bytes) -> bytes | None:
    """What is kept for a key, or None."""
    keeper = _current()
    return None if keeper is None else keeper.read(key)


def keep(key: bytes, data: bytes) -> None:
    """Keep something for the next process, if there is a place."""
    keeper = _current()
    if keeper is not None:
        keeper.write(key, data)


def keep_for_workers(owner: int) -> int | None:
    """From now on, and in forks, use only what workers keep; the descriptor of its directory, which is `owner`'s.

    None if they keep nothing: the operator named no directory, or it can't be made.
    """
    folder = None
    if os.environ.get(DIRECTORY_VARIABLE):
        folder = open_for(owner, Path(os.environ[DIRECTORY_VARIABLE]) / f"{WORKERS_FOLDER}-{owner}")
    _for_workers[:] = [None if folder is None else PrivateFolder(folder)]
    return folder


def load_ir(text: str) -> NativeCode:
    """The code of the daemon's own IR, compiled now or before. Raises BadIr."""
    key = key_of(b"ir", text.encode(), native)
    data = read_kept(key)
    if data is None:
        data = emit_object(text)
        keep(key, data)
    return load_object(data)


@cache
def _identity(maker: ModuleType) -> bytes:
    """A hash of what turns content into code: the maker's sources and this package's, LLVM and the processor."""
    digest = hashlib.sha256(target_identity().encode())
    for package in (native, maker):
        for name, data in sorted(_sources(files(package), "")):
            digest.update(f"\0{name}\0{len(data)}\0".encode() + data)
    return digest.digest()


def _sources(folder: Traversable, path: str) -> list[tuple[str, bytes]]:
    found: list[tuple[str, bytes]] = []
    for entry in folder.iterdir():
        name = f"{path}/{entry.name}"
        if entry.is_dir():
            found += _sources(entry, name)
        elif entry.name.endswith((".py", ".ll")):
            found.append((name, entry.read_bytes()))
    return found


def _current() -> PrivateFolder | None:
    if _for_workers:
        return _for_workers[0]
    directory = _directory()
    return None if directory is None else _keeper(directory)


@cache
def _keeper(directory: Path) -> PrivateFolder:
    return PrivateFolder(directory)


def _directory() -> Path | None:
    named = os.environ.get(DIRECTORY_VARIABLE)
    if named is not None:
        return Path(named) if named else None
    above = os.environ.get("XDG_CACHE_HOME", "")
    if os.path.isabs(above):
        return Path(above) / "gpulease" / "cpu"
    try:
        return Path.home() / ".cache" / "gpulease" / "cpu"
    except RuntimeError:
        # A user without a home.
        return None
