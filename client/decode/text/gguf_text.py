"""The tokenizer of a GGUF file, built from its metadata by llama.cpp's rules (llama-vocab.cpp)."""

from collections import Counter
from collections.abc import Callable
from typing import Any, Final

from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers
from tokenizers import Tokenizer as LibraryTokenizer

from gpulease.client.decode.checked_file import Members
from gpulease.client.decode.decode_errors import ModelRejected
from gpulease.client.decode.library_errors import rejected
from gpulease.client.decode.text.chat_template import ChatTemplate
from gpulease.client.decode.text.gguf_special_tokens import AT, control_tokens, special_token
from gpulease.client.decode.text.tokenizer import Tokenizer
from gpulease.client.texts import quoted

MAX_PIECE_CHARACTERS: Final = 256
"""Longest SentencePiece piece for which merges are derived. Trying all splits of a longer one would take too long."""

UNKNOWN: Final = 2
USER_DEFINED: Final = 4
"""llama.cpp's numbers of two types of tokens."""

LLAMA_3: Final = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)
"""The pattern by which Llama 3 splits a text into words, from its tokenizer.json."""

QWEN_2: Final = LLAMA_3.replace(r"\p{N}{1,3}", r"\p{N}")
"""The pattern by which Qwen 2 splits a text into words. Each digit is a word."""


def gguf_tokenizer(metadata: Members, begin_token: int | None) -> Tokenizer:
    """Build the tokenizer that a file's metadata describes.

    Args:
        metadata: The metadata.
        begin_token: Id of the token that begins each prompt; None without one.

    Raises ModelRejected if a key is missing, malformed or not supported.
    """
    kind = metadata.text(f"{AT}model")
    # The supported families have two kinds of vocabularies.
    makers: dict[str, Callable[[Members, list[str]], LibraryTokenizer]] = {"gpt2": _byte_pairs, "llama": _pieces}
    if kind not in makers:
        raise ModelRejected(f"{metadata.where}: {AT}model must be one of {', '.join(makers)}, not {quoted(kind)}")
    # Tokens without a text get an invented one, as in llama.cpp.
    tokens = [text or f"[EMPTY_{token}]" for token, text in enumerate(_texts(metadata, "tokens"))]
    if len(set(tokens)) < len(tokens):
        ((twice, _),) = Counter(tokens).most_common(1)
        raise ModelRejected(f"{metadata.where}: {AT}tokens has {quoted(twice)} twice")
    with rejected(ModelRejected, f"{metadata.where}: not a valid tokenizer"):
        library = makers[kind](metadata, tokens)
        _add_special(library, metadata, tokens)
    return Tokenizer(library, begin_token, _chat_template(metadata, tokens), metadata.where)


def _byte_pairs(metadata: Members, tokens: list[str]) -> LibraryTokenizer:
    """Build a tokenizer of GPT-2's kind: bytes are written as letters, and pairs merge in the order of `merges`."""
    kind = metadata.text(f"{AT}pre")
    merges = []
    for text in _texts(metadata, "merges"):
        # A merge is two texts with a space between them; GPT-2's letters for bytes contain no space.
        left, _, right = text.partition(" ")
        if not left or not right:
            raise ModelRejected(
                f"{metadata.where}: {AT}merges has {quoted(text)}, which must be two texts with a space between"
            )
        merges.append((left, right))
    if kind not in CUTS:
        raise ModelRejected(f"{metadata.where}: {AT}pre must be one of {', '.join(CUTS)}, not {quoted(kind)}")
    numbers = {text: token for token, text in enumerate(tokens)}
    # Llama 3 does not merge a word that is a token as a whole.
    library = LibraryTokenizer(models.BPE(numbers, merges, ignore_merges=CUTS[kind] is _llama_3))
    library.pre_tokenizer = CUTS[kind]()
    library.decoder = decoders.ByteLevel()
    # Qwen 2 normalises to NFC, which GGUF has no key for.
    if CUTS[kind] is _qwen_2:
        library.normalizer = normalizers.NFC()
    return library


def _pieces(metadata: Members, tokens: list[str]) -> LibraryTokenizer:
    """Build a tokenizer of SentencePiece's kind, like transformers' LlamaConverter: pieces merge by their scores."""
    scores = metadata.items(f"{AT}scores")
    if len(scores) != len(tokens):
        raise ModelRejected(f"{metadata.where}: {AT}scores are {len(scores)}, tokens {len(tokens)}")
    numbers = {text: token for token, text in enumerate(tokens)}
    # GGUF has no merges for this kind: each way to split a token into two tokens is a merge, ranked by the token's
    # score.
    merges = [
        (scores[token], text[:cut], text[cut:])
        for token, text in enumerate(tokens)
        for cut in range(1, len(text) if len(text) <= MAX_PIECE_CHARACTERS else 0)
        if text[:cut] in numbers and text[cut:] in numbers
    ]
    # The highest score merges first. The tokens' ids break ties, so the order is the same everywhere.
    merges.sort(key=lambda merge: (-merge[0], numbers[merge[1]], numbers[merge[2]]))
    # The file marks the unknown token by its type.
    unknown = next(
        (text for text, kind in zip(tokens, metadata.items(f"{AT}token_type"), strict=False) if kind == UNKNOWN), None
    )
    pairs = [(left, right) for _, left, right in merges]
    library = LibraryTokenizer(models.BPE(numbers, pairs, unk_token=unknown, fuse_unk=True, byte_fallback=True))
    # A space is written as ▁, and texts begin with one unless the file says otherwise. Decoding reverses both.
    begins_with_space = metadata.flag(f"{AT}add_space_prefix", True)
    steps: list[Any] = [normalizers.Prepend("▁")] if begins_with_space else []
    library.normalizer = normalizers.Sequence([*steps, normalizers.Replace(" ", "▁")])
    decoder_tail: list[Any] = [decoders.Strip(" ", 1, 0)] if begins_with_space else []
    library.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), *decoder_tail]
    )
    return library


def _add_special(library: LibraryTokenizer, metadata: Members, tokens: list[str]) -> None:
    """Register control tokens and user-defined tokens, so that their names in a text are read as those tokens."""
    control = control_tokens(metadata)
    kinds = metadata.items(f"{AT}token_type")[: len(tokens)]
    # Tokens that a user added are text, but are matched as a whole before the model splits words.
    by_user = {token for token, kind in enumerate(kinds) if kind == USER_DEFINED}.difference(control)
    library.add_special_tokens([AddedToken(tokens[token], special=True, normalized=False) for token in control])
    library.add_tokens([AddedToken(tokens[token], special=False, normalized=False) for token in sorted(by_user)])


def _chat_template(metadata: Members, tokens: list[str]) -> ChatTemplate | None:
    source = metadata.text("tokenizer.chat_template", "")
    if not source:
        return None
    # The template may refer to special tokens by name: bos_token and so on.
    templates = {}
    for name in ("bos", "eos", "unk", "pad"):
        token = special_token(metadata, {"unk": "unknown", "pad": "padding"}.get(name, name))
        templates[f"{name}_token"] = tokens[token] if token is not None and 0 <= token < len(tokens) else ""
    return ChatTemplate(source, templates, metadata.where)


def _texts(metadata: Members, key: str) -> list[str]:
    texts = metadata.items(f"{AT}{key}")
    if not texts or not all(isinstance(text, str) for text in texts):
        raise ModelRejected(f"{metadata.where}: {AT}{key} must be a list of texts")
    return texts


def _gpt_2() -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.ByteLevel(add_prefix_space=False)


def _digits() -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), _gpt_2()])


def _llama_3() -> pre_tokenizers.PreTokenizer:
    return _cut_by(LLAMA_3)


def _qwen_2() -> pre_tokenizers.PreTokenizer:
    return _cut_by(QWEN_2)


def _cut_by(pattern: str) -> pre_tokenizers.PreTokenizer:
    letters = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    return pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(pattern), "isolated"), letters])


CUTS: Final = {
    "gpt-2": _gpt_2,
    "smollm": _digits,
    "starcoder": _digits,
    "refact": _digits,
    "command-r": _digits,
    "llama-bpe": _llama_3,
    "llama3": _llama_3,
    "qwen2": _qwen_2,
    "deepseek-r1-qwen": _qwen_2,
}
"""The pre-tokenizers, which split a text into words before merging, by llama.cpp's names."""
