"""The errors of libraries that are written in Rust, as errors of this package.

At a mistake of its own, such a library panics. pyo3, which connects it with Python, then raises an exception that
derives from BaseException. `except Exception` misses it, so it would pass through everything that keeps one request's
error from other requests. These two are the only ways to call such a library with anything that a tenant, or a model's
file, has chosen.
"""

from asyncio import CancelledError
from collections.abc import Iterator
from contextlib import contextmanager

from gpulease.client.decode.decode_errors import DecodeError, LibraryPanicked


@contextmanager
def panics_caught() -> Iterator[None]:
    """Turn a panic in the block into LibraryPanicked. Other exceptions pass."""
    try:
        yield
    except (Exception, KeyboardInterrupt, SystemExit, GeneratorExit, CancelledError):
        raise
    except BaseException as error:
        raise LibraryPanicked(f"{type(error).__name__}: {error}") from None


@contextmanager
def rejected(kind: type[DecodeError], message: str) -> Iterator[None]:
    """Turn any exception of a library, except a lack of memory, into an error of `kind`; panics, too."""
    try:
        yield
    except (KeyboardInterrupt, SystemExit, GeneratorExit, MemoryError, DecodeError):
        raise
    except BaseException as error:
        raise kind(f"{message}: {error}") from None
