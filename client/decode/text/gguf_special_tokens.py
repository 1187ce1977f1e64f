# ruff: noqa: RUF001 (DeepSeek writes its tokens with fullwidth bars)
"""Special tokens of a GGUF vocabulary, found by llama.cpp's rules (load in llama-vocab.cpp)."""

from typing import Final

from gpulease.client.decode.checked_file import Members
from gpulease.client.decode.decode_errors import ModelRejected

AT: Final = "tokenizer.ggml."

CONTROL: Final = 3
"""The type of tokens that are not text (LLAMA_TOKEN_TYPE_CONTROL)."""

BEGINS: Final = ("llama3", "llama-bpe")
"""Pre-tokenizers with a begin token before prompts, unless a key says otherwise."""

DEFAULTS: Final = {"bos": 1, "eos": 2, "unknown": 0}
"""Default ids of SentencePiece vocabularies, for missing keys. GPT-2's defaults do not apply to today's models."""

END_TEXTS: Final = frozenset(
    {
        *("<|eot_id|>", "<|im_end|>", "<|end|>", "<|return|>", "<|call|>", "<|flush|>", "<|calls|>", "<end_of_turn>"),
        *("<|endoftext|>", "</s>", "<|eom_id|>", "<EOT>", "_<EOT>", "[EOT]", "[EOS]", "<|end_of_text|>", "<eos>"),
        *("<end_of_utterance>", "<turn|>", "<|tool_response>", "<｜end▁of▁sentence｜>", "[e~["),
    }
)
"""Tokens with these texts end a sequence, whatever type the file gives them."""

FILL_TEXTS: Final = {
    "fim_pre": (
        "<|fim_prefix|>",
        "<fim-prefix>",
        "<fim_prefix>",
        "<｜fim▁begin｜>",
        "<PRE>",
        "▁<PRE>",
        "<|code_prefix|>",
        "<|prefix|>",
    ),
    "fim_suf": (
        "<|fim_suffix|>",
        "<fim-suffix>",
        "<fim_suffix>",
        "<｜fim▁hole｜>",
        "<SUF>",
        "▁<SUF>",
        "<|code_suffix|>",
        "<|suffix|>",
    ),
    "fim_mid": (
        "<|fim_middle|>",
        "<fim-middle>",
        "<fim_middle>",
        "<｜fim▁end｜>",
        "<MID>",
        "▁<MID>",
        "<|code_middle|>",
        "<|middle|>",
    ),
    "fim_pad": ("<|fim_pad|>", "<fim-pad>", "<fim_pad>", "<PAD>", "[PAD]"),
    "fim_rep": ("<|fim_repo|>", "<|repo_name|>", "<fim-repo>", "<REPO>", "<reponame>"),
    "fim_sep": ("<|file_sep|>",),
}
"""Texts of the tokens for filling gaps in programs (fill-in-the-middle)."""

FILL_ENDS: Final = ("fim_pad", "fim_rep", "fim_sep")
"""Fill tokens that end a sequence, too. A key names each of them; without the key, its text identifies it."""

CONTROL_TEXTS: Final = END_TEXTS.union(*FILL_TEXTS.values())
"""Tokens with these texts are control tokens, whatever type the file gives them."""


def control_tokens(metadata: Members) -> list[int]:
    """Return the ids of tokens that are not text, by their type in the file or by a known text."""
    texts, kinds = metadata.items(f"{AT}tokens"), metadata.items(f"{AT}token_type")
    # Converters often give these tokens a wrong type, so known texts count, too.
    tokens = {token for token, text in enumerate(texts) if text in CONTROL_TEXTS}
    tokens.update(token for token, kind in enumerate(kinds[: len(texts)]) if kind == CONTROL)
    return sorted(tokens)


def begin_token(metadata: Members) -> int | None:
    """Return the begin token; None if prompts have none. Raises ModelRejected if prompts have one that no key names."""
    # SentencePiece vocabularies begin prompts with a token by default; others only for some pre-tokenizers.
    default = metadata.text(f"{AT}model", "") == "llama" or metadata.text(f"{AT}pre", "") in BEGINS
    if not metadata.flag(f"{AT}add_bos_token", default):
        return None
    return _required(metadata, "bos")


def end_tokens(metadata: Members) -> tuple[int, ...]:
    """Return the tokens that end a sequence. Raises ModelRejected for a vocabulary without an eos key."""
    texts = metadata.items(f"{AT}tokens")
    # A file without a vocabulary has no texts to search, and need not name an end token.
    lookup = _required if texts else special_token
    special = [lookup(metadata, "eos"), special_token(metadata, "eot"), special_token(metadata, "eom")]
    # A key names a fill token; without a key, all of its known texts count.
    end_texts = set(END_TEXTS)
    for name in FILL_ENDS:
        if (named_token := special_token(metadata, name)) is not None:
            special.append(named_token)
        else:
            end_texts.update(FILL_TEXTS[name])
    special += [token for token, text in enumerate(texts) if text in end_texts]
    return tuple(dict.fromkeys(token for token in special if token is not None))


def special_token(metadata: Members, name: str) -> int | None:
    """Return the token that a key names, or else the default of the vocabulary's kind; None if there is none."""
    key = f"{AT}{name}_token_id"
    if metadata.values.get(key) is not None:
        return metadata.whole(key)
    default = DEFAULTS.get(name) if metadata.text(f"{AT}model", "") == "llama" else None
    return default if default is not None and default < len(metadata.items(f"{AT}tokens")) else None


def _required(metadata: Members, name: str) -> int:
    token = special_token(metadata, name)
    if token is None:
        raise ModelRejected(f"{metadata.where}: {AT}{name}_token_id is missing")
    return token
