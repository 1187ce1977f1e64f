"""Loads the decode engine's kernels into a session, and launches them with parameters by name."""

import hashlib
import json
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Final

from gpulease.client.aio import GpuSession
from gpulease.client.decode.checkpoint.weights import Plane
from gpulease.client.decode.engine.early_start import starting_early
from gpulease.client.handles import Buffer, Module
from gpulease.client.kernel_args import KernelArgs

_FOLDER: Final = "gpulease.client.decode.kernels"

_WEIGHTS: Final = frozenset({"w", "scales", "steps", "zeros", "weight", "outer", "bias", "q_norm", "k_norm"})
"""Names of the parameters that are weights."""

_UNWRITTEN: Final = _WEIGHTS | {"cosines", "sines", "rows"}
"""Names of the parameters whose memory no kernel writes: weights, tables of the model, and the rows of a step."""

_SCRATCH_PARAMETERS: Final = 2
"""Number of pointers to scratch memory that Triton appends to every kernel's parameters. The packaged kernels use no
scratch memory, so the pointers are 0."""


@dataclass(frozen=True, slots=True)
class ManifestKernel:
    """The manifest's entry for a kernel.

    Attributes:
        kernel: Its name in the PTX.
        target: Architecture for which it is compiled: `sm_80`, which later cards also run, or `sm_90a`, which only
            cards of compute capability 9.0 run.
        threads: Number of threads of a block.
        shared_bytes: Bytes of dynamic shared memory.
        parameters: Names of its parameters, in order.
        constants: Constants with which it was compiled, including its tile's sizes.
    """

    kernel: str
    target: str
    threads: int
    shared_bytes: int
    parameters: tuple[str, ...]
    constants: dict[str, int]


@dataclass(frozen=True, slots=True)
class Manifest:
    """The settings with which the kernels were compiled.

    Attributes:
        split: Number of positions in one part of a sequence's attention.
        heads: Maximum number of query heads per key head.
        kernels: Kernels by the names of their files, without `.ptx`.
    """

    split: int
    heads: int
    kernels: dict[str, ManifestKernel]


@cache
def manifest() -> Manifest:
    """Return the package's manifest, which `build` wrote. Reads the file once per process."""
    # The manifest lists a kernel's parameters in order, so launches can name them instead of counting positions.
    document = json.loads(files(_FOLDER).joinpath("manifest.json").read_text())
    kernels = {
        name: ManifestKernel(
            fact["kernel"],
            fact["target"],
            fact["threads"],
            fact["shared_bytes"],
            tuple(fact["parameters"]),
            fact["constants"],
        )
        for name, fact in document["kernels"].items()
    }
    return Manifest(document["split"], document["heads"], kernels)


@cache
def kernels_sha256() -> str:
    """Return the SHA-256 of the manifest and all PTX, which decide the bits of results."""
    digest = hashlib.sha256()
    names = sorted(f"{name}.ptx" for name in manifest().kernels)
    # Hash the files' digests in the order of their names.
    for name in ("manifest.json", *names):
        digest.update(hashlib.sha256(files(_FOLDER).joinpath(name).read_bytes()).digest())
    return digest.hexdigest()


Value = Buffer | Plane | int | float | None
"""A kernel's parameter. None is a null pointer, which the kernel does not read."""


class KernelLaunch:
    """A launch of a kernel, not yet bound to a session.

    Attributes:
        name: The kernel's name in the manifest.
        grid: The dimensions of its grid.
        values: Its parameters by name.
    """

    __slots__ = ("grid", "name", "values")

    def __init__(self, name: str, grid: tuple[int, ...], **values: Value) -> None:
        self.name, self.grid, self.values = name, grid, values


def image(name: str) -> bytes:
    """Return the PTX of one of the package's kernels."""
    return files(_FOLDER).joinpath(f"{name}.ptx").read_bytes()


def early_image(name: str) -> bytes:
    """Return the PTX of one of the package's kernels, as `starting_early` changes it."""
    parameters = manifest().kernels[name].parameters
    unwritten = frozenset(place for place, parameter in enumerate(parameters) if parameter in _UNWRITTEN)
    # A linear permits the next launch only after it has read its weights, and `rope_append` at its end. Other kernels
    # permit it at once, because they leave enough of the card free. If `rope_append` did, attention would start beside
    # the linear before it, with too many programs on the multiprocessors that the linear leaves free. Measured on an
    # H200 with 64 rows at position 8,192: 4.9 ms a step instead of 5.3, with keys and values in FP8 3.6 instead of 4.7.
    permits_first = "w" not in parameters and not name.startswith("rope_append")
    return starting_early(image(name), unwritten, permits_first=permits_first)


class KernelLibrary:
    """The loaded kernels of one session. The modules stay loaded until the session ends."""

    def __init__(self, session: GpuSession, *, starts_early: bool = False) -> None:
        """Prepare to load kernels, from `early_image` if `starts_early`, and else from `image`."""
        self._session = session
        self._starts_early = starts_early
        self._modules: dict[str, Module] = {}

    async def load(self, *names: str) -> None:
        """Load the kernels that are not loaded yet. Raises LoadFailed."""
        for name in names:
            if name not in self._modules:
                # Loading compiles PTX for the card, which takes time, so load each module once and keep it.
                ptx = early_image(name) if self._starts_early else image(name)
                self._modules[name] = await self._session.module_load(ptx)

    async def launch(self, launch: KernelLaunch) -> None:
        """Launch a loaded kernel, or record the launch if the session is recording a graph."""
        facts, values = manifest().kernels[launch.name], launch.values
        # A launch with the wrong parameters would read wrong addresses.
        if set(values) != set(facts.parameters):
            raise TypeError(f"{launch.name} takes {', '.join(facts.parameters)}, not {', '.join(values)}")
        # Push parameters in the kernel's order. A buffer or null pointer has 64 bits, and a number 32.
        args = KernelArgs()
        for parameter in facts.parameters:
            value = values[parameter]
            if isinstance(value, Buffer):
                args.push_buffer(value)
            elif isinstance(value, Plane):
                args.push_buffer(value.buffer, value.offset)
            elif isinstance(value, float):
                args.push_f32(value)
            elif value is None:
                args.push_u64(0)
            else:
                args.push_i32(value)
        for _ in range(_SCRATCH_PARAMETERS):
            args.push_u64(0)
        module, block = self._modules[launch.name], (facts.threads, 1, 1)
        await self._session.launch(module, facts.kernel, launch.grid, block, args, None, facts.shared_bytes)
