"""`gpulease install-service`: print or install the daemon's units for systemd."""

import os
import re
import sys
from collections.abc import Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Final

import click

from gpulease.client.console.exit_status import MissingPrerequisite
from gpulease.protocol.fast_dataclass import dataclass

UNITS: Final = Path(__file__).resolve().parents[2] / "systemd"
"""The folder of the units, next to the client's, both in a checkout and in an installation."""

PLACES: Final = {
    "gpuleased.service": "etc/systemd/system/gpuleased.service",
    "gpuleased.socket": "etc/systemd/system/gpuleased.socket",
    "gpulease-tls.socket": "etc/systemd/system/gpulease-tls.socket",
    "gpulease-http.socket": "etc/systemd/system/gpulease-http.socket",
    "gpulease-devices.service": "etc/systemd/system/gpulease-devices.service",
    "gpulease-decode.service": "etc/systemd/system/gpulease-decode.service",
    "gpulease.tmpfiles": "etc/tmpfiles.d/gpulease.conf",
    "gpulease.sysusers": "etc/sysusers.d/gpulease.conf",
    "gpuleased.toml": "etc/gpulease/gpuleased.toml",
}
"""The administrator's paths (systemd.unit(5), tmpfiles.d(5), sysusers.d(5)); a distribution's package would use /usr.
"""

OPERATORS_OWN: Final = "gpuleased.toml"
"""The file that is written if it is missing, and never replaced, because the operator edits it."""

FILE_MODE: Final = 0o644

NEXT_STEPS: Final = """\
Then:
  systemd-sysusers && systemd-tmpfiles --create     # the group gpulease, the workers' user, /run/gpulease
  usermod -aG gpulease USER                         # for each who may lease
  systemctl daemon-reload
  systemctl enable --now gpuleased.socket gpuleased.service
  gpulease info"""

_HIDDEN: Final = ("/tmp", "/var/tmp")
_HOMES: Final = ("/home", "/root", "/run/user")
_EXEC_START: Final = {
    "gpuleased.service": re.compile(r"^ExecStart=/usr/bin/gpuleased(?= )", re.MULTILINE),
    "gpulease-decode.service": re.compile(r"^ExecStart=/usr/bin/gpulease(?= )", re.MULTILINE),
}
"""Services that run this Python's code, and the lines that start them."""
_PROTECT_HOME: Final = re.compile(r"^ProtectHome=yes$", re.MULTILINE)
_SPECIAL: Final = re.compile(r'([\\"])')


@dataclass(frozen=True, slots=True)
class Environment:
    """The Python that runs the daemon.

    Attributes:
        command: Starts the daemon; options follow.
        variables: Environment variables that it needs, each NAME=VALUE.
        folders: Folders from which it reads its code.
    """

    command: tuple[str, ...]
    variables: tuple[str, ...]
    folders: tuple[Path, ...]

    @property
    def client_command(self) -> tuple[str, ...]:
        """The command that starts `gpulease` with the same Python; options follow."""
        program, *options = self.command
        if not options:
            return (str(Path(program).with_name("gpulease")),)
        return (program, "-P", "-m", "gpulease.client.cli")

    def under(self, tops: Sequence[str]) -> Path | None:
        """The first folder that is inside one of `tops`; None if none is."""
        return next((folder for folder in self.folders for top in tops if folder.is_relative_to(top)), None)


def this_environment() -> Environment:
    """Return the environment of this command. Raises MissingPrerequisite if the daemon is not installed."""
    daemon = find_spec("gpulease.daemon")
    if daemon is None or daemon.origin is None:
        raise MissingPrerequisite(
            "the daemon is not installed with this client: pip install '.[daemon]' in gpulease's repository"
        )
    package = Path(daemon.origin)
    python = Path(sys.executable)
    # The service must be able to read all of these, including the targets of symbolic links, and a virtual
    # environment's base.
    prefixes = (package.parent, package.resolve().parent, python, python.resolve(), Path(sys.base_prefix))
    # An installation has a script; in a checkout, the module is run.
    script = Path(sys.executable).with_name("gpuleased")
    if script.exists():
        return Environment((str(script),), (), prefixes)
    # In a checkout, the interpreter needs PYTHONPATH to find the packages.
    variables = (f"PYTHONPATH={package.parents[2]}",)
    return Environment((sys.executable, "-P", "-m", "gpulease.daemon"), variables, prefixes)


def filled_in(name: str, text: str, environment: Environment) -> str:
    """Return a packaged file with the environment's paths filled in."""
    # Only services that run this Python's code have paths to fill in.
    if name not in _EXEC_START:
        return text
    lines = [f"Environment={quoted(variable)}" for variable in environment.variables]
    program, *options = environment.command if name == "gpuleased.service" else environment.client_command
    lines.append(f"ExecStart={' '.join([quoted(program), *(quoted(word, is_option=True) for word in options)])}")
    # Pass a function as the replacement, because sub() would interpret backslashes in a path.
    text = _EXEC_START[name].sub(lambda _: "\n".join(lines), text)
    if environment.under(_HOMES) is not None:
        text = _PROTECT_HOME.sub("# Its Python is in a home folder.\nProtectHome=read-only", text)
    return text


def quoted(word: str, *, is_option: bool = False) -> str:
    """Quote a word for systemd (systemd.syntax(7), "Quoting"; systemd.unit(5), "Specifiers").

    Args:
        word: The word.
        is_option: Whether it follows the program, where systemd substitutes variables (systemd.service(5), "Command
            lines").
    """
    # systemd replaces specifiers (%) everywhere, variables ($) only after the program.
    doubled = word.replace("%", "%%")
    escaped = _SPECIAL.sub(r"\\\1", doubled.replace("$", "$$") if is_option else doubled)
    # Quote only words that need it, so that the unit stays readable.
    return f'"{escaped}"' if re.search(r"[\s'\"\\;]", word) else escaped


def _named(ctx: click.Context, param: click.Parameter, value: str) -> Path:
    if not value:
        # A script passes "" for an unset variable; as a path that would be the current folder.
        raise click.BadParameter("it is empty: name a folder, or leave the option out for /.", ctx, param)
    return Path(value)


@click.command("install-service")
@click.option(
    "--install", "installs", is_flag=True, help="Write the files below --root instead of printing them; as root."
)
@click.option("--print", "prints", is_flag=True, help="Print the files; this is the default.")
@click.option(
    "--root",
    type=click.Path(file_okay=False),
    callback=_named,
    default="/",
    help="The root of the file system to install into; by default, /.",
)
def install_service(installs: bool, prints: bool, root: Path) -> None:
    """Print the daemon's systemd units, its settings and the other files that it needs, or install them."""
    environment = this_environment()
    # Make every file before any is written.
    files = {name: filled_in(name, (UNITS / name).read_text("utf-8"), environment) for name in PLACES}
    hidden = environment.under(_HIDDEN)
    # A service with PrivateTmp= has another /tmp.
    if hidden is not None:
        complaint = (
            f"the service could not see {hidden}, because it has a separate {_HIDDEN[0]} (PrivateTmp=); "
            "install gpulease elsewhere, for example in /opt/gpulease"
        )
        if installs and root == Path("/"):
            raise MissingPrerequisite(complaint)
        click.echo(f"gpulease: {complaint}", err=True)
    # Printing is the default. Nothing is written without --install.
    if prints or not installs:
        if root != Path("/"):
            click.echo(f"gpulease: nothing was written below {root}, because --install is missing", err=True)
        for name, text in files.items():
            click.echo(f"# --- /{PLACES[name]}\n{text}")
        return
    for line in _install(files, root):
        click.echo(line)
    click.echo(NEXT_STEPS)


def _install(files: dict[str, str], root: Path) -> Iterator[str]:
    for name, text in files.items():
        path = root / PLACES[name]
        try:
            yield f"{path} {_write(path, text, is_operators=name == OPERATORS_OWN)}"
        except OSError as error:
            fix = "; run this command as root" if isinstance(error, PermissionError) and os.geteuid() != 0 else ""
            raise MissingPrerequisite(f"{path} can't be written: {error.strerror}{fix}") from None


def _write(path: Path, text: str, *, is_operators: bool) -> str:
    """Replace a file atomically; returns a phrase that says what happened. Raises OSError."""
    # Leave an identical file alone, and never replace one of the operator's.
    if path.exists():
        if path.read_text("utf-8", errors="replace") == text:
            return "is up to date"
        if is_operators:
            return "was not changed: it is the operator's own file"
    path.parent.mkdir(parents=True, exist_ok=True)
    # Write to a new file and rename it: a reader gets either the old text or the new one.
    new = path.with_name(f".{path.name}.new")
    new.unlink(missing_ok=True)
    fd = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, FILE_MODE)
    with os.fdopen(fd, "w", encoding="utf-8") as file:
        file.write(text)
        os.fchmod(fd, FILE_MODE)
    was_there = path.exists()
    new.rename(path)
    return "is replaced" if was_there else "is written"
