"""A group of commands that reports each failure as one sentence for the user."""

from typing import Any

import click

from gpulease.client.console.exit_status import check_words, failures_as_sentences


class CommandGroup(click.Group):
    """Reports a failure as a sentence, never as a traceback. On an interrupt, the process dies of SIGINT."""

    def make_context(self, info_name: str | None, args: list[str], *more: Any, **kwargs: Any) -> click.Context:
        # Parsing the command line may fail, too: report that in the same way.
        with failures_as_sentences():
            check_words(args)
            return super().make_context(info_name, args, *more, **kwargs)

    def invoke(self, ctx: click.Context) -> Any:
        with failures_as_sentences():
            return super().invoke(ctx)
