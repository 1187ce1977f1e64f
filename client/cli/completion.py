"""`gpulease completion`: prints a shell's completion script for `gpulease`."""

import click
from click.shell_completion import get_completion_class

SHELLS = ("bash", "zsh", "fish")


@click.command()
@click.argument("shell", type=click.Choice(SHELLS))
def completion(shell: str) -> None:
    """Print a script with which SHELL completes commands, options and the lease ids that the daemon lists.

    bash: eval "$(gpulease completion bash)" in ~/.bashrc; zsh: the same with zsh in ~/.zshrc;
    fish: gpulease completion fish > ~/.config/fish/completions/gpulease.fish
    """
    kind = get_completion_class(shell)
    # All choices of the argument have a class now. A newer click may drop one.
    if kind is None:
        raise click.UsageError(f"this version of click has no completion script for {shell}")
    root = click.get_current_context().find_root().command
    # Fill in the template here, because click's own method would start the shell to ask for its version.
    script = kind(root, {}, "gpulease", "_GPULEASE_COMPLETE")
    click.echo(script.source_template % script.source_vars())
