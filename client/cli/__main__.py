"""`gpulease`: the group of commands. Each is imported when it is called, because importing all takes a while."""

import sys
from importlib import import_module
from typing import Final

if __name__ == "__main__":
    from gpulease.imports import begin_imports

    begin_imports()

import click
from click.shell_completion import CompletionItem

import gpulease
from gpulease.client.console.command_group import CommandGroup
from gpulease.imports import end_imports
from gpulease.interrupts import interrupt_ends_it, interrupt_unwinds

PROGRAM: Final = "gpulease"

COMMANDS: Final = {
    "acquire": ("acquire:acquire", "Acquire a lease for other programs; it continues after this command."),
    "audit": ("daemon_modules:audit", "Read audit logs: verify, show, usage, head, recompute."),
    "bench": ("bench:bench", "Measure what a lease costs compared with calling the driver directly."),
    "completion": ("completion:completion", "Print a shell script that completes commands and lease ids."),
    "decode": ("decode:decode", "Continue a prompt with a language model."),
    "demo": ("demo:demo", "Show and measure what leases guarantee to three tenants on one card."),
    "drain": ("drain:drain", "Refuse new leases on a node or card, and end the rest by a deadline."),
    "events": ("lease_events:events", "Print the phases of leases as they happen, one per line."),
    "fence": ("node:fence", "Manage memory that could not be proved free."),
    "fleet": ("fleet:fleet", "Manage a fleet: its nodes and names; drain or fence a node."),
    "free": ("acquire:free", "Free a lease before its deadline."),
    "health": ("metrics:health", "Show whether the daemon can grant leases, and if not, why."),
    "info": ("node:info", "Show the cards: memory to lease, free memory, fenced memory."),
    "install-service": ("service:install_service", "Print the systemd units, or install them."),
    "leases": ("node:leases", "List leases: your own, or all of them if you are an operator."),
    "metrics": ("metrics:metrics", "Print the node's metrics in Prometheus's format."),
    "move": ("move:move", "Move the session of a lease, or all sessions of a card, elsewhere."),
    "park": ("node:park", "Move a lease's memory to the host until its next operation."),
    "pki": ("daemon_modules:pki", "Make a test authority and certificates: init, issue, revoke."),
    "renew": ("acquire:renew", "Extend a lease."),
    "revoke": ("node:revoke", "End a lease at once, even while a kernel runs."),
    "run": ("run:run", "Run a program on a lease that ends with the program."),
    "serve": ("serve:serve", "Run servers on leases."),
    "submit": ("submit:submit", "Run one kernel from a file, and write its outputs."),
    "top": ("top.command:top", "Watch cards and leases live; sort, filter, revoke."),
    "upgrade-workers": ("upgrade_workers:upgrade_workers", "Move sessions out of the workers of an earlier daemon."),
    "verify": ("verify:verify", "Test that every rule about leases holds on this host's card."),
}
"""All commands by name, each with its module below this package, its function, and its line in the help text."""


class _Commands(CommandGroup):
    """Finds commands by name."""

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        # Suggest from all commands. click would suggest only those that are imported already.
        if args and args[0] not in COMMANDS and not args[0].startswith("-"):
            from gpulease.protocol.did_you_mean import did_you_mean

            hint = did_you_mean(args[0], COMMANDS, "")
            ctx.fail(f"No such command {args[0]!r}.{hint and f' {hint[0].upper()}{hint[1:]}'}")
        return super().resolve_command(ctx, args)

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        # click reports an unknown name itself.
        if cmd_name not in COMMANDS:
            return None
        # Import only the module that is needed, because importing all takes longer than most commands run.
        module, _, name = COMMANDS[cmd_name][0].partition(":")
        command: click.Command = getattr(import_module(f"gpulease.client.cli.{module}"), name)
        end_imports()
        interrupt_unwinds()
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        # Use the lines of the table above, so that the help text imports no command.
        with formatter.section("Commands"):
            formatter.write_dl([(name, summary) for name, (_, summary) in COMMANDS.items()])

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[CompletionItem]:
        names = [name for name in COMMANDS if name.startswith(incomplete)]
        # Complete the names here, because click's group would import every command for that.
        return [CompletionItem(name, help=COMMANDS[name][1]) for name in names] + click.Command.shell_complete(
            self, ctx, incomplete
        )


def _show_version(ctx: click.Context, param: click.Parameter, is_wanted: bool) -> None:
    # Print nothing when a shell parses the line only to complete it.
    if not is_wanted or ctx.resilient_parsing:
        return
    click.echo(f"{PROGRAM}, version {gpulease.__version__}")
    ctx.exit()


@click.group(cls=_Commands, context_settings={"help_option_names": ["-h", "--help"]})
@click.option(
    "--version", is_flag=True, is_eager=True, expose_value=False, callback=_show_version, help="Show the version."
)
def main() -> None:
    """Lease slices of a GPU from a gpuleased daemon, whose address is GPULEASE_ADDRESS or the default socket.

    Exit status: 0 done, 1 failed, 2 invalid command line, 69 the daemon does not answer, 70 an internal error of
    gpulease, 74 the output or a file can't be written or read; or the signal that ended it.
    """
    for stream in (sys.stdout, sys.stderr):
        # Escape characters that the locale can't write, instead of failing.
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")


if __name__ == "__main__":
    interrupt_ends_it()
    main(prog_name=PROGRAM)
