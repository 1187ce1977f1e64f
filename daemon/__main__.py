"""`gpuleased`: the daemon in the foreground."""

import asyncio
import os
import signal
import sys
from functools import partial
from pathlib import Path
from typing import Any, Final

if __name__ == "__main__":
    from gpulease.imports import begin_imports

    begin_imports()

import click

from gpulease.daemon.host.cannot_start import CannotStart
from gpulease.daemon.host.processes import NoThread
from gpulease.daemon.host.version import VERSION
from gpulease.daemon.log.catalogue import LogEvent
from gpulease.daemon.log.writer import FORMATS, LogStyle, begin_logging, flush_logs, is_for_people, log_event
from gpulease.imports import end_imports
from gpulease.interrupts import interrupt_unwinds
from gpulease.protocol.did_you_mean import did_you_mean

EXIT_INTERRUPTED: Final = 128 + signal.SIGINT
"""The exit status that shells give a program that an interrupt ended (bash(1), "EXIT STATUS")."""


class _Driver(click.Choice[str]):
    """A driver by name. For a mistyped one, the error suggests a similar name."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        hint = did_you_mean(value, self.choices, "")
        if value not in self.choices and hint:
            self.fail(f"{value!r} is not a driver; {hint}", param, ctx)
        return str(super().convert(value, param, ctx))


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option(
    "--listen",
    multiple=True,
    metavar="ADDRESS",
    help="An address to listen on: unix:PATH, tcp:HOST:PORT or tls:HOST:PORT; repeatable.",
)
@click.option("--driver", type=_Driver(["auto", "cuda", "cpu"]), help="The driver; auto is the default.")
@click.option("--arch", metavar="SM", help="The cpu driver's architecture; sm_90 is the default.")
@click.option(
    "--shuffle-warps",
    type=int,
    metavar="SEED",
    help="With the cpu driver, a seed for running warps in another order, to expose races.",
)
@click.option(
    "--vram",
    multiple=True,
    metavar="SIZE",
    help=(
        "With the cpu driver, the size of an emulated card (repeatable); with cuda, the most memory of "
        "each card that may be leased."
    ),
)
@click.option(
    "--warm-contexts", type=int, metavar="NUMBER", help="Number of contexts kept ready on each card; the default is 0."
)
@click.option(
    "--http", metavar="HOST:PORT", help="Serve a web page, health checks and metrics at this loopback address."
)
@click.option("--fleet", metavar="ETCD", help="The addresses of the fleet's etcd: etcd://HOST:PORT,HOST:PORT.")
@click.option(
    "--config", type=click.Path(dir_okay=False, path_type=Path), metavar="FILE.toml", help="The settings file."
)
@click.option("--log-format", type=click.Choice(FORMATS), help="By default, human on a terminal, otherwise json.")
@click.option("-v", "--verbose", is_flag=True, help="Log details for debugging.")
@click.version_option(VERSION, prog_name="gpuleased")
def main(
    listen: tuple[str, ...],
    driver: str | None,
    arch: str | None,
    shuffle_warps: int | None,
    vram: tuple[str, ...],
    warm_contexts: int | None,
    http: str | None,
    fleet: str | None,
    config: Path | None,
    log_format: str | None,
    verbose: bool,
) -> None:
    """Grant leases on this host's GPUs: slices of VRAM for a period of time, each used by a separate process."""
    try:
        begin_logging(LogStyle(log_format or "auto"))
    except NoThread as error:
        # The log's own thread could not be started, so nothing can be logged.
        click.echo(f"gpuleased: {_with_hint(str(error), error.hint)}", err=True)
        sys.exit(error.status)
    overrides: dict[str, Any] = {"listen": list(listen), "driver": driver, "vram": list(vram)}
    overrides |= {"arch": arch, "shuffle_warps": shuffle_warps}
    overrides |= {"warm_contexts": warm_contexts, "http": http, "fleet": fleet}
    overrides["log_format"] = log_format
    if verbose:
        overrides["log_level"] = "debug"
    try:
        sys.exit(_run(config, overrides))
    except KeyboardInterrupt:
        # The interrupt came before the loop runs, which would stop the daemon. click would print "Aborted!" and fail.
        sys.exit(EXIT_INTERRUPTED)


def _run(path: Path | None, overrides: dict[str, Any]) -> int:
    try:
        from gpulease.daemon.broker.service import loop_factory
        from gpulease.daemon.config.settings import load_config
        from gpulease.daemon.supervisor.lifecycle import Supervised
    except ImportError as error:
        if error.name is None or error.name.partition(".")[0] == "gpulease":
            raise  # A fault of ours.
        return _fail(f"{error.name} is not installed", "pip install '.[daemon]' in gpulease's repository", os.EX_CONFIG)
    end_imports()
    # From here on there is something to undo: an interrupt must run the clean-up below.
    interrupt_unwinds()
    supervised = Supervised.without_manager()
    try:
        supervised = Supervised.taken_from(os.environ, os.getpid())
        config = load_config(path, overrides)
        begin_logging(config.of_log)
        # A daemon without a file has nothing to reload, so SIGHUP ends it like other programs of a terminal.
        load = None if path is None else partial(load_config, path, overrides)
        with asyncio.Runner(loop_factory=loop_factory()) as runner:
            runner.run(supervised.serve(config, load))
    except CannotStart as error:
        supervised.report_failure(_with_hint(str(error), error.hint) if error.hint else str(error))
        return _fail(str(error), error.hint, error.status)
    finally:
        supervised.close()
    return 0


def _fail(message: str, hint: str, status: int) -> int:
    flush_logs()
    if is_for_people():
        click.echo(f"gpuleased: {_with_hint(message, hint)}", err=True)
    else:
        log_event(LogEvent.DAEMON_FAILED, reason=message, hint=hint, status=status)
    return status


def _with_hint(message: str, hint: str) -> str:
    ended = message if message.endswith("?") else f"{message.rstrip('.')}."
    return f"{ended}{' ' + hint if hint else ''}"


if __name__ == "__main__":
    main()
