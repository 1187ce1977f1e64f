"""`gpulease demo`: lease, compute, expire, step by step, against a real daemon."""

import contextlib
import json
import time
from importlib.resources import files
from typing import Any, Final

import click
import numpy as np

from gpulease.client import GpuBuilder, GpuLease, GpuLeaseError, GpuSession, KernelArgs, LeaseExpired
from gpulease.client.cli.fleet_demo import run_fleet_demo
from gpulease.client.cli.private_daemon import private_daemon, running_address
from gpulease.client.cli.reports import first_card
from gpulease.client.cli.tables import size_text

SLICE_BYTES: Final = 64 << 20
VALUES: Final = 1024
FACTOR: Final = 2.0
SUMMAND: Final = 10.0
SHOWN: Final = (0, 1, 100)
THREADS: Final = 256
EXPIRING_LEASE_S: Final = 1.0


class DemoFailed(GpuLeaseError):
    """A step of the demonstration had another result than it must."""


@click.command()
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead.")
@click.option("--fleet", "of_fleet", is_flag=True, help="Three daemons on an etcd; one is killed, its name lives on.")
def demo(as_json: bool, of_fleet: bool) -> None:
    """Lease a slice, run two kernels on it, let another lease expire.

    Uses the daemon that runs; without one, starts a private one on the embedded driver, which needs no GPU. A fleet's
    daemons, and its etcd, are always private.
    """
    say = _silent if as_json else click.echo
    if of_fleet:
        report = run_fleet_demo(transform_ptx(), say)
        if as_json:
            click.echo(json.dumps(report, indent=2))
        return
    with contextlib.ExitStack() as stack:
        address = running_address()
        if address is None:
            say("No daemon runs here: starting a private one on the embedded driver (no GPU needed).")
            address = stack.enter_context(private_daemon("cpu"))
        say(f"Talking to the daemon at {address}.")
        report = _run(address, say)
    if as_json:
        click.echo(json.dumps(report, indent=2))


def _run(address: str, say: Any) -> dict[str, Any]:
    card = first_card(address)
    say(f"Card 0: {card['name']}, {card['uuid']}, {size_text(card['capacity_bytes'])} (driver {card['driver']}).\n")
    with GpuBuilder(address).min_vram(SLICE_BYTES).lease_secs(120).acquire() as lease:
        say(f"Lease    {lease.lease_id_text}: {size_text(lease.size_bytes)} for {lease.remaining_s:.0f} s")
        results = _compute(lease, say)
        report = {
            "driver": card["driver"],
            "card": lease.card_uuid,
            "lease_id": lease.lease_id_text,
            "slice_bytes": lease.size_bytes,
            "results": {str(index): float(results[index]) for index in SHOWN},
            "remaining_s": round(lease.remaining_s, 3),
        }
        say(f"Left     {lease.remaining_s:.1f} s; giving the lease back")
    say("Freed    the session, its memory and its modules are gone\n")
    report["expired_lease"] = _expire(address, say)
    say("\nDone: both leases are gone and the card is whole again.")
    return report


def _compute(lease: GpuLease, say: Any) -> "np.ndarray[Any, np.dtype[np.float32]]":
    values = np.arange(VALUES, dtype=np.float32)
    with GpuSession(lease) as session:
        buffer = session.mem_alloc(values.nbytes)
        session.mem_write(buffer, 0, values)
        say(f"Upload   {VALUES} floats: 0, 1, 2 ... {VALUES - 1}")
        module = session.module_load(transform_ptx())
        say(f"Load     PTX with the kernels {', '.join(module.kernels)}")
        grid, block = [(VALUES + THREADS - 1) // THREADS, 1, 1], [THREADS, 1, 1]
        for kernel, operand, sign in (("scale", FACTOR, "*"), ("bias", SUMMAND, "+")):
            args = KernelArgs().push_buffer(buffer).push_u32(VALUES).push_f32(operand)
            session.launch(module, kernel, grid, block, args)
            say(f"Launch   {kernel:<5}  x[i] = x[i] {sign} {operand:g}")
        session.sync()
        results = np.empty_like(values)
        session.mem_read(buffer, 0, results.nbytes, into=results)
    if not np.array_equal(results, values * FACTOR + SUMMAND):
        raise DemoFailed("the kernels' results are wrong", "Tell the authors, with the card's name")
    say("Result   " + "  ".join(f"x[{index}] = {results[index]:g}" for index in SHOWN) + "  (all checked)")
    return results


def _expire(address: str, say: Any) -> dict[str, Any]:
    lease = GpuBuilder(address).min_vram(SLICE_BYTES).lease_secs(EXPIRING_LEASE_S).acquire()
    started = time.monotonic()
    say(f"Lease    {lease.lease_id_text}: {size_text(lease.size_bytes)} for {EXPIRING_LEASE_S:g} s, not renewed")
    with GpuSession(lease) as session:
        try:
            while time.monotonic() - started < 10 * EXPIRING_LEASE_S:
                session.sync()
                time.sleep(EXPIRING_LEASE_S / 100)
        except LeaseExpired as error:
            after_s = time.monotonic() - started
            say(f"Expired  after {after_s:.2f} s: {error}")
            return {"error": type(error).__name__, "lease_id": lease.lease_id_text, "after_s": round(after_s, 3)}
    raise DemoFailed("a lease outlived its time", "Tell the authors")


def transform_ptx() -> bytes:
    """Return PTX with `scale` and `bias`, compiled by nvcc from the transform.cu of the vectors."""
    return files("gpulease.client.cli").joinpath("transform.ptx").read_bytes()


def _silent(message: str) -> None: ...
