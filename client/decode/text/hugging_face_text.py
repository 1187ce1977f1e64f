"""The tokenizer of a folder as transformers writes it, from tokenizer.json and tokenizer_config.json."""

from pathlib import Path
from typing import Any, Final

import tokenizers

from gpulease.client.decode.checked_file import (
    MAX_JSON_BYTES,
    Members,
    json_object,
    quoted_value,
    read_bytes,
    rejected,
)
from gpulease.client.decode.decode_errors import ModelRejected
from gpulease.client.decode.file_keys import judged
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
"""Classes that rebuild the post-processor from the settings; "" if the settings name no class."""

MAX_TOKENIZER_BYTES: Final = 64 << 20
"""Most bytes of tokenizer.json. The largest vocabularies need some 33 million."""


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
    """Return the token that the tokenizer puts before a text; None if it puts none.

    tokenizer.json's post-processor decides it. Llama's and Gemma's classes rebuild that if the settings have
    `add_bos_token` (transformers 4.57, and llama.cpp's converter); other classes, and transformers 5, ignore the
    setting. Raises ModelRejected for processing of a text that the engine does not do.
    """
    path = folder / TOKENIZER
    if not path.exists():
        return None
    said = judged(Members(json_object(read_bytes(path, MAX_TOKENIZER_BYTES), path), str(path)), TOKENIZER_KEYS)
    if (model := said.object("model")) is not None:
        judged(model, MODEL_KEYS)
    settings = _settings(folder)
    _check_prefix_space(said, settings)
    # The setting wins only for the classes that rebuild the post-processor.
    obeys = settings.text("tokenizer_class", "") in BEGINNING_CLASSES
    if settings.values.get("add_bos_token") is None or not obeys:
        return _processor_token(said)
    if not settings.flag("add_bos_token", False):
        return None
    text = _token_text(settings.values.get("bos_token"))
    # The settings name a text; the vocabulary has its id.
    token = _find_token(said, text)
    if token is None:
        raise ModelRejected(f"{settings.where}: add_bos_token is true, but bos_token {quoted(text)} is not a token")
    return token


def _processor_token(said: Members) -> int | None:
    step = said.object("post_processor")
    if step is None:
        return None
    steps = [step]
    if step.text("type", "") == "Sequence":
        steps = [Members(one, step.where) for one in step.items("processors") if isinstance(one, dict)]
    # A ByteLevel post-processor only adjusts offsets.
    kinds = [kind for one in steps if (kind := one.text("type", "")) != "ByteLevel"]
    if kinds not in ([], ["TemplateProcessing"]):
        raise ModelRejected(f"{step.where} is {quoted(', '.join(kinds))}; the engine puts one token before a text")
    return next((_template_token(one) for one in steps if one.text("type", "") == "TemplateProcessing"), None)


def _template_token(template: Members) -> int | None:
    """Return the token that a TemplateProcessing puts before the text; None if it puts none.

    Raises ModelRejected if it puts more than one, or one after the text.
    """
    # "single" is the template for one text: special tokens around the piece "Sequence".
    pieces = template.items("single")
    names = [piece["SpecialToken"].get("id") for piece in pieces if _has_object(piece, "SpecialToken")]
    is_behind = bool(pieces) and _has_object(pieces[-1], "SpecialToken")
    known = template.object("special_tokens")
    ids = [token for name in names if (one := known and known.object(str(name))) for token in one.tokens("ids")]
    if len(pieces) != len(names) + 1 or is_behind or len(ids) != len(names) or len(ids) > 1:
        raise ModelRejected(
            f"{template.where}: single is {quoted_value(pieces)}; the engine puts at most one token before a text, "
            "and none after it"
        )
    return ids[0] if ids else None


def _has_object(piece: Any, key: str) -> bool:
    return isinstance(piece, dict) and isinstance(piece.get(key), dict)


def _find_token(said: Members, text: str) -> int | None:
    added = [one for one in said.items("added_tokens") if isinstance(one, dict) and one.get("content") == text]
    model = said.object("model")
    vocabulary = model.values.get("vocab") if model else None
    found = added[0].get("id") if added else vocabulary.get(text) if isinstance(vocabulary, dict) else None
    return found if isinstance(found, int) else None


def _check_prefix_space(said: Members, settings: Members) -> None:
    """Raise ModelRejected if the settings and tokenizer.json disagree on a space before a text."""
    wanted = settings.values.get("add_prefix_space")
    if wanted is None:
        return
    # Search the nested sequences of steps for one that prepends a space. Three kinds of steps can.
    left, puts = [said.values.get("pre_tokenizer"), said.values.get("normalizer")], False
    while left:
        # A work list instead of recursion: files may nest steps deeply.
        match left.pop():
            case list(items):
                left += items
            case {"type": "Metaspace", **rest}:
                puts |= rest.get("prepend_scheme", "always") != "never"
            case {"type": "Prepend", "prepend": "▁"} | {"type": "ByteLevel", "add_prefix_space": True}:
                puts = True
            case dict(step):
                left += step.values()
    if settings.flag("add_prefix_space", puts) is not puts:
        raise ModelRejected(
            f"{settings.where}: add_prefix_space is {wanted}, but {said.where} differs",
            "Save the tokenizer again: tokenizer.save_pretrained",
        )


def _settings(folder: Path) -> Members:
    """Return the settings. Older models name special tokens in a separate file, special_tokens_map.json."""
    path = folder / SETTINGS
    values = json_object(read_bytes(path, MAX_JSON_BYTES), path) if path.exists() else {}
    legacy = folder / SPECIAL_TOKENS
    if "added_tokens_decoder" not in values and legacy.exists():
        said = {key: value for key, value in values.items() if value is not None}
        values = json_object(read_bytes(legacy, MAX_JSON_BYTES), legacy) | said
    return judged(Members(values, str(path)), SETTINGS_KEYS)


def _add_tokens(library: tokenizers.Tokenizer, settings: Members) -> None:
    """Add the tokens that the settings name and tokenizer.json lacks, as transformers does when it loads."""
    # First the numbered ones. Each must get the number that the settings give it, or the model's embedding would not
    # match.
    entries = settings.object("added_tokens_decoder")
    numbered = sorted((int(number), one) for number, one in (entries.values if entries else {}).items())
    known = {repr(token) for token in library.get_added_tokens_decoder().values()}
    for number, one in numbered:
        token = _added_token(one)
        if repr(token) not in known:
            library.add_special_tokens([token]) if token.special else library.add_tokens([token])
        if library.token_to_id(token.content) != number:
            where = f"{settings.where}: added_tokens_decoder"
            raise ModelRejected(f"{where} has {quoted(token.content)} as {number}, but tokenizer.json differs")
    # Then those without a number: bos_token and so on, and the lists of additional ones.
    named = [value for key, value in settings.values.items() if key.endswith("_token") and _token_text(value)]
    for key in ("additional_special_tokens", "extra_special_tokens"):
        more = settings.values.get(key) or []
        named += more.values() if isinstance(more, dict) else more
    there = {token.content for token in library.get_added_tokens_decoder().values()}
    missing = [_added_token(value) for value in named if _token_text(value) not in there]
    library.add_special_tokens(missing)


def _added_token(value: Any) -> tokenizers.AddedToken:
    if isinstance(value, str):
        return tokenizers.AddedToken(value, special=True, normalized=False)
    flags = {key: value[key] for key in ("single_word", "lstrip", "rstrip", "normalized", "special") if key in value}
    return tokenizers.AddedToken(value["content"], **flags)


def _chat_template(folder: Path, said: Members) -> ChatTemplate | None:
    path, source = folder / TEMPLATE, said.values.get("chat_template")
    if path.exists():
        source = _text(read_bytes(path, MAX_JSON_BYTES), path)
    elif isinstance(source, list):
        # Several named templates; a plain chat uses the default one.
        named = {one.get("name"): one.get("template") for one in source if isinstance(one, dict)}
        path, source = folder / SETTINGS, named.get("default")
    if source is None:
        return None
    if not isinstance(source, str):
        raise ModelRejected(f"{said.where}: chat_template must be a string")
    tokens = {
        key: text for key, value in said.values.items() if key.endswith("_token") and (text := _token_text(value))
    }
    return ChatTemplate(source, tokens, str(path if path.exists() else said.where))


def _token_text(value: Any) -> str:
    """Return a special token's text, which older files have in an object; "" for other values."""
    text = value.get("content") if isinstance(value, dict) else value
    return text if isinstance(text, str) else ""


def _text(data: bytes, path: Path) -> str:
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        raise ModelRejected(f"{path}: must be UTF-8: {error}") from None
