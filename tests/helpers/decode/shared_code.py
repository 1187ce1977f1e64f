"""Code of the embedded driver that a test process and the workers of this run's daemons share, compiled only once."""

import fcntl
import hashlib
import os
from collections.abc import Callable
from pathlib import Path
from typing import Final

from gpulease.daemon.native.code_cache import DIRECTORY_VARIABLE, WORKERS_FOLDER
from gpulease.daemon.native.compiler import Effort
from gpulease.daemon.ptx.kernel_code import PartSource

DIGEST_BYTES: Final = hashlib.sha256().digest_size
Compile = Callable[[PartSource, Effort | None], bytes]


def compiling_once(compile_source: Compile) -> Callable[..., bytes]:
    """Return a `compile_source` that uses parts that another process of this run has compiled.

    A process that needs a part while another process compiles it waits for that process.
    """
    cache = Path(os.environ[DIRECTORY_VARIABLE])

    def compile_once(source: PartSource, effort: Effort | None = None) -> bytes:
        name = (source.key if effort is None else source.first_key).hex()
        locks = cache.parent / "compiling"
        locks.mkdir(exist_ok=True)
        with (locks / name).open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            folders = [folder for folder in (cache, *cache.glob(f"{WORKERS_FOLDER}-*")) if folder.is_dir()]
            for folder in folders:
                if (folder / name).exists():
                    return (folder / name).read_bytes()[DIGEST_BYTES:]
            data = compile_source(source, effort)
            for folder in folders:
                write(folder, name, data)
            return data

    return compile_once


def write(folder: Path, name: str, data: bytes) -> None:
    """Write an entry as the folder's owner does. Workers, which run as another user, accept no other entries."""
    draft = folder / f"{os.getpid()}.new"
    draft.write_bytes(hashlib.sha256(bytes.fromhex(name) + data).digest() + data)
    draft.chmod(0o600)
    os.chown(draft, folder.stat().st_uid, -1)
    draft.rename(folder / name)
