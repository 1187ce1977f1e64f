"""`gpulease submit`: runs one kernel of a file, on a lease that is freed afterwards."""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import click

from gpulease.client import GpuBuilder, KernelArgs, Submission
from gpulease.client.console.exit_status import EXIT_CANNOT_WRITE, fail
from gpulease.protocol.counts import counted

DEFAULT_ROOM_MIB: Final = 64
"""MiB reserved for the job: enough for a small image, and for several times the largest outputs of a job."""

SESSION_BYTES: Final = 1 << 20
"""Memory of the lease's session, which computes nothing, in bytes."""

_OUTPUTS: Final = ("inout", "out")
"""Kinds of arguments that the kernel writes."""

_NUMBERS: Final[dict[str, type[int] | type[float]]] = {
    "u32": int,
    "u64": int,
    "i32": int,
    "i64": int,
    "f32": float,
    "f64": float,
}


@click.command()
@click.argument("kernel")
@click.argument("image", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.option("--grid", default="1", show_default=True, help="The number of blocks: X, X,Y or X,Y,Z.")
@click.option("--block", default="1", show_default=True, help="The number of threads in a block: X, X,Y or X,Y,Z.")
@click.option(
    "--arg",
    "arguments",
    multiple=True,
    help=(
        "The kernel's next argument: in:FILE, inout:FILE, out:BYTES, or a number such as u32:7, i64:-1 "
        "or f32:2.5. Repeatable."
    ),
)
@click.option(
    "--output",
    "outputs",
    multiple=True,
    type=click.Path(dir_okay=False, writable=True, path_type=Path),
    help="The file for the kernel's next output; outputs without a file are written to standard output. Repeatable.",
)
@click.option(
    "--room", default=DEFAULT_ROOM_MIB, show_default=True, type=click.IntRange(1), help="Memory for the job, in MiB."
)
@click.option("--secs", default=60.0, show_default=True, help="The lease's maximum duration in seconds.")
def submit(
    kernel: str,
    image: Path,
    grid: str,
    block: str,
    arguments: tuple[str, ...],
    outputs: tuple[Path, ...],
    room: int,
    secs: float,
) -> None:
    """Run one KERNEL of IMAGE, PTX text or a cubin, on a separate lease, and write its outputs."""
    # Read everything before the lease is acquired: a mistake must not take memory, or wait for it.
    blocks, threads = _numbers(grid, "--grid"), _numbers(block, "--block")
    pushes = [_argument(text) for text in arguments]
    count = sum(text.partition(":")[0] in _OUTPUTS for text in arguments)
    if len(outputs) > count:
        raise click.UsageError(
            f"--output is given {len(outputs)} times, but the arguments have only {counted(count, 'output')}: "
            "each inout and out is one"
        )
    code = image.read_bytes()
    # Make the session's part of the lease as small as possible, because it stays unused. The job's memory is added.
    builder = GpuBuilder().min_vram(SESSION_BYTES).submits(room << 20).lease_secs(secs)
    with builder.acquire() as lease:
        submission = lease.submit(kernel, code).grid(blocks).block(threads)
        for push in pushes:
            push(submission)
        results = submission.launch()
    # Write each output to the next file. If there are not enough files, write the others to standard output.
    for index, result in enumerate(results):
        if index < len(outputs):
            outputs[index].write_bytes(result)
        else:
            sys.stdout.buffer.write(result)


def _numbers(text: str, option: str) -> list[int]:
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise click.BadParameter(f"it must be a list of numbers, not {text!r}", param_hint=option) from None


def _argument(text: str) -> Callable[[Submission], Submission]:
    """Return the function that adds an argument of the command line to a submission. Reads the argument's file now."""
    kind, _, value = text.partition(":")
    try:
        # VALUE is a file for inputs, a size for outputs, and a number for other kinds.
        if kind in ("in", "inout"):
            data = Path(value).read_bytes()
            return lambda submission: submission.arg(data) if kind == "in" else submission.inout(data)
        if kind == "out":
            size_bytes = int(value)
            return lambda submission: submission.out(size_bytes)
        if kind in _NUMBERS:
            # The method of KernelArgs has the kind's name.
            push: Any = getattr(KernelArgs(), f"push_{kind}")
            args: KernelArgs = push(_NUMBERS[kind](value))
            return lambda submission: submission.args(args)
    except ValueError:
        raise click.BadParameter(f"{text!r}: the value must be a number, not {value!r}", param_hint="--arg") from None
    except OSError as error:
        fail(f"{value} can't be read: {error.strerror}", EXIT_CANNOT_WRITE)
    kinds = ", ".join(("in", *_OUTPUTS, *_NUMBERS))
    raise click.BadParameter(f"{text!r}: the kind must be one of {kinds}, not {kind!r}", param_hint="--arg")
