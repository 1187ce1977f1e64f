"""The formats in which models write tool calls: for each, a grammar that enforces it and a parser of the calls.

The model's chat template shows the format. The grammar fixes every character of a call except its arguments, and these
match the tool's schema. So the parser never has to guess. The supported formats are those of Hermes (Qwen2.5, Qwen3),
Llama 3 and Mistral.
"""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from gpulease.client.decode.text.grammar import json_rule

NAME: Final = re.compile(r"[A-Za-z0-9_-]{1,64}")
"""The form of a tool's name in OpenAI's API. In JSON, such a name needs no escapes."""


@dataclass(frozen=True, slots=True)
class Tool:
    """A function that the model may call.

    Attributes:
        name: Its name.
        parameters: The JSON Schema of its arguments.
    """

    name: str
    parameters: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class ToolFormat:
    """The format in which a family of models writes calls.

    Attributes:
        name: The format's name.
        mark: A text that occurs only in the chat templates of these models.
        trigger: The text or special token before the first call; "" if there is none. In a format without a trigger, an
            answer consists of calls if its first character is "{".
        first: The text between the trigger and the first call.
        arguments: The name of the member with the arguments.
        between: The text between two calls, including the trigger if it is repeated.
        last: The text after the last call.
    """

    name: str
    mark: str
    trigger: str
    first: str
    arguments: str
    between: str
    last: str

    def head(self, name: str) -> str:
        """Return the part of a call before its arguments."""
        return f'{{"name": "{name}", "{self.arguments}": '


HERMES: Final = ToolFormat(
    "hermes", "<tool_call>", "<tool_call>", "\n", "arguments", "\n</tool_call>\n<tool_call>\n", "\n</tool_call>"
)
MISTRAL: Final = ToolFormat("mistral", "[TOOL_CALLS]", "[TOOL_CALLS]", "[", "arguments", ", ", "]")
LLAMA_3: Final = ToolFormat("llama3", '"parameters"', "", "", "parameters", "; ", "")

FORMATS: Final = (HERMES, MISTRAL, LLAMA_3)
"""All formats, in the order in which their marks are searched for in a template."""


def format_of(template: str) -> ToolFormat | None:
    """Return the format that a model's chat template uses; None if the template has no tools or an unknown format."""
    if "tools" not in template:
        return None
    return next((tool_format for tool_format in FORMATS if tool_format.mark in template), None)


def tool_format_of(name: str) -> ToolFormat:
    return next(tool_format for tool_format in FORMATS if tool_format.name == name)


def tool_grammar(
    written: ToolFormat,
    tools: Sequence[Tool],
    *,
    is_required: bool,
    is_parallel: bool,
    trigger_token: int | None,
    answer: str,
) -> str:
    """Return the grammar of an answer with calls.

    Args:
        written: The format.
        tools: The tools that may be called.
        is_required: Whether the answer must consist of calls. Otherwise it may be text, or text followed by calls, as
            well.
        is_parallel: Whether the answer may have several calls.
        trigger_token: The id of the special token that is the format's trigger; None if the trigger is text.
        answer: The grammar's rule for an answer without calls (`json_rule`); "" if any text is allowed.
    """
    quote = json.dumps
    trigger = f"<[{trigger_token}]>" if trigger_token is not None else quote(written.trigger) if written.trigger else ""
    rules = [
        f"call_{number}: {quote(written.head(tool.name))} {json_rule(tool.parameters)} {quote('}')}"
        for number, tool in enumerate(tools)
    ]
    rules.append("call: " + " | ".join(f"call_{number}" for number in range(len(tools))))
    repetition = f" ({quote(written.between)} call)*" if is_parallel else ""
    first = f"{quote(written.first)} " if written.first else ""
    last = f" {quote(written.last)}" if written.last else ""
    rules.append(f"calls: {first}call{repetition}{last}")
    begin = f"{trigger} " if trigger else ""
    if is_required:
        rules.append(f"start: {begin}calls")
    elif answer:
        rules += [f"start: {begin}calls | answer", f"answer: {answer}"]
    elif trigger_token is not None:
        # Text never matches a special token, so the token alone begins calls.
        rules += [f"start: TEXT? ({begin}calls)?", r"TEXT: /(.|\n)+/"]
    elif written.trigger:
        # Match text up to the first occurrence of the trigger: the shortest lexeme that ends with the trigger.
        rules += ["start: called | TEXT", "called: until calls", f"until[lazy]: TEXT {trigger}", r"TEXT: /(.|\n)*/"]
    else:
        # Without a trigger, the first character decides: "{" begins a call, anything else begins text.
        rules += ["start: calls | TEXT", r"TEXT: /([^{](.|\n)*)?/"]
    return "%llguidance {}\n" + "\n".join(rules)


@dataclass(slots=True)
class CallPart:
    """A piece of a call.

    Attributes:
        index: The call's index in the answer, from 0.
        name: The tool's name, in the call's first piece; otherwise "".
        arguments: A piece of the arguments' JSON text.
    """

    index: int
    name: str
    arguments: str


class ToolCallParser:
    """Separates the calls from the text of an answer that arrives piece by piece.

    Attributes:
        calls: Number of calls that have begun.
    """

    def __init__(self, written: ToolFormat) -> None:
        self.calls = 0
        self._written = written
        self._head = re.compile(rf'\{{"name": "({NAME.pattern})", "{written.arguments}": ')
        self._buffer = ""
        # The parser's position: in "text", "between" calls, or in a call's "arguments".
        self._state = "text"
        self._depth, self._in_text, self._is_escaped = 0, False, False

    def add(self, text: str) -> tuple[str, list[CallPart]]:
        """Add a piece of the answer. Returns its text outside calls, and its pieces of calls."""
        self._buffer += text
        visible, parts = "", list[CallPart]()
        while self._buffer:
            before = self._state, len(self._buffer)
            if self._state == "text":
                visible += self._read_text()
            elif self._state == "between":
                self._read_call_head(parts)
            else:
                parts.append(CallPart(self.calls - 1, "", self._read_arguments()))
            # Without a change, the parser needs more text.
            if before == (self._state, len(self._buffer)):
                break
        return visible, [part for part in parts if part.name or part.arguments]

    def end(self) -> str:
        """End the answer. Returns the text that was held back as the possible beginning of a trigger."""
        text, self._buffer = self._buffer, ""
        return text if self._state == "text" else ""

    def _read_text(self) -> str:
        trigger = self._written.trigger
        if not trigger:
            # The first character decides whether the answer is calls or text.
            if self._buffer.startswith("{"):
                self._state = "between"
                return ""
            self._written = _TEXT_ONLY
            return self._read_text()
        at = self._buffer.find(trigger)
        if at >= 0:
            self._state = "between"
            visible, self._buffer = self._buffer[:at], self._buffer[at + len(trigger) :]
            return visible
        # Hold back text that may be the beginning of the trigger.
        overlap = next(size for size in range(len(trigger) - 1, -1, -1) if self._buffer.endswith(trigger[:size]))
        visible, self._buffer = self._buffer[: len(self._buffer) - overlap], self._buffer[len(self._buffer) - overlap :]
        return visible

    def _read_call_head(self, parts: list[CallPart]) -> None:
        """Skip the text between calls, and parse the head of the next call when it is complete."""
        if (match := self._head.search(self._buffer)) is not None:
            parts.append(CallPart(self.calls, match[1], ""))
            self.calls += 1
            self._buffer = self._buffer[match.end() :]
            self._state, self._depth, self._in_text, self._is_escaped = "arguments", 0, False, False

    def _read_arguments(self) -> str:
        """Return the available part of the arguments' JSON text, which ends before the call's closing bracket."""
        for place, letter in enumerate(self._buffer):
            if self._in_text:
                self._in_text = self._is_escaped or letter != '"'
                self._is_escaped = letter == "\\" and not self._is_escaped
            elif letter == '"':
                self._in_text = True
            elif letter in "[{":
                self._depth += 1
            elif letter in "]}":
                self._depth -= 1
                if self._depth < 0:
                    arguments, self._buffer = self._buffer[:place], self._buffer[place + 1 :]
                    self._state = "between"
                    return arguments
        arguments, self._buffer = self._buffer, ""
        return arguments


_TEXT_ONLY: Final = ToolFormat("text", "", "\x00\x00", "", "", "", "")
"""A format with a trigger that never occurs. The parser switches to it when an answer turns out to be text."""
