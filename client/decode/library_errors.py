"""The errors of libraries that are written in Rust, as errors of this package.

Such a library panics when it detects a bug of its own. pyo3, which connects it with Python, then raises an exception
that derives from BaseException. `except Exception` does not catch it, so one request's error would reach other
requests. So every call with data that a tenant or a model's file has chosen is made inside `panics_caught` or
`rejected`.
"""

from collections.abc import Iterator
from contextlib import contextmanager

from gpulease.client.decode.decode_errors import DecodeError, LibraryPanicked


@contextmanager
def panics_caught() -> Iterator[None]:
    """Turn a panic in the block into LibraryPanicked. Other exceptions pass."""
    try:
        yield
    except (Exception, KeyboardInterrupt, SystemExit, GeneratorExit):
        raise
    except BaseException as error:
        # Imported here, because the processes that read texts run no event loop, and start faster without it.
        from asyncio import CancelledError

        if isinstance(error, CancelledError):
            raise
        raise LibraryPanicked(f"{type(error).__name__}: {error}") from None


@contextmanager
def rejected(kind: type[DecodeError], message: str) -> Iterator[None]:
    """Turn any exception of a library, even a panic, into an error of `kind`. MemoryError passes."""
    try:
        yield
    except (KeyboardInterrupt, SystemExit, GeneratorExit, MemoryError, DecodeError):
        raise
    except BaseException as error:
        raise kind(f"{message}: {error}") from None
