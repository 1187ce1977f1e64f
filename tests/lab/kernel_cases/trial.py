"""A case of the kernel suite, and the session, compilers and clock that it uses."""

import time
from collections.abc import Callable, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from gpulease.client import GpuSession
from gpulease.client.sync.arrays import Array

SEED: Final = 7


@dataclass(frozen=True, slots=True)
class Case:
    """A kernel and its check.

    Attributes:
        tool: The tool for which it is written: "CUDA C", "PTX", "Triton", "numba" or "arrays".
        name: The case's name.
        features: The driver features that it needs.
        run: Runs the case. Returns pairs of a result and numpy's result.
        tolerance: Largest error, relative to the largest expected value.
        refused_by: The drivers that refuse it, each with a part of its message.
        only_on: The only driver on which it runs; "" for all.
    """

    tool: str
    name: str
    features: tuple[str, ...]
    run: Callable[["Trial"], Sequence[tuple[Any, Any]]]
    tolerance: float = 1e-4
    refused_by: dict[str, str] = field(default_factory=dict)
    only_on: str = ""


class Cases:
    """The cases of one tool, in the order in which they are defined."""

    def __init__(self, tool: str) -> None:
        self.tool = tool
        self.all: list[Case] = []

    def add(
        self, features: str = "", tolerance: float = 1e-4, only_on: str = "", **refused_by: str
    ) -> Callable[[Callable[["Trial"], Any]], Callable[["Trial"], Any]]:
        """Return a decorator for the function of a case. The case gets the function's name.

        Args:
            features: The features that it needs, separated by commas.
            tolerance: As in Case.
            only_on: As in Case.
            refused_by: A part of the message of each driver that refuses it.
        """

        def note(run: Callable[[Trial], Any]) -> Callable[[Trial], Any]:
            names = tuple(filter(None, (name.strip() for name in features.split(","))))
            self.all.append(Case(self.tool, run.__name__, names, run, tolerance, refused_by, only_on))
            return run

        return note


class Trial:
    """The session, random numbers and clock of a running case.

    Attributes:
        session: The session.
        random: Random numbers, which are the same in every run.
        compile_ms: Milliseconds in compilers and in loading.
        launch_ms: Milliseconds in launches and waits. A driver may compile during the first launch.
    """

    def __init__(self, session: GpuSession) -> None:
        self.session = session
        self.random = np.random.default_rng(SEED)
        self.compile_ms = self.launch_ms = 0.0

    def floats(self, *shape: int) -> NDArray[np.float32]:
        """Return random float32 from -1 to 1, with that shape."""
        return (self.random.random(shape, np.float32) * 2 - 1).astype(np.float32)

    def integers(self, most: int, *shape: int) -> NDArray[np.int32]:
        """Return random int32 from 0 to `most` - 1, with that shape."""
        return self.random.integers(0, most, shape).astype(np.int32)

    def cuda(self, source: str, kernel: str, grid: Any, block: Any, *args: Any, **how: Any) -> list[Any]:
        """Compile CUDA C and launch one of its kernels.

        Copies numpy arrays to the card, and returns them as they are then.
        """
        with self.compiling():
            module = self.session.compile(source)
        return self.launch(module, kernel, grid, block, *args, **how)

    def launch(self, module: Any, kernel: str, grid: Any, block: Any, *args: Any, **how: Any) -> list[Any]:
        """Launch a kernel and wait. Returns the contents of its arrays afterwards."""
        given = [self.session.array(value) if isinstance(value, np.ndarray) and value.ndim else value for value in args]
        blocks, threads = (each if isinstance(each, tuple) else (each,) for each in (grid, block))
        with self.launching():
            self.session.launch(module, kernel, blocks, threads, given, **how)
            self.session.sync()
        return [value.numpy() for value in given if isinstance(value, Array)]

    @contextmanager
    def compiling(self) -> Any:
        """Add the time of the block to `compile_ms`."""
        began = time.perf_counter()
        yield
        self.compile_ms += (time.perf_counter() - began) * 1e3

    @contextmanager
    def launching(self) -> Any:
        """Add the time of the block to `launch_ms`."""
        began = time.perf_counter()
        yield
        self.launch_ms += (time.perf_counter() - began) * 1e3
