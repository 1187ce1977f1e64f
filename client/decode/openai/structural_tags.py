"""Structural tags, as in vLLM's `structural_tag`: free text that contains tags, each with content of a given form.

A trigger is a text that begins one or more of the tags. The answer is free text up to a trigger. Then comes one of the
tags that begin with this trigger: the rest of the tag's `begin`, the content, and the tag's `end`. Free text follows
again. A request has either this form:

    {"triggers": ["<f="], "structures": [{"begin": "<f=add>", "schema": {...}, "end": "</f>"}]}

or xgrammar's form, in which a content may also be a regular expression or a fixed text:

    {"format": {"type": "triggered_tags", "triggers": ["<f="], "tags": [
        {"begin": "<f=add>", "content": {"type": "json_schema", "json_schema": {...}}, "end": "</f>"}]}}
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from gpulease.client.decode.openai.api_errors import invalid
from gpulease.client.decode.text.grammar import json_rule, regex_rule, string_literal
from gpulease.client.texts import quoted

MAX_TAGS: Final = 128
"""Maximum number of tags, and of triggers. Equal to MAX_TOOLS, because tags are often tool calls."""

MAX_TAG_CHARACTERS: Final = 1024
"""Maximum length of a tag's begin, end or trigger. Equal to MAX_STOP_CHARACTERS."""

_FORMAT_MEMBERS: Final = ("type", "triggers", "tags", "at_least_one", "stop_after_first")


@dataclass(frozen=True, slots=True)
class Tag:
    """A tag.

    Attributes:
        trigger: The trigger with which the tag begins.
        begin: The text before the content, including the trigger.
        rule: The grammar's rule for the content.
        end: The text after the content; may be "".
    """

    trigger: str
    begin: str
    rule: str
    end: str


@dataclass(frozen=True, slots=True)
class StructuralTags:
    """The tags of an answer.

    Attributes:
        triggers: The triggers, none of which is part of another.
        tags: The tags, at least one for each trigger.
        is_required: Whether the answer must contain at least one tag.
        is_single: Whether the answer ends after its first tag.
    """

    triggers: tuple[str, ...]
    tags: tuple[Tag, ...]
    is_required: bool
    is_single: bool

    def grammar(self, special_token: Callable[[str], int | None]) -> str:
        """Return the answer's grammar.

        `special_token` maps the name of a special token to its id in the model; None if the model has no such token. If
        a trigger is the name of a special token, the model emits that token, which never matches text.
        """
        rules = []
        for number, trigger in enumerate(self.triggers):
            token = special_token(trigger)
            if token is None:
                # Match text up to the first occurrence of the trigger: the shortest lexeme that ends with the trigger.
                rules.append(f"until_{number}[lazy]: TEXT {string_literal(trigger)}")
            begin = f"until_{number}" if token is None else f"TEXT? <[{token}]>"
            own = [place for place, tag in enumerate(self.tags) if tag.trigger == trigger]
            rules.append(f"tagged_{number}: {begin} (" + " | ".join(f"tag_{place}" for place in own) + ")")
        for place, tag in enumerate(self.tags):
            parts = [tag.begin.removeprefix(tag.trigger), tag.end]
            before, behind = (f"{string_literal(part)} " if part else "" for part in parts)
            # Put the content on a separate line, because the grammar's check counts the cost of regular expressions by
            # line.
            rules += [f"content_{place}: {tag.rule}", f"tag_{place}: {before}content_{place} {behind}".rstrip()]
        rules.append("tagged: " + " | ".join(f"tagged_{number}" for number in range(len(self.triggers))))
        if self.is_single:
            start = "tagged" if self.is_required else "tagged | TEXT"
        else:
            start = "tagged+ TEXT" if self.is_required else "tagged* TEXT"
        return "\n".join(["%llguidance {}", f"start: {start}", *rules, r"TEXT: /(.|\n)*/"])


def structural_tags(name: str, value: Any, parameter: str) -> StructuralTags:
    """Parse a structural tag, an object or a string of JSON. Raises ApiError, which names `parameter`."""
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except (ValueError, RecursionError):
            raise invalid(f"{name} must be an object, or a string with its JSON", parameter) from None
    if not isinstance(value, dict):
        raise invalid(f"{name} must be an object, or a string with its JSON, not {quoted(value)}", parameter)
    reader = _TagReader(name, parameter)
    if "format" in value:
        reader.check_members("", value, ("type", "format"))
        return reader.of_format(value["format"])
    reader.check_members("", value, ("type", "triggers", "structures"))
    items = reader.items("structures", value.get("structures"))
    parts = []
    for where, item in items:
        reader.check_members(where, item, ("begin", "schema", "end"))
        # vLLM also accepts a schema as a string of JSON.
        parts.append((where, item, json_rule(reader.schema(where, item.get("schema")))))
    return reader.tags(value.get("triggers"), parts, is_required=False, is_single=False)


class _TagReader:
    """Parses the parts of one structural tag. Errors begin with `name`, and their parameter is `parameter`."""

    def __init__(self, name: str, parameter: str) -> None:
        self._name, self._parameter = name, parameter

    def of_format(self, value: Any) -> StructuralTags:
        if not isinstance(value, dict) or value.get("type") != "triggered_tags":
            kind = value.get("type") if isinstance(value, dict) else value
            raise self._wrong(f"format must have the type triggered_tags, not {quoted(kind)}")
        self.check_members("format", value, _FORMAT_MEMBERS)
        parts = []
        for where, item in self.items("format.tags", value.get("tags")):
            self.check_members(where, item, ("type", "begin", "content", "end"))
            parts.append((where, item, self._content(where, item.get("content"))))
        is_required, is_single = (
            self._flag(f"format.{name}", value.get(name)) for name in ("at_least_one", "stop_after_first")
        )
        return self.tags(value.get("triggers"), parts, is_required=is_required, is_single=is_single)

    def tags(
        self, triggers: Any, parts: list[tuple[str, Mapping[str, Any], str]], *, is_required: bool, is_single: bool
    ) -> StructuralTags:
        if not isinstance(triggers, list) or not 0 < len(triggers) <= MAX_TAGS:
            raise self._wrong(f"triggers must be a list of 1 to {MAX_TAGS} strings")
        texts = [self._text(f"triggers[{number}]", trigger) for number, trigger in enumerate(triggers)]
        for number, text in enumerate(texts):
            if any(text in other for place, other in enumerate(texts) if place != number):
                raise self._wrong(f"triggers[{number}] is part of another trigger, which would never be reached")
        tags = []
        for where, item, rule in parts:
            begin = self._text(f"{where}.begin", item.get("begin"))
            trigger = next((text for text in texts if begin.startswith(text)), None)
            if trigger is None:
                raise self._wrong(f"{where}.begin must begin with one of the triggers")
            end = item.get("end")
            tags.append(Tag(trigger, begin, rule, "" if end == "" else self._text(f"{where}.end", end)))
        for text in texts:
            if all(tag.trigger != text for tag in tags):
                raise self._wrong(f"triggers: no tag begins with {quoted(text)}")
        return StructuralTags(tuple(texts), tuple(tags), is_required, is_single)

    def items(self, where: str, value: Any) -> list[tuple[str, Mapping[str, Any]]]:
        """Return the objects of a list, each with its place, such as "structures[0]", for errors. Raises ApiError."""
        if (
            not isinstance(value, list)
            or not 0 < len(value) <= MAX_TAGS
            or not all(isinstance(item, dict) for item in value)
        ):
            raise self._wrong(f"{where} must be a list of 1 to {MAX_TAGS} objects")
        return [(f"{where}[{number}]", item) for number, item in enumerate(value)]

    def check_members(self, where: str, item: Mapping[str, Any], members: tuple[str, ...]) -> None:
        for name, value in item.items():
            if name not in members and value not in (None, []):
                place = f"{where}." if where else ""
                raise invalid(f"{self._name}.{place}{quoted(name)} is not supported", self._parameter)

    def schema(self, where: str, value: Any) -> Mapping[str, Any]:
        if isinstance(value, str):
            try:
                value = json.loads(value)
            except (ValueError, RecursionError):
                value = None
        if not isinstance(value, dict):
            raise self._wrong(f"{where} must have a JSON Schema, an object")
        return value

    def _content(self, where: str, value: Any) -> str:
        kind = value.get("type") if isinstance(value, dict) else None
        if kind == "json_schema":
            self.check_members(f"{where}.content", value, ("type", "json_schema"))
            return json_rule(self.schema(f"{where}.content", value.get("json_schema")))
        if kind == "regex":
            self.check_members(f"{where}.content", value, ("type", "pattern"))
            return regex_rule(self._text(f"{where}.content.pattern", value.get("pattern")))
        if kind == "const_string":
            self.check_members(f"{where}.content", value, ("type", "value"))
            return string_literal(self._text(f"{where}.content.value", value.get("value")))
        kinds = "json_schema, regex or const_string"
        raise self._wrong(f"{where}.content must have the type {kinds}, not {quoted(kind)}")

    def _text(self, where: str, value: Any) -> str:
        is_text = isinstance(value, str) and 0 < len(value) <= MAX_TAG_CHARACTERS
        # Refuse lone surrogates, which JSON allows.
        if not is_text or any("\ud800" <= character <= "\udfff" for character in value):
            raise self._wrong(f"{where} must be a string of 1 to {MAX_TAG_CHARACTERS} characters")
        return str(value)

    def _flag(self, where: str, value: Any) -> bool:
        if value is None or isinstance(value, bool):
            return bool(value)
        raise self._wrong(f"{where} must be true or false, not {quoted(value)}")

    def _wrong(self, text: str) -> Exception:
        return invalid(f"{self._name}.{text}", self._parameter)
