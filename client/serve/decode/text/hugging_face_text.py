"""The tokenizer of a folder as transformers writes it: tokenizer.json, and what tokenizer_config.json says besides."""

from pathlib import Path
from typing import Any, Final

from gpulease.client.serve.decode.checked_file import MAX_JSON_BYTES, Members, json_object, read_bytes
from gpulease.client.serve.decode.decode_errors import ModelRejected
from gpulease.client.serve.decode.text.chat_template import ChatTemplate
from gpulease.client.serve.decode.text.tokenizer import Tokenizer, library_tokenizer

TOKENIZER: Final = "tokenizer.json"
SETTINGS: Final = "tokenizer_config.json"
TEMPLATE: Final = "chat_template.jinja"

MAX_TOKENIZER_BYTES: Final = 64 << 20
"""Most bytes of tokenizer.json; those of the largest vocabularies have some 33 million."""


def folder_tokenizer(folder: Path, begin_token: int | None) -> Tokenizer:
    """Make the folder's tokenizer. Raises ModelRejected where there is none, or a broken one."""
    path = folder / TOKENIZER
    library = library_tokenizer(_text(read_bytes(path, MAX_TOKENIZER_BYTES), path), str(path))
    return Tokenizer(library, begin_token, _chat_template(folder), str(path))


def folder_begin_token(folder: Path) -> int | None:
    """The token that the tokenizer puts before a text: the first of its post-processor's template. None for none."""
    path = folder / TOKENIZER
    if not path.exists():
        return None
    said = Members(json_object(read_bytes(path, MAX_TOKENIZER_BYTES), path), str(path))
    step = said.object("post_processor")
    steps = [step] if step else []
    if step and step.text("type", "") == "Sequence":
        steps = [Members(one, step.where) for one in step.items("processors") if isinstance(one, dict)]
    for one in steps:
        if one.text("type", "") == "TemplateProcessing":
            return _first_special(one)
    return None


def _first_special(template: Members) -> int | None:
    single = template.items("single")
    name = single[0].get("SpecialToken", {}).get("id") if single and isinstance(single[0], dict) else None
    known = template.object("special_tokens")
    entry = known.object(str(name)) if known and name is not None else None
    ids = entry.tokens("ids") if entry else ()
    return ids[0] if ids else None


def _chat_template(folder: Path) -> ChatTemplate | None:
    said = Members({}, str(folder / SETTINGS))
    if (folder / SETTINGS).exists():
        said = Members(json_object(read_bytes(folder / SETTINGS, MAX_JSON_BYTES), folder / SETTINGS), said.where)
    path, source = folder / TEMPLATE, said.values.get("chat_template")
    if path.exists():
        source = _text(read_bytes(path, MAX_JSON_BYTES), path)
    elif isinstance(source, list):
        # Several by name, of which a plain chat uses the default.
        named = {one.get("name"): one.get("template") for one in source if isinstance(one, dict)}
        path, source = folder / SETTINGS, named.get("default")
    if source is None:
        return None
    if not isinstance(source, str):
        raise ModelRejected(f"{said.where}: chat_template is no text")
    tokens = {key: _token_text(value) for key, value in said.values.items() if key.endswith("_token")}
    return ChatTemplate(source, tokens, str(path if path.exists() else said.where))


def _token_text(value: Any) -> str:
    """A special token's text: older files have it as an object."""
    text = value.get("content") if isinstance(value, dict) else value
    return text if isinstance(text, str) else ""


def _text(data: bytes, path: Path) -> str:
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        raise ModelRejected(f"{path}: no UTF-8: {error}") from None
