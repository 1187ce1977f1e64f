"""The certificates with which etcd and its clients authenticate to each other.

The fleet process can't open files. The broker opens the files and sends the descriptors, at the start and after each
change of a file.
"""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

from gpulease.daemon.fleet.etcd.endpoints import BadEtcdSettings
from gpulease.daemon.host.ipc import close_all
from gpulease.daemon.host.regular_files import check_regular
from gpulease.protocol.fast_dataclass import dataclass

Stamp = tuple[int, int, int, int]
"""A file's device, inode, size and time of last change."""

MAX_FILE_BYTES: Final = 4 << 20
"""Maximum bytes of one file. A bundle of all public CAs has 0.3 MiB."""


@dataclass(frozen=True, slots=True)
class Certificates:
    """PEM texts for TLS to etcd.

    Attributes:
        ca: The CA of the members' certificates.
        key: The key of this client's certificate.
        certificate: This client's certificate; None if etcd does not require one.
    """

    ca: bytes
    key: bytes | None
    certificate: bytes | None


def certificate_files(ca: Path | None, key: Path | None, certificate: Path | None) -> dict[str, Path]:
    files = {"ca": ca, "key": key, "certificate": certificate}
    return {name: path for name, path in files.items() if path is not None}


def read_certificates(files: Mapping[str, Path]) -> Certificates | None:
    """Return the contents of the files `ca`, `key` and `certificate`; None without `ca`. Raises BadEtcdSettings."""
    fds, _ = open_certificates(files)
    try:
        return received_certificates(tuple(files), fds)
    finally:
        close_all(fds)


def open_certificates(files: Mapping[str, Path]) -> tuple[list[int], tuple[Stamp, ...]]:
    """Open the files. Returns descriptors and their `certificate_stamps`. Raises BadEtcdSettings."""
    fds: list[int] = []
    path = None
    try:
        # Open all files or none, because a key is of no use without its certificate.
        for path in files.values():
            # Use O_NONBLOCK, because opening a FIFO would otherwise wait for its writer.
            fds.append(os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY))
            check_regular(os.fstat(fds[-1]), path)
        stats = [os.fstat(fd) for fd in fds]
    except OSError as error:
        close_all(fds)
        raise BadEtcdSettings(f"{path}: {error.strerror}") from None
    return fds, tuple(map(_stamp_of, stats))


def certificate_stamps(files: Mapping[str, Path]) -> tuple[Stamp, ...]:
    """Return a value that changes when a file is changed or replaced. Raises BadEtcdSettings."""
    try:
        return tuple(_stamp_of(os.stat(path)) for path in files.values())
    except OSError as error:
        raise BadEtcdSettings(f"{error.filename}: {error.strerror}") from None


def _stamp_of(stat: os.stat_result) -> Stamp:
    return stat.st_dev, stat.st_ino, stat.st_size, stat.st_mtime_ns


def received_certificates(names: Sequence[str], fds: Sequence[int]) -> Certificates | None:
    """Return the contents of open files. `names` has each one's name; None without `ca`. Raises BadEtcdSettings."""
    if len(names) != len(fds):
        raise BadEtcdSettings("the certificate files could not be passed on because too many files are open")
    try:
        # Use pread(2), because descriptors share their offset with the sender's.
        contents = {name: os.pread(fd, MAX_FILE_BYTES, 0) for name, fd in zip(names, fds, strict=True)}
    except OSError as error:
        raise BadEtcdSettings(f"a certificate can't be read: {error.strerror}") from None
    if "ca" not in contents:
        return None
    return Certificates(contents["ca"], contents.get("key"), contents.get("certificate"))
