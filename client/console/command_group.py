"""A group of commands that ends as every command does: with a sentence for every failure, or by the interrupt."""

from typing import Any

import click

from gpulease.client.console.exit_status import check_words, failures_as_sentences


class CommandGroup(click.Group):
    """Reports a failure as a sentence, never as a traceback. An interrupt ends the process by its signal."""

    def make_context(self, info_name: str | None, args: list[str], *more: Any, **kwargs: Any) -> click.Context:
        # Report failures while the command line is parsed as sentences, too.
        with failures_as_sentences():
            check_words(args)
            return super().make_context(info_name, args, *more, **kwargs)

    def invoke(self, ctx: click.Context) -> Any:
        with failures_as_sentences():
            return super().invoke(ctx)
