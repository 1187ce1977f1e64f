"""Entry points of the installed commands. Each handles interrupts before it imports anything slow.

Therefore this file imports only what that takes: an interrupt is handled from about a millisecond after Python's own
start. Until then Python itself prints a traceback.
"""

import os
import signal
import sys

from gpulease.imports import begin_imports, end_imports
from gpulease.interrupts import interrupt_ends_it


def _begin() -> None:
    interrupt_ends_it()
    _open_standard_files()
    begin_imports()


def _open_standard_files() -> None:
    """Open /dev/null in place of each standard file that is closed.

    Otherwise a socket or a pipe of the command would get its descriptor: libuv aborts when it closes such a descriptor,
    and whatever native code or a child prints would be sent through it.
    """
    for descriptor in range(3):
        try:
            os.fstat(descriptor)
        except OSError:
            # open(2) returns the lowest free descriptor, which is this one.
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)


def gpulease() -> None:
    """Run the command `gpulease`."""
    _begin()
    from gpulease.client.cli.__main__ import PROGRAM, main

    main(prog_name=PROGRAM)


run = gpulease
"""The function's former name, which scripts of an earlier installation import until the next release."""


def gpuleased() -> None:
    """Run the daemon."""
    _begin()
    from gpulease.daemon.__main__ import main

    main(prog_name="gpuleased")


def gpulease_dra() -> None:
    """Run the driver for Kubernetes."""
    _begin()
    from gpulease.client.integrations.kubernetes.__main__ import main

    main(prog_name="gpulease-dra")


def gpulease_slurm() -> None:
    """Run the commands for Slurm."""
    _begin()
    from gpulease.client.integrations.slurm.__main__ import main

    end_imports()
    main(prog_name="gpulease-slurm")


def module_of_daemon() -> None:
    """Run the module that the second argument names. The first argument names the extras that the module needs.

    The process ends as every command does.
    """
    _begin()
    # Let a closed pipe end the process silently, as it ends most programs.
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    from runpy import run_module

    from gpulease.client.console.exit_status import failures_as_sentences, needing

    end_imports()
    # The daemon is installed with the client, but the packages that it needs may not be.
    with failures_as_sentences(), needing(sys.argv.pop(1)):
        run_module(sys.argv.pop(1), run_name="__main__", alter_sys=True)
