"""The disk cache of compiled code, which processes share.

A worker runs the native code that it finds there. So the cache ignores a directory or file that another user owns or
could change, and a damaged one (private_folder.py). The key is a hash of everything that determines the code: the text
from which it was compiled, the compiler's sources, LLVM and the processor. Two tenants that load the same image get the
same code.

One worker runs what another wrote, so a tenant that breaks out of its worker could plant code for other tenants.
Therefore workers cache code only if the operator has named a directory, in a part of it that the daemon itself never
reads.
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

# The operator's setting for the cache directory. An empty value means no cache.
DIRECTORY_VARIABLE = "GPULEASE_CPU_CACHE"

# The workers' folder in that directory; their user's number follows the name.
WORKERS_FOLDER = "workers"

# The workers' folder, once `keep_for_workers` has run; inherited by forks.
_for_workers: list[PrivateFolder | None] = []


def key_of(kind: bytes, content: bytes, maker: ModuleType) -> bytes:
    """Return the cache key for the code that the package `maker` compiles from this content."""
    return hashlib.sha256(kind + b"\0" + _identity(maker) + content).digest()


def read_kept(key: bytes) -> bytes | None:
    """Return the cached data of a key, or None."""
    folder = _current_folder()
    return None if folder is None else folder.read(key)


def keep(key: bytes, data: bytes) -> None:
    """Cache data for the next process, if this one has a cache."""
    folder = _current_folder()
    if folder is not None:
        folder.write(key, data)


def keep_for_workers(owner: int) -> int | None:
    """From now on, use only the workers' cache, in forks, too.

    Returns the descriptor of its directory, which `owner` owns; None if workers have no cache: the operator named no
    directory, or creating it failed.
    """
    folder = None
    # The folder is shared only with the operator's setting: see the module's docstring.
    if os.environ.get(DIRECTORY_VARIABLE):
        folder = open_for(owner, Path(os.environ[DIRECTORY_VARIABLE]) / f"{WORKERS_FOLDER}-{owner}")
    _for_workers[:] = [None if folder is None else PrivateFolder(folder)]
    return folder


def load_ir(text: str) -> NativeCode:
    """Return the daemon's own IR as code, compiled now or taken from the cache. Raises BadIr."""
    key = key_of(b"ir", text.encode(), native)
    data = read_kept(key)
    if data is None:
        data = emit_object(text)
        keep(key, data)
    return load_object(data)


@cache
def _identity(maker: ModuleType) -> bytes:
    """Return a hash of the sources of `maker` and this package, of LLVM's version and of the processor."""
    digest = hashlib.sha256(target_identity().encode())
    for package in (native, maker):
        for name, data in sorted(_sources(files(package), "")):
            digest.update(f"\0{name}\0{len(data)}\0".encode() + data)
    return digest.digest()


def _sources(folder: Traversable, path: str) -> list[tuple[str, bytes]]:
    sources: list[tuple[str, bytes]] = []
    # Include the sources of both generated and native code, because any change may change the result.
    for entry in folder.iterdir():
        name = f"{path}/{entry.name}"
        if entry.is_dir():
            sources += _sources(entry, name)
        elif entry.name.endswith((".py", ".ll")):
            sources.append((name, entry.read_bytes()))
    return sources


def _current_folder() -> PrivateFolder | None:
    # After `keep_for_workers` only the workers' folder counts, even if it is None.
    if _for_workers:
        return _for_workers[0]
    directory = _directory()
    return None if directory is None else _folder_at(directory)


@cache
def _folder_at(directory: Path) -> PrivateFolder:
    return PrivateFolder(directory)


def _directory() -> Path | None:
    # Use the operator's setting, or else the user's cache folder (XDG Base Directory Specification).
    named = os.environ.get(DIRECTORY_VARIABLE)
    if named is not None:
        return Path(named) if named else None
    cache_home = os.environ.get("XDG_CACHE_HOME", "")
    if os.path.isabs(cache_home):
        return Path(cache_home) / "gpulease" / "cpu"
    try:
        return Path.home() / ".cache" / "gpulease" / "cpu"
    except RuntimeError:
        # The user has no home.
        return None
