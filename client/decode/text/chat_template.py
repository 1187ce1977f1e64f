"""Chat templates: Jinja, in its sandbox, with what Hugging Face's templates expect.

The names and filters are those of transformers' chat_template_utils. A template is code of the model's author. The
sandbox keeps it from the host's objects. Products of texts, powers, ranges and the prompt that comes out are bounded
here. The time that it takes is not, and neither is all memory: a text can be doubled, padded or replaced without end.
So a template that works for several tenants runs in a process with limits (text_processes.py).
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
"""Longest template. Stops a file from being compiled for minutes."""

MAX_PROMPT_CHARACTERS: Final = 16 << 20
"""Longest prompt that a template may make. Stops a template, or a message that it repeats, from filling memory."""

MAX_REPEATED_CHARACTERS: Final = 1 << 20
"""Longest text or list that a product in a template may make, for the same reason."""

MAX_SAID_CHARACTERS: Final = 1000
"""Most characters of a template's own words in an error. Stops one that repeats a message from sending it back."""


class ChatTemplate:
    """Makes a prompt of a chat.

    Attributes:
        arguments: What it was made of, for another one in another process.
    """

    def __init__(self, source: str, tokens: Mapping[str, str], where: str) -> None:
        """Compile a template.

        Args:
            source: Its text.
            tokens: The texts of special tokens by the names that templates use, such as `bos_token`.
            where: The file that it is of, for errors.

        Raises ModelRejected for a template with a mistake in it.
        """
        if len(source) > MAX_TEMPLATE_CHARACTERS:
            raise ModelRejected(
                f"{where}: a chat template of {len(source):,} characters; it may have {MAX_TEMPLATE_CHARACTERS:,}"
            )
        try:
            self._template = _environment().from_string(source)
        except (jinja2.TemplateError, RecursionError, ValueError) as error:
            raise ModelRejected(f"{where}: the chat template is broken: {error}") from None
        self._tokens = dict(tokens)
        self.arguments = (source, self._tokens, where)

    def render(self, messages: Sequence[Mapping[str, Any]], **variables: Any) -> str:
        """Make the prompt that asks for the next turn.

        Args:
            messages: Each with `role` and `content`, the first one first.
            variables: What the template takes besides.

        Raises RequestRejected for messages that the template does not take, with its own words.
        """
        given = {"add_generation_prompt": True, "tools": None, "documents": None} | self._tokens | variables
        pieces, size = [], 0
        try:
            for piece in self._template.generate(messages=list(messages), **given):
                size += len(piece)
                if size > MAX_PROMPT_CHARACTERS:
                    raise RequestRejected(f"the chat is a prompt of more than {MAX_PROMPT_CHARACTERS:,} characters")
                pieces.append(piece)
        except (RequestRejected, MemoryError):
            raise
        except Exception as error:  # a template can fail in any way that Python can
            said = str(error)[:MAX_SAID_CHARACTERS]
            raise RequestRejected(f"the model's chat template does not take these messages: {said}") from None
        return "".join(pieces)


class _Environment(ImmutableSandboxedEnvironment):
    """The sandbox, with products bounded: of a text and a number they can be as long as the number says."""

    intercepted_binops = frozenset({"*", "**"})

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        numbers = isinstance(left, int | float) and isinstance(right, int | float)
        if operator == "**":
            raise jinja2.exceptions.SecurityError("powers are not computed")
        if not numbers:
            size, count = (right, left) if isinstance(left, int) else (left, right)
            if isinstance(count, int) and len(size) * count > MAX_REPEATED_CHARACTERS:
                raise jinja2.exceptions.SecurityError(f"a product longer than {MAX_REPEATED_CHARACTERS:,}")
        return super().call_binop(context, operator, left, right)


class _Generation(Extension):
    """The block `generation`, which marks an assistant's words for those who train."""

    tags = {"generation"}  # noqa: RUF012  # an instance variable to its base class

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _environment() -> _Environment:
    # Nothing of a template is computed while it is compiled: it is loaded where no limits hold.
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
    """Return an expression's value: one that takes the context is not computed before there is one."""
    return value


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # Jinja's own escapes what HTML would read.
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise(message: str) -> NoReturn:
    raise jinja2.exceptions.TemplateError(message)


def _now(form: str) -> str:
    return datetime.now().strftime(form)
