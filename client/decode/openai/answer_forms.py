"""The form that a request requires of its answer: JSON by a schema, a regular expression, a choice, a grammar, or tags.

The form becomes a grammar, which restricts the tokens of the answer. The parameters of several servers are accepted.
OpenAI has `response_format`; vLLM `structured_outputs`, `structural_tag` and the older `guided_json`, `guided_regex`,
`guided_choice` and `guided_grammar`; llama.cpp `json_schema` and `grammar`; SGLang `regex` and `ebnf`.
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Final

from gpulease.client.decode.openai.api_errors import invalid
from gpulease.client.decode.openai.request_parameters import STRUCTURED_OUTPUTS, check_parameters
from gpulease.client.decode.openai.structural_tags import StructuralTags, structural_tags
from gpulease.client.decode.text.grammar import choice_rule, json_rule, regex_rule
from gpulease.client.decode.text.written_grammar import lark_of
from gpulease.client.texts import quoted

MAX_FORM_CHOICES: Final = 1024
"""Maximum number of texts from which an answer may be chosen."""


@dataclass(frozen=True, slots=True)
class AnswerForm:
    """The form of an answer. Exactly one attribute besides `parameter` is not None.

    Attributes:
        parameter: The name of the request's parameter that gave the form, for errors.
        schema: The JSON Schema of the answer.
        regex: A regular expression that the whole answer matches.
        choices: The texts of which the answer must be one.
        grammar: A grammar of the answer as the request wrote it, in EBNF or Lark (see text/written_grammar.py).
        tags: The tags in the answer's text.
    """

    parameter: str
    schema: Mapping[str, Any] | None = None
    regex: str | None = None
    choices: tuple[str, ...] | None = None
    grammar: str | None = None
    tags: StructuralTags | None = None

    @property
    def is_text(self) -> bool:
        """Whether the answer is free text, of which even a part, up to a stop, is useful. JSON and choices are not."""
        return not (self.regex is None and self.grammar is None and self.tags is None)

    @property
    def is_own_grammar(self) -> bool:
        """Whether the form is a complete grammar, which can't become a rule of another grammar."""
        return not (self.grammar is None and self.tags is None)

    def whole_grammar(self, special_token: Callable[[str], int | None]) -> str:
        """Return the grammar of a whole answer.

        `special_token` returns the id of the special token with a name, or None if the model has none. Raises
        GrammarRefused if the form can't be a grammar.
        """
        if self.tags is not None:
            return self.tags.grammar(special_token)
        return f"start: {self.rule()}" if self.grammar is None else lark_of(self.grammar)

    def rule(self) -> str:
        """Return the grammar's rule for texts of this form. Call this only if `is_own_grammar` is false."""
        if self.regex is not None:
            return regex_rule(self.regex)
        return json_rule(self.schema or {}) if self.choices is None else choice_rule(self.choices)


def form_of(parameters: Mapping[str, Any], *, is_chat: bool) -> AnswerForm | None:
    """Return the form of a request's answer; None if any text is allowed.

    The caller has checked the names of the parameters. Raises ApiError if a form is invalid, or if there are several.
    """
    forms = [form for name, read in _FORMS.items() if (form := read(name, parameters.get(name), is_chat)) is not None]
    if len(forms) > 1:
        first, second = (form.parameter for form in forms[:2])
        raise invalid(f"{first} and {second} can't be combined: an answer has one form", second)
    return forms[0] if forms else None


def _response_format(name: str, value: Any, _: bool) -> AnswerForm | None:
    if value is None:
        return None
    kind = value.get("type") if isinstance(value, dict) else None
    if kind == "text":
        return None
    if kind == "structural_tag":
        return AnswerForm(name, tags=structural_tags(name, value, name))
    if kind not in ("json_object", "json_schema"):
        raise invalid("response_format must have the type text, json_object, json_schema or structural_tag", name)
    # In OpenAI's API the schema is in the member json_schema. llama.cpp's clients put it next to the type, also for
    # json_object.
    schema_object = value.get("json_schema") if kind == "json_schema" else None
    schema = schema_object.get("schema") if isinstance(schema_object, dict) else value.get("schema")
    if kind == "json_object" and schema is None:
        return AnswerForm(name, {"type": "object"})
    if not isinstance(schema, dict):
        raise invalid("response_format.json_schema must be an object whose schema is an object", name)
    return AnswerForm(name, schema)


def _structured_outputs(name: str, value: Any, is_chat: bool) -> AnswerForm | None:
    if value is None:
        return None
    if not isinstance(value, dict):
        raise invalid(f"{name} = {quoted(value)}; send an object", name)
    check_parameters(value, STRUCTURED_OUTPUTS, is_chat=is_chat, where=f"{name}.")
    forms = {key: read for key, read in _OUTPUTS.items() if (one := value.get(key)) is not None and one is not False}
    if len(forms) != 1:
        raise invalid(f"{name} must have exactly one of {', '.join(_OUTPUTS)}", name)
    ((key, read),) = forms.items()
    form = read(f"{name}.{key}", value[key], is_chat)
    # An error names the parameter at the top level of the body.
    return None if form is None else replace(form, parameter=name)


def _json(name: str, value: Any, _: bool) -> AnswerForm | None:
    if value is None:
        return None
    schema = value
    if isinstance(value, str):
        # vLLM also accepts a schema as a string of JSON.
        try:
            schema = json.loads(value)
        except (ValueError, RecursionError):
            schema = None
    if not isinstance(schema, dict):
        raise invalid(
            f"{name} must be a JSON Schema, as an object or a string of JSON, not {quoted(value)}",
            _top_level_name(name),
        )
    return AnswerForm(name, schema)


def _json_object(name: str, value: Any, _: bool) -> AnswerForm | None:
    if value is not True:
        raise invalid(f"{name} = {quoted(value)}; send true or false", _top_level_name(name))
    return AnswerForm(name, {"type": "object"})


def _regex(name: str, value: Any, _: bool) -> AnswerForm | None:
    if value is None:
        return None
    if not is_unicode_text(value):
        raise invalid(f"{name} must be a regular expression, a string that is not empty", _top_level_name(name))
    return AnswerForm(name, regex=value)


def _choice(name: str, value: Any, _: bool) -> AnswerForm | None:
    if value is None:
        return None
    if not isinstance(value, list) or not 0 < len(value) <= MAX_FORM_CHOICES or not all(map(is_unicode_text, value)):
        raise invalid(
            f"{name} must be a list of 1 to {MAX_FORM_CHOICES} strings, none of them empty", _top_level_name(name)
        )
    return AnswerForm(name, choices=tuple(value))


def _grammar(name: str, value: Any, _: bool) -> AnswerForm | None:
    # llama.cpp's clients send an empty grammar for none.
    if value is None or (value == "" and name == "grammar"):
        return None
    if not is_unicode_text(value):
        raise invalid(f"{name} must be a grammar in EBNF or Lark, a string that is not empty", _top_level_name(name))
    return AnswerForm(name, grammar=value)


def _structural_tag(name: str, value: Any, _: bool) -> AnswerForm | None:
    if value is None:
        return None
    return AnswerForm(name, tags=structural_tags(name, value, _top_level_name(name)))


def is_unicode_text(value: Any) -> bool:
    """Return whether a value is a string that is not empty and has no lone surrogates, which JSON allows."""
    return isinstance(value, str) and bool(value) and not any("\ud800" <= character <= "\udfff" for character in value)


def _top_level_name(name: str) -> str:
    return name.partition(".")[0]


_Read = Callable[[str, Any, bool], AnswerForm | None]
"""Parses one parameter. Arguments: its name, its value, and whether the request is a chat."""

_OUTPUTS: Final[Mapping[str, _Read]] = {
    "json": _json,
    "regex": _regex,
    "choice": _choice,
    "json_object": _json_object,
    "grammar": _grammar,
    "structural_tag": _structural_tag,
}
"""The members of `structured_outputs` that may give a form."""

_FORMS: Final[Mapping[str, _Read]] = {
    "response_format": _response_format,
    "structured_outputs": _structured_outputs,
    "guided_json": _json,
    "guided_regex": _regex,
    "guided_choice": _choice,
    "json_schema": _json,
    "regex": _regex,
    "guided_grammar": _grammar,
    "grammar": _grammar,
    "ebnf": _grammar,
    "structural_tag": _structural_tag,
}
"""The parameters that may give a form."""
