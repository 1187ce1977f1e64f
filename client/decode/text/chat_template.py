"""Chat templates: Jinja, in its sandbox, with the names and filters that Hugging Face's templates expect.

The names and filters are those of transformers' chat_template_utils. A template is code written by the model's author.
The sandbox denies it access to the host's objects. Products of texts, powers, ranges and the resulting prompt are
limited here. Time, and memory used in other ways, are not: a template can double, pad or replace a text endlessly. So a
server for several tenants runs templates in a process with limits (text_processes.py).
"""

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any, Final, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from gpulease.client.decode.decode_errors import ModelRejected, RequestRejected

MAX_TEMPLATE_CHARACTERS: Final = 1 << 20
"""Longest template. Compiling a longer one could take minutes."""

MAX_PROMPT_CHARACTERS: Final = 16 << 20
"""Longest prompt that a template may produce. A template that repeats a message can't fill the memory."""

MAX_REPEATED_CHARACTERS: Final = 1 << 20
"""Longest text or list that a product in a template may produce, for the same reason."""

MAX_ERROR_CHARACTERS: Final = 1000
"""Maximum number of characters of a template's error message that are passed on, so that it can't repeat a whole
chat."""


_END_MARK: Final = "CONTINUE_FINAL_MESSAGE_TAG "
"""Appended to a message to find its end in the prompt. transformers' chat_template_utils uses the same mark."""


class ChatTemplate:
    """Turns a chat into a prompt.

    Attributes:
        arguments: The constructor's arguments, with which another process can make the same template.
    """

    def __init__(self, source: str, tokens: Mapping[str, str], where: str) -> None:
        """Compile a template.

        Args:
            source: The text of the template.
            tokens: The texts of special tokens by the names that templates use, such as `bos_token`.
            where: The file that contains it, for errors.

        Raises ModelRejected for a template with a syntax error.
        """
        if len(source) > MAX_TEMPLATE_CHARACTERS:
            raise ModelRejected(
                f"{where}: a chat template must have at most {MAX_TEMPLATE_CHARACTERS:,} characters, not "
                f"{len(source):,}"
            )
        try:
            # A new environment per template, so that templates share no state.
            self._template = _environment().from_string(source)
        except (jinja2.TemplateError, RecursionError, ValueError) as error:
            raise ModelRejected(f"{where}: the chat template is invalid: {error}") from None
        self._tokens = dict(tokens)
        self.arguments = (source, self._tokens, where)

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        variables: Mapping[str, Any] = {},  # it is not changed
        *,
        continues: bool = False,
    ) -> str:
        """Return the prompt for the assistant's next turn.

        Args:
            messages: The chat in order; each message has `role` and `content`.
            variables: Further variables of the template.
            continues: Whether the prompt ends with the last message's content instead, so that the model continues it,
                like transformers' `continue_final_message`.

        Raises RequestRejected, with the template's error message, for messages that the template refuses, and, if
        `continues` is true, for a last message that the template does not reproduce unchanged.
        """
        # The names that Hugging Face's templates expect; the caller's variables take precedence.
        context: dict[str, Any] = {"add_generation_prompt": not continues, "tools": None, "documents": None}
        context |= {**self._tokens, **variables, "messages": list(messages)}
        if continues:
            *before, last = messages
            context["messages"] = [*before, {**last, "content": f"{last['content']}{_END_MARK}"}]
        # Render piece by piece, so that a template that never ends is stopped at the limit.
        pieces, size = [], 0
        try:
            for piece in self._template.generate(context):
                size += len(piece)
                if size > MAX_PROMPT_CHARACTERS:
                    raise RequestRejected(f"the chat is a prompt of more than {MAX_PROMPT_CHARACTERS:,} characters")
                pieces.append(piece)
        except (RequestRejected, MemoryError):
            raise
        except Exception as error:  # a template can fail in any way that Python can
            reason = str(error)[:MAX_ERROR_CHARACTERS]
            raise RequestRejected(f"the model's chat template does not accept these messages: {reason}") from None
        text = "".join(pieces)
        return _up_to_mark(text, messages[-1]["content"]) if continues else text


def _up_to_mark(text: str, content: str) -> str:
    """Return a prompt up to the mark, which follows the last message's content."""
    place = text.rfind(_END_MARK.strip())
    if place < 0 or content.strip() not in text:
        raise RequestRejected(
            "the model's chat template does not show the last message as it is, so no answer can continue it",
            parameter="continue_final_message",
        )
    before = text[:place]
    # A template that trims messages strips the mark's space. It would have stripped the content's spaces, too.
    return before if text[place : place + len(_END_MARK)] == _END_MARK else before.rstrip()


class _Environment(ImmutableSandboxedEnvironment):
    """The sandbox, with a limit on products: "x" * N is a string of N characters."""

    intercepted_binops = frozenset({"*", "**"})

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        numbers = isinstance(left, int | float) and isinstance(right, int | float)
        # A power of small numbers can take gigabytes of memory.
        if operator == "**":
            raise jinja2.exceptions.SecurityError("powers are not computed")
        # The operands are a string or list and a number, in either order.
        if not numbers:
            size, count = (right, left) if isinstance(left, int) else (left, right)
            if isinstance(count, int) and len(size) * count > MAX_REPEATED_CHARACTERS:
                raise jinja2.exceptions.SecurityError(f"a product longer than {MAX_REPEATED_CHARACTERS:,}")
        return super().call_binop(context, operator, left, right)


class _Generation(Extension):
    """The block `generation`, which marks the assistant's words for training. Here it just renders its content."""

    tags = {"generation"}  # noqa: RUF012  # an instance variable to its base class

    def parse(self, parser: Parser) -> list[nodes.Node]:
        # Skip the tag itself, and keep the block's content.
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _environment() -> _Environment:
    # The server compiles templates without limits, so compiling must not evaluate any part of them. Turn off constant
    # folding (`optimized`), and use a `finalize` that takes the context, which exists only when a template is rendered.
    environment = _Environment(
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=[_Generation, loopcontrols],
        optimized=False,
        finalize=_when_rendered,
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise
    environment.globals["strftime_now"] = _now
    return environment


@jinja2.pass_context
def _when_rendered(_: Any, value: Any) -> Any:
    """Return an expression's value unchanged. Because it takes the context, Jinja can't call it while compiling."""
    return value


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # Jinja's own filter escapes HTML characters, which would change the prompt.
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise(message: str) -> NoReturn:
    raise jinja2.exceptions.TemplateError(message)


def _now(form: str) -> str:
    return datetime.now().strftime(form)
