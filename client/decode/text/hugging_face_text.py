"""The tokenizer of a folder in transformers' format, from tokenizer.json and tokenizer_config.json."""

from pathlib import Path
from typing import Any, Final

import msgspec
import tokenizers

from gpulease.client.decode.checked_file import MAX_JSON_BYTES, Members, json_object, quoted_value, read_bytes
from gpulease.client.decode.decode_errors import ModelRejected
from gpulease.client.decode.file_keys import used_members
from gpulease.client.decode.library_errors import rejected
from gpulease.client.decode.text.chat_template import ChatTemplate
from gpulease.client.decode.text.tokenizer import Tokenizer, library_tokenizer
from gpulease.client.decode.text.tokenizer_keys import MODEL_KEYS, SETTINGS_KEYS, TOKENIZER_KEYS
from gpulease.client.texts import quoted

TOKENIZER: Final = "tokenizer.json"
SETTINGS: Final = "tokenizer_config.json"
SPECIAL_TOKENS: Final = "special_tokens_map.json"
TEMPLATE: Final = "chat_template.jinja"

BEGINNING_CLASSES: Final = (
    "",
    "LlamaTokenizer",
    "LlamaTokenizerFast",
    "CodeLlamaTokenizer",
    "CodeLlamaTokenizerFast",
    "GemmaTokenizer",
    "GemmaTokenizerFast",
)
"""Tokenizer classes that rebuild the post-processor from the settings; "" stands for settings without a class."""

MAX_TOKENIZER_BYTES: Final = 64 << 20
"""Maximum size of tokenizer.json in bytes. The largest vocabularies need about 33 million."""


def folder_tokenizer(folder: Path, begin_token: int | None) -> Tokenizer:
    """Load the folder's tokenizer. Raises ModelRejected if it is missing or broken."""
    path = folder / TOKENIZER
    text = _text(read_bytes(path, MAX_TOKENIZER_BYTES), path)
    library = library_tokenizer(text, str(path))
    settings = _settings(folder)
    with rejected(ModelRejected, f"{settings.where}: the added tokens are not valid"):
        _add_tokens(library, settings)
    # The template writes a chat's begin token itself, as in transformers' apply_chat_template.
    return Tokenizer(library, begin_token, _chat_template(folder, settings), str(path), chat_begins=False)


def folder_begin_token(folder: Path) -> int | None:
    """Return the token that the tokenizer puts before a text; None if there is none.

    The post-processor in tokenizer.json decides this. Llama's and Gemma's classes rebuild the post-processor if the
    settings have `add_bos_token` (transformers 4.57, and llama.cpp's converter); other classes, and transformers 5,
    ignore the setting. Raises ModelRejected for a post-processor that the engine does not support.
    """
    path = folder / TOKENIZER
    if not path.exists():
        return None
    members = used_members(_tokenizer_members(path), TOKENIZER_KEYS)
    if (model := members.object("model")) is not None:
        used_members(model, MODEL_KEYS)
    settings = _settings(folder)
    _check_prefix_space(members, settings)
    # The setting applies only to the classes that rebuild the post-processor.
    uses_setting = settings.text("tokenizer_class", "") in BEGINNING_CLASSES
    if settings.values.get("add_bos_token") is None or not uses_setting:
        return _processor_token(members)
    if not settings.flag("add_bos_token", False):
        return None
    text = _token_text(settings.values.get("bos_token"))
    # The settings contain the token's text, and the vocabulary its id.
    token = _find_token(members, text)
    if token is None:
        raise ModelRejected(f"{settings.where}: add_bos_token is true, but bos_token {quoted(text)} is not a token")
    return token


def _tokenizer_members(path: Path) -> Members:
    """Return the members of a tokenizer.json. Its model's vocabulary and merges are not parsed.

    Parsing them would take a second, in which no other Python code of this process runs.
    """
    data = read_bytes(path, MAX_TOKENIZER_BYTES)
    try:
        members = msgspec.json.decode(data, type=dict[str, msgspec.Raw])
        values = {key: msgspec.json.decode(text) for key, text in members.items() if key != "model"}
        if (model := members.get("model")) is not None:
            is_object = bytes(memoryview(model)[:1]) == b"{"
            values["model"] = _model_values(model) if is_object else msgspec.json.decode(model)
    except msgspec.ValidationError:
        raise ModelRejected(f"{path}: must be a JSON object") from None
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        raise ModelRejected(f"{path}: must be JSON: {error}") from None
    return Members(values, str(path))


def _model_values(text: msgspec.Raw) -> dict[str, Any]:
    members = msgspec.json.decode(text, type=dict[str, msgspec.Raw])
    return {key: value if key in ("vocab", "merges") else msgspec.json.decode(value) for key, value in members.items()}


def _processor_token(members: Members) -> int | None:
    step = members.object("post_processor")
    if step is None:
        return None
    steps = [step]
    if step.text("type", "") == "Sequence":
        steps = [
            Members(processor, step.where) for processor in step.items("processors") if isinstance(processor, dict)
        ]
    # A ByteLevel post-processor only adjusts offsets.
    kinds = [kind for processor in steps if (kind := processor.text("type", "")) != "ByteLevel"]
    if kinds not in ([], ["TemplateProcessing"]):
        raise ModelRejected(f"{step.where} is {quoted(', '.join(kinds))}; the engine puts one token before a text")
    return next(
        (_template_token(processor) for processor in steps if processor.text("type", "") == "TemplateProcessing"), None
    )


def _template_token(template: Members) -> int | None:
    """Return the token that a TemplateProcessing puts before the text; None if there is none.

    Raises ModelRejected if it puts several tokens before the text, or any after it.
    """
    # "single" is the template for one text: special tokens around the piece "Sequence".
    pieces = template.items("single")
    names = [piece["SpecialToken"].get("id") for piece in pieces if _has_object(piece, "SpecialToken")]
    is_behind = bool(pieces) and _has_object(pieces[-1], "SpecialToken")
    special_tokens = template.object("special_tokens")
    ids = [
        token
        for name in names
        if (special := special_tokens and special_tokens.object(str(name)))
        for token in special.tokens("ids")
    ]
    if len(pieces) != len(names) + 1 or is_behind or len(ids) != len(names) or len(ids) > 1:
        raise ModelRejected(
            f"{template.where}: single is {quoted_value(pieces)}; the engine puts at most one token before a text, "
            "and none after it"
        )
    return ids[0] if ids else None


def _has_object(piece: Any, key: str) -> bool:
    return isinstance(piece, dict) and isinstance(piece.get(key), dict)


def _find_token(members: Members, text: str) -> int | None:
    added = [
        entry for entry in members.items("added_tokens") if isinstance(entry, dict) and entry.get("content") == text
    ]
    model = members.object("model")
    if added:
        token = added[0].get("id")
    else:
        # This is rare: a begin token is usually an added token.
        vocabulary = msgspec.json.decode(model.values["vocab"]) if model and "vocab" in model.values else None
        token = vocabulary.get(text) if isinstance(vocabulary, dict) else None
    return token if isinstance(token, int) else None


def _check_prefix_space(members: Members, settings: Members) -> None:
    """Raise ModelRejected if the settings and tokenizer.json disagree on a space before a text."""
    expected = settings.values.get("add_prefix_space")
    if expected is None:
        return
    # Search the nested sequences for a step that prepends a space. Three kinds of steps can do this.
    pending, adds_space = [members.values.get("pre_tokenizer"), members.values.get("normalizer")], False
    while pending:
        # Use a work list instead of recursion, because files may nest steps deeply.
        match pending.pop():
            case list(items):
                pending += items
            case {"type": "Metaspace", **rest}:
                adds_space |= rest.get("prepend_scheme", "always") != "never"
            case {"type": "Prepend", "prepend": "▁"} | {"type": "ByteLevel", "add_prefix_space": True}:
                adds_space = True
            case dict(step):
                pending += step.values()
    if settings.flag("add_prefix_space", adds_space) is not adds_space:
        raise ModelRejected(
            f"{settings.where}: add_prefix_space is {expected}, but {members.where} differs",
            "Save the tokenizer again: tokenizer.save_pretrained",
        )


def _settings(folder: Path) -> Members:
    """Return the settings. Older models have the special tokens in a separate file, special_tokens_map.json."""
    path = folder / SETTINGS
    values = json_object(read_bytes(path, MAX_JSON_BYTES), path) if path.exists() else {}
    legacy = folder / SPECIAL_TOKENS
    if "added_tokens_decoder" not in values and legacy.exists():
        members = {key: value for key, value in values.items() if value is not None}
        values = json_object(read_bytes(legacy, MAX_JSON_BYTES), legacy) | members
    return used_members(Members(values, str(path)), SETTINGS_KEYS)


def _add_tokens(library: tokenizers.Tokenizer, settings: Members) -> None:
    """Add the tokens that are in the settings but not in tokenizer.json, as transformers does."""
    # First add the tokens with a number. Each must get this number, or the model's embedding would not match.
    entries = settings.object("added_tokens_decoder")
    numbered = sorted((int(number), entry) for number, entry in (entries.values if entries else {}).items())
    added = {repr(token) for token in library.get_added_tokens_decoder().values()}
    for number, entry in numbered:
        token = _added_token(entry)
        if repr(token) not in added:
            library.add_special_tokens([token]) if token.special else library.add_tokens([token])
        if library.token_to_id(token.content) != number:
            where = f"{settings.where}: added_tokens_decoder"
            raise ModelRejected(f"{where} has {quoted(token.content)} as {number}, but tokenizer.json differs")
    # Then add those without a number: bos_token and so on, and the lists of additional tokens.
    special = [value for key, value in settings.values.items() if key.endswith("_token") and _token_text(value)]
    for key in ("additional_special_tokens", "extra_special_tokens"):
        additional = settings.values.get(key) or []
        special += additional.values() if isinstance(additional, dict) else additional
    contents = {token.content for token in library.get_added_tokens_decoder().values()}
    missing = [_added_token(value) for value in special if _token_text(value) not in contents]
    library.add_special_tokens(missing)


def _added_token(value: Any) -> tokenizers.AddedToken:
    if isinstance(value, str):
        return tokenizers.AddedToken(value, special=True, normalized=False)
    flags = {key: value[key] for key in ("single_word", "lstrip", "rstrip", "normalized", "special") if key in value}
    return tokenizers.AddedToken(value["content"], **flags)


def _chat_template(folder: Path, members: Members) -> ChatTemplate | None:
    path, source = folder / TEMPLATE, members.values.get("chat_template")
    if path.exists():
        source = _text(read_bytes(path, MAX_JSON_BYTES), path)
    elif isinstance(source, list):
        # There are several named templates. A plain chat uses the template named "default".
        templates = {entry.get("name"): entry.get("template") for entry in source if isinstance(entry, dict)}
        path, source = folder / SETTINGS, templates.get("default")
    if source is None:
        return None
    if not isinstance(source, str):
        raise ModelRejected(f"{members.where}: chat_template must be a string")
    tokens = {
        key: text for key, value in members.values.items() if key.endswith("_token") and (text := _token_text(value))
    }
    return ChatTemplate(source, tokens, str(path if path.exists() else members.where))


def _token_text(value: Any) -> str:
    """Return a special token's text, which older files have in an object; "" for other values."""
    text = value.get("content") if isinstance(value, dict) else value
    return text if isinstance(text, str) else ""


def _text(data: bytes, path: Path) -> str:
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        raise ModelRejected(f"{path}: must be UTF-8: {error}") from None
