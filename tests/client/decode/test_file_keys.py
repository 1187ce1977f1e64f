"""Every entry in the tables of keys: the loader treats the key as the table says."""

import json
import logging
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import gguf
import pytest
from tokenizers import Tokenizer as LibraryTokenizer
from tokenizers import decoders, models, pre_tokenizers

from gpulease.client.decode.checked_file import Members
from gpulease.client.decode.checkpoint.gguf_config import gguf_config
from gpulease.client.decode.checkpoint.gguf_keys import GGUF_FAMILIES, GGUF_KEYS
from gpulease.client.decode.checkpoint.hugging_face_config import hugging_face_config
from gpulease.client.decode.checkpoint.hugging_face_keys import (
    CONFIG_KEYS,
    GENERATION_KEYS,
    IMAGE_MODEL_KEYS,
    LAYERED_ROPE_KEYS,
    ROPE_KEYS,
)
from gpulease.client.decode.checkpoint.quantized_weights import quantization_of
from gpulease.client.decode.decode_errors import ModelRejected
from gpulease.client.decode.file_keys import Effect, KeyTable, find_key, used_members
from gpulease.client.decode.model_config import Family
from gpulease.client.decode.text.gguf_special_tokens import CONTROL
from gpulease.client.decode.text.gguf_text import gguf_tokenizer
from gpulease.client.decode.text.hugging_face_text import folder_begin_token, folder_tokenizer
from gpulease.client.decode.text.letters import LETTERS
from gpulease.client.decode.text.tokenizer import Tokenizer
from gpulease.client.decode.text.tokenizer_keys import MODEL_KEYS, SETTINGS_KEYS, TOKENIZER_KEYS
from helpers.made_models import FOLDER_MODELS, QWEN3, config_json, gguf_metadata

Said = dict[str, Any]

ODD: Final = (True, 7, 0.375, "odd", [7], {"odd": 7})
"""Values of every kind; some of them are not neutral for any key."""

STRETCHED: Final = {
    "rope_type": "llama3",
    "rope_theta": 5e5,
    "factor": 32.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
YARN: Final = {"rope_type": "yarn"}
LONG: Final = {"rope_type": "longrope", "short_factor": [1.0] * 32, "long_factor": [2.0] * 32}
TEXTS: Final = ("ab  é ABC", "AB", "a<end>b", " 12ab")


@dataclass(frozen=True)
class Kind:
    """A kind of file.

    Attributes:
        table: Its keys.
        load: Gives all that is loaded of such a file.
        base: The file that keys are added to.
        changes: Of each used key: members that change what is loaded, and what else the file says before and after.
        samples: Values that a key without effect may have, where it may not have any.
        elsewhere: Used keys that are read and tested elsewhere.
    """

    table: KeyTable
    load: Callable[[Said], Any]
    base: Said
    changes: dict[str, tuple[Said, Said]]
    samples: dict[str, tuple[Any, ...]] = field(default_factory=dict)
    elsewhere: frozenset[str] = frozenset()

    def outcome(self, said: Said) -> Any:
        try:
            return self.load(self.base | said)
        except ModelRejected as error:
            return str(error)


def after(**said: Any) -> tuple[Said, Said]:
    return {}, said


# --- config.json and generation_config.json. ---


def load_config(said: Said) -> Any:
    members = Members(said, "config.json")
    return hugging_face_config(members, None, None), quantization_of(members)


CONFIG_CHANGES: Final = {
    "model_type": after(model_type="gemma"),
    "architectures": after(architectures=["LlamaForSequenceClassification"]),
    "hidden_size": after(hidden_size=512),
    "num_hidden_layers": after(num_hidden_layers=3),
    "num_attention_heads": after(num_attention_heads=4),
    "num_key_value_heads": after(num_key_value_heads=4),
    "head_dim": after(head_dim=128),
    "intermediate_size": after(intermediate_size=1024),
    "vocab_size": after(vocab_size=96),
    "max_position_embeddings": after(max_position_embeddings=512),
    "original_max_position_embeddings": (
        {"rope_scaling": STRETCHED},
        {"rope_scaling": STRETCHED, "original_max_position_embeddings": 32},
    ),
    "rope_theta": after(rope_theta=1e6),
    "rope_scaling": after(rope_scaling=STRETCHED),
    "rope_parameters": after(rope_parameters=STRETCHED),
    "rms_norm_eps": after(rms_norm_eps=1e-3),
    "eos_token_id": after(eos_token_id=[3, 5]),
    "quantization_config": after(quantization_config={"quant_method": "gptq"}),
}


WINDOW: Final = {"use_sliding_window": True, "sliding_window": 16, "max_window_layers": 1}
QWEN_CHANGES: Final[dict[str, tuple[Said, Said]]] = {
    "use_sliding_window": (WINDOW | {"use_sliding_window": False}, WINDOW),
    "sliding_window": (WINDOW, WINDOW | {"sliding_window": 17}),
    "max_window_layers": (WINDOW, WINDOW | {"max_window_layers": 0}),
    "layer_types": (WINDOW, WINDOW | {"layer_types": ["sliding_attention", "full_attention"]}),
}
PHI3_ROPE: Final = {"rope_type": "longrope", "short_factor": [1.0] * 16, "long_factor": [2.0] * 16}
PHI3_CHANGES: Final[dict[str, tuple[Said, Said]]] = {
    "sliding_window": after(sliding_window=16),
    "partial_rotary_factor": after(partial_rotary_factor=0.5),
    "rope_scaling": after(rope_scaling=PHI3_ROPE),
    "rope_parameters": after(rope_parameters=PHI3_ROPE),
    "original_max_position_embeddings": (
        {"rope_scaling": PHI3_ROPE},
        {"rope_scaling": PHI3_ROPE, "original_max_position_embeddings": 32},
    ),
}


GLOBAL_LINEAR: Final = {"rope_type": "linear", "factor": 4.0}
GEMMA3_CHANGES: Final[dict[str, tuple[Said, Said]]] = {
    "sliding_window": after(sliding_window=16),
    "sliding_window_pattern": (
        {"layer_types": None, "sliding_window_pattern": 2},
        {"layer_types": None, "sliding_window_pattern": 1},
    ),
    "layer_types": after(layer_types=["full_attention", "sliding_attention"]),
    "num_hidden_layers": after(num_hidden_layers=3, layer_types=None),
    "query_pre_attn_scalar": after(query_pre_attn_scalar=64),
    "rope_local_base_freq": after(rope_local_base_freq=20_000.0),
    "rope_scaling": after(rope_scaling=GLOBAL_LINEAR),
    "rope_parameters": after(rope_parameters={"full_attention": GLOBAL_LINEAR}),
}
STEPS: Final = {"mlp_only_layers": [0], "decoder_sparse_step": 1}
MOE_CHANGES: Final[dict[str, tuple[Said, Said]]] = {
    "num_hidden_layers": after(num_hidden_layers=5),
    "use_sliding_window": after(use_sliding_window=True),
    "sliding_window": ({"use_sliding_window": True}, {"use_sliding_window": True, "sliding_window": 16}),
    "num_experts": after(num_experts=7),
    "num_local_experts": ({"num_experts": None}, {"num_experts": None, "num_local_experts": 7}),
    "num_experts_per_tok": after(num_experts_per_tok=3),
    "moe_intermediate_size": after(moe_intermediate_size=96),
    "norm_topk_prob": after(norm_topk_prob=False),
    "decoder_sparse_step": after(decoder_sparse_step=1),
    "mlp_only_layers": (STEPS, STEPS | {"mlp_only_layers": [0, 1]}),
}
NO_LLAMA_3: Final = ("original_max_position_embeddings",)
"""Keys of scalings that a Gemma 3 may not have."""

MODEL_TYPES: Final = {Family.GEMMA3: "gemma3_text"}
"""Families that have another name in config.json."""


def config_kind(family: Family) -> Kind:
    base = config_json(FOLDER_MODELS[family])
    more = {
        Family.LLAMA: {},
        Family.QWEN2: QWEN_CHANGES,
        Family.QWEN3: QWEN_CHANGES,
        Family.PHI3: PHI3_CHANGES,
        Family.GEMMA3: GEMMA3_CHANGES,
        Family.QWEN3_MOE: MOE_CHANGES,
    }
    changes = CONFIG_CHANGES | {"tie_word_embeddings": after(tie_word_embeddings=not base["tie_word_embeddings"])}
    if family is Family.GEMMA3:
        changes = {key: change for key, change in changes.items() if key not in NO_LLAMA_3}
    return Kind(CONFIG_KEYS[MODEL_TYPES.get(family, family)], load_config, base, changes | more[family])


def load_generation(said: Said) -> Any:
    return hugging_face_config(
        Members(config_json(QWEN3), "config.json"), Members(said, "generation_config.json"), None
    )


def load_rope(said: Said) -> Any:
    return load_config(config_json(QWEN3) | {"rope_parameters": said})


ROPE_CHANGES: Final = {
    "rope_theta": after(rope_theta=1e6),
    "rope_type": after(rope_type="odd"),
    "type": ({"rope_type": None}, {"rope_type": None, "type": "llama3"}),
    "factor": after(factor=4.0),
    "low_freq_factor": after(low_freq_factor=2.0),
    "high_freq_factor": after(high_freq_factor=8.0),
    "original_max_position_embeddings": after(original_max_position_embeddings=32),
    "attention_factor": (YARN, YARN | {"attention_factor": 1.5}),
    "beta_fast": (YARN, YARN | {"beta_fast": 8.0}),
    "beta_slow": (YARN, YARN | {"beta_slow": 2.0}),
    "mscale": (YARN | {"mscale_all_dim": 0.5}, YARN | {"mscale_all_dim": 0.5, "mscale": 1.0}),
    "mscale_all_dim": (YARN | {"mscale": 0.5}, YARN | {"mscale": 0.5, "mscale_all_dim": 1.0}),
    "truncate": (YARN, YARN | {"truncate": False}),
    "short_factor": (LONG, LONG | {"short_factor": [3.0] * 32}),
    "long_factor": (LONG, LONG | {"long_factor": [3.0] * 32}),
}


def load_layered_rope(said: Said) -> Any:
    return load_config(config_json(FOLDER_MODELS["gemma3"]) | {"rope_parameters": {"full_attention": said}})


IMAGE_TEXT: Final = {key: value for key, value in config_json(FOLDER_MODELS["gemma3"]).items() if key[:3] != "tie"}
IMAGE_MODEL: Final = {
    "model_type": "gemma3",
    "architectures": ["Gemma3ForConditionalGeneration"],
    "text_config": IMAGE_TEXT,
}
IMAGE_MODEL_CHANGES: Final = {
    "model_type": after(model_type="gemma3n"),
    "architectures": after(architectures=["Gemma3ForCausalLM"]),
    "text_config": after(text_config=IMAGE_TEXT | {"hidden_size": 512}),
    "eos_token_id": after(eos_token_id=[3, 5]),
    "tie_word_embeddings": after(tie_word_embeddings=False),
}

LAYERED_ROPE_CHANGES: Final = {
    "rope_theta": after(rope_theta=2e6),
    "rope_type": after(rope_type="yarn"),
    "type": ({"rope_type": None}, {"rope_type": None, "type": "linear"}),
    "factor": after(factor=8.0),
}


# --- Tokenizers. ---


def load_text(tokenizer: Tokenizer) -> Any:
    chat = tokenizer.encode_chat([{"role": "user", "content": "ab"}]) if tokenizer.chat_template else None
    every = range(tokenizer.vocabulary)
    return tokenizer.begin_token, [tokenizer.encode(text) for text in TEXTS], chat, tokenizer.decode(every)


def library_json() -> Said:
    library = LibraryTokenizer(models.BPE({**LETTERS, "ab": 256}, [("a", "b")]))
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    library.decoder = decoders.ByteLevel()
    library.add_special_tokens(["<begin>", "<end>"])
    said: Said = json.loads(library.to_str())
    return said


def load_folder(tokenizer: Said, settings: Said) -> Any:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
        (folder / "tokenizer_config.json").write_text(json.dumps(settings))
        return load_text(folder_tokenizer(folder, folder_begin_token(folder)))


TOKENIZER: Final = library_json()
MODEL: Final = TOKENIZER["model"]
BEGINS: Final = {
    "type": "TemplateProcessing",
    "single": [{"SpecialToken": {"id": "<begin>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
    "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 0}}],
    "special_tokens": {"<begin>": {"id": "<begin>", "ids": [257], "tokens": ["<begin>"]}},
}
TOKENIZER_CHANGES: Final = {
    "added_tokens": after(added_tokens=[]),
    "normalizer": after(normalizer={"type": "Lowercase"}),
    "pre_tokenizer": after(pre_tokenizer={**TOKENIZER["pre_tokenizer"], "add_prefix_space": True}),
    "post_processor": after(post_processor=BEGINS),
    "decoder": after(decoder={"type": "WordPiece", "prefix": "##", "cleanup": True}),
    "model": after(model=MODEL | {"merges": []}),
}
TOKENIZER_SAMPLES: Final = {
    "version": ("1.0",),
    "truncation": ({"direction": "Right", "max_length": 2, "strategy": "LongestFirst", "stride": 0},),
    "padding": tuple(
        {
            "strategy": {"Fixed": 64},
            "direction": direction,
            "pad_to_multiple_of": None,
            "pad_id": 0,
            "pad_type_id": 0,
            "pad_token": "<end>",
        }
        for direction in ("Left", "Right")
    ),
}

UNIGRAM: Final = {"type": "Unigram", "unk_id": 0, "vocab": [["<begin>", 0.0], ["a", -1.0], ["b", -2.0]]}
WORDS: Final = {
    "type": "WordPiece",
    "unk_token": "a",
    "continuing_subword_prefix": "##",
    "max_input_chars_per_word": 100,
    "vocab": MODEL["vocab"] | {"##B": 257, "##C": 258},
}
NO_ACCENT: Final = {letter: token for letter, token in MODEL["vocab"].items() if letter not in ("Ã", "©")}
MODEL_CHANGES: Final = {
    "type": (WORDS, WORDS | {"type": "WordLevel"}),
    "vocab": after(vocab={**LETTERS, "A": LETTERS["B"], "B": LETTERS["A"], "ab": 256}),
    "merges": after(merges=[]),
    "unk_token": ({"vocab": NO_ACCENT}, {"vocab": NO_ACCENT, "unk_token": "a"}),
    "unk_id": (UNIGRAM, UNIGRAM | {"unk_id": 1}),
    "continuing_subword_prefix": (
        {"vocab": {**MODEL["vocab"], "##b": 257}},
        {
            "vocab": {**MODEL["vocab"], "##b": 257},
            "merges": [],
            "continuing_subword_prefix": "##",
        },
    ),
    "end_of_word_suffix": ({}, {"vocab": {**MODEL["vocab"], "b</w>": 257}, "merges": [], "end_of_word_suffix": "</w>"}),
    "max_input_chars_per_word": (WORDS, WORDS | {"max_input_chars_per_word": 1}),
    "fuse_unk": (
        {"vocab": NO_ACCENT, "unk_token": "a", "fuse_unk": False},
        {"vocab": NO_ACCENT, "unk_token": "a", "fuse_unk": True},
    ),
    "byte_fallback": (
        {"vocab": {**NO_ACCENT, "<0xC3>": 258, "<0x83>": 259}, "unk_token": "a"},
        {"vocab": {**NO_ACCENT, "<0xC3>": 258, "<0x83>": 259}, "unk_token": "a", "byte_fallback": True},
    ),
    "ignore_merges": ({"merges": []}, {"merges": [], "ignore_merges": True}),
}

ZZ: Final = {"content": "ab", "single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
SETTINGS: Final = {"chat_template": "{{ bos_token }}{{ messages[0].content }}", "bos_token": "<begin>"}
SETTINGS_CHANGES: Final = {
    "chat_template": after(chat_template="chat"),
    "tokenizer_class": ({"add_bos_token": True}, {"add_bos_token": True, "tokenizer_class": "Qwen2Tokenizer"}),
    "add_bos_token": after(add_bos_token=True),
    "add_prefix_space": after(add_prefix_space=True),
    "added_tokens_decoder": after(added_tokens_decoder={"256": ZZ | {"special": True}}),
    "additional_special_tokens": after(additional_special_tokens=["ab"]),
    "extra_special_tokens": after(extra_special_tokens={"image_token": "ab"}),
    "*_token": after(bos_token="<end>"),
}


# --- GGUF. ---

AT: Final = "tokenizer.ggml."
GGUF_TOKENS: Final = [*LETTERS, "ab", "<begin>", "<end>", "<fill>"]
GGUF: Final = gguf_metadata(QWEN3) | {
    "general.architecture": "qwen3",
    f"{AT}model": "gpt2",
    f"{AT}pre": "qwen2",
    f"{AT}tokens": GGUF_TOKENS,
    f"{AT}token_type": [1] * 257 + [CONTROL] * 3,
    f"{AT}merges": ["a b"],
    f"{AT}bos_token_id": 257,
    f"{AT}eos_token_id": 258,
    f"{AT}add_bos_token": True,
    "tokenizer.chat_template": "{{ bos_token }}{{ messages[0].content }}{{ unk_token }}{{ pad_token }}",
}
PIECES: Final = {
    f"{AT}model": "llama",
    f"{AT}tokens": [*GGUF_TOKENS, *(f"<0x{byte:02X}>" for byte in range(256)), "▁a", "▁"],
    f"{AT}token_type": [1] * 257 + [CONTROL] * 3 + [6] * 256 + [1, 1],
    f"{AT}scores": [-float(token) for token in range(len(GGUF_TOKENS) + 258)],
}


def load_gguf(said: Said) -> Any:
    members = Members({key: value for key, value in said.items() if value is not None}, "a.gguf")
    config = gguf_config(members, 1000, is_tied=True)
    return config, load_text(gguf_tokenizer(used_members(members, GGUF_KEYS[Family.QWEN3]), config.begin_token))


def architecture(**said: Any) -> tuple[Said, Said]:
    return {}, {f"qwen3.{name.replace('__', '.')}": value for name, value in said.items()}


def vocabulary(**said: Any) -> tuple[Said, Said]:
    return {}, {f"{AT}{name}": value for name, value in said.items()}


TWELVE: Final = {f"{AT}tokens": [*GGUF_TOKENS, "12"], f"{AT}pre": "gpt-2", f"{AT}merges": ["1 2"]}
"""Return a file that has a number as one token, and does not split numbers into digits."""

GGUF_CHANGES: Final = {
    "general.architecture": after(**{"general.architecture": "gemma"}),
    "qwen3.context_length": architecture(context_length=512),
    "qwen3.embedding_length": architecture(embedding_length=512),
    "qwen3.block_count": architecture(block_count=3),
    "qwen3.feed_forward_length": architecture(feed_forward_length=1024),
    "qwen3.attention.head_count": architecture(attention__head_count=4),
    "qwen3.attention.head_count_kv": architecture(attention__head_count_kv=4),
    "qwen3.attention.key_length": architecture(attention__key_length=128, attention__value_length=128),
    "qwen3.attention.value_length": architecture(attention__value_length=32),
    "qwen3.attention.layer_norm_rms_epsilon": architecture(attention__layer_norm_rms_epsilon=1e-3),
    "qwen3.rope.dimension_count": architecture(rope__dimension_count=32),
    "qwen3.rope.freq_base": architecture(rope__freq_base=1e6),
    f"{AT}model": ({}, PIECES),
    f"{AT}pre": (TWELVE, TWELVE | {f"{AT}pre": "qwen2"}),
    f"{AT}tokens": vocabulary(tokens=[*GGUF_TOKENS[:-1], "é"]),
    f"{AT}token_type": vocabulary(token_type=[1] * 260),
    f"{AT}scores": (PIECES, PIECES | {f"{AT}scores": [float(token) for token in range(len(GGUF_TOKENS) + 258)]}),
    f"{AT}merges": (TWELVE, TWELVE | {f"{AT}merges": ["a b"]}),
    f"{AT}bos_token_id": vocabulary(bos_token_id=259),
    f"{AT}eos_token_id": vocabulary(eos_token_id=259),
    f"{AT}eot_token_id": vocabulary(eot_token_id=259),
    f"{AT}eom_token_id": vocabulary(eom_token_id=259),
    f"{AT}fim_pad_token_id": vocabulary(fim_pad_token_id=259),
    f"{AT}fim_rep_token_id": vocabulary(fim_rep_token_id=259),
    f"{AT}fim_sep_token_id": vocabulary(fim_sep_token_id=259),
    f"{AT}unknown_token_id": vocabulary(unknown_token_id=259),
    f"{AT}padding_token_id": vocabulary(padding_token_id=259),
    f"{AT}add_bos_token": vocabulary(add_bos_token=False),
    f"{AT}add_space_prefix": (PIECES, PIECES | {f"{AT}add_space_prefix": False}),
    "tokenizer.chat_template": after(**{"tokenizer.chat_template": "chat"}),
}

KINDS: Final = {
    **{f"config.json of {family}": config_kind(family) for family in Family},
    "config.json of a Gemma 3 with images": Kind(
        IMAGE_MODEL_KEYS,
        lambda said: hugging_face_config(Members(said, "config.json"), None, None),
        IMAGE_MODEL,
        IMAGE_MODEL_CHANGES,
    ),
    "rope_parameters": Kind(ROPE_KEYS, load_rope, STRETCHED, ROPE_CHANGES),
    "rope_parameters of Gemma 3": Kind(LAYERED_ROPE_KEYS, load_layered_rope, GLOBAL_LINEAR, LAYERED_ROPE_CHANGES),
    "generation_config.json": Kind(GENERATION_KEYS, load_generation, {}, {"eos_token_id": after(eos_token_id=[3, 5])}),
    "tokenizer.json": Kind(
        TOKENIZER_KEYS, lambda said: load_folder(said, {}), TOKENIZER, TOKENIZER_CHANGES, TOKENIZER_SAMPLES
    ),
    "its model": Kind(MODEL_KEYS, lambda said: load_folder(TOKENIZER | {"model": said}, {}), MODEL, MODEL_CHANGES),
    "tokenizer_config.json": Kind(SETTINGS_KEYS, lambda said: load_folder(TOKENIZER, said), SETTINGS, SETTINGS_CHANGES),
    "GGUF": Kind(GGUF_KEYS[Family.QWEN3], load_gguf, GGUF, GGUF_CHANGES, elsewhere=frozenset({"general.alignment"})),
}


def keys_of(kind: Kind, *effects: Effect) -> list[str]:
    return [key for key, entry in kind.table.items() if entry.effect in effects and key not in kind.elsewhere]


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
def test_a_used_key_changes_what_is_loaded(kind: Kind) -> None:
    assert kind.changes.keys() == set(keys_of(kind, Effect.USED))
    for key, (before, changed) in kind.changes.items():
        found, outcome = kind.load(kind.base | before), kind.outcome(changed)
        assert outcome != found, key
        if isinstance(outcome, str):
            assert key in outcome


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
def test_a_refused_key_is_refused_by_name_unless_it_is_neutral(kind: Kind) -> None:
    plain = kind.load(kind.base)
    for key in keys_of(kind, Effect.REFUSED):
        entry = kind.table[key]
        for value in ODD:
            if not entry.is_neutral(value):
                assert f"{key} is {str(value)!r}" in str(kind.outcome({key: value}))
        # The library does not accept a list as a number.
        lists: list[list[Any]] = [] if kind.table is MODEL_KEYS else [[], list(entry.neutral)]
        for value in (None, *lists, *entry.neutral):
            assert kind.load(kind.base | {key: value}) == plain, (key, value)


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
def test_a_key_without_effect_changes_nothing(kind: Kind) -> None:
    plain = kind.load(kind.base)
    for key in keys_of(kind, Effect.NONE, Effect.ADVICE):
        for value in kind.samples.get(key, ODD):
            assert kind.load(kind.base | {key.replace("*", "odd"): value}) == plain, (key, value)


@pytest.mark.parametrize("name", [name for name in KINDS if name != "tokenizer.json"])
def test_an_unknown_key_is_logged_and_changes_nothing(name: str, caplog: pytest.LogCaptureFixture) -> None:
    """Of tokenizer.json the library takes none."""
    kind, key = KINDS[name], f"no key\nof {name}"
    plain = kind.load(kind.base)
    with caplog.at_level(logging.WARNING, "gpulease.decode"):
        assert kind.load(kind.base | {key: 7}) == plain
    assert any(line.endswith(f"unknown keys are ignored: {key!r}") for line in caplog.messages)


def test_a_file_s_unknown_keys_are_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "gpulease.decode"):
        for _ in range(2):
            used_members(Members({"odd": 7}, "generation_config.json of this test"), GENERATION_KEYS)
    assert len(caplog.records) == 1


def test_advice_is_logged_once_with_its_value(caplog: pytest.LogCaptureFixture) -> None:
    said = {"temperature": 1.0, "top_k": 20, "repetition_penalty": 1.05}
    with caplog.at_level(logging.WARNING, "gpulease.decode"):
        for _ in range(2):
            used_members(Members(said, "generation_config.json of this test"), GENERATION_KEYS)
    (record,) = caplog.records
    assert record.getMessage().endswith("because each request sets its own: top_k '20', repetition_penalty '1.05'")


def test_a_file_of_many_unknown_keys_makes_one_short_line(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "gpulease.decode"):
        used_members(Members({f"{'x' * 500}{n}": n for n in range(500)}, "many keys"), GENERATION_KEYS)
    (record,) = caplog.records
    assert len(record.getMessage()) < 4000
    assert record.getMessage().endswith(" and 480 more")


@pytest.mark.parametrize(("architecture", "family"), GGUF_FAMILIES.items())
@pytest.mark.parametrize("group", ["General", "Tokenizer", "Rope", "Split"])
def test_the_keys_of_the_gguf_library_are_known(architecture: str, family: Family, group: str) -> None:
    names = [value for name, value in vars(getattr(gguf.Keys, group)).items() if name.isupper() and name[0] != "_"]
    assert names
    for name in names:
        told = name.format(arch=architecture, id=0, name="tool_use")
        assert find_key(told, GGUF_KEYS[family]) is not None, told


@pytest.mark.parametrize("family", Family)
def test_the_keys_of_transformers_are_known(family: Family) -> None:
    transformers = pytest.importorskip("transformers")
    kind = {Family.GEMMA3: "Gemma3TextConfig", Family.QWEN3_MOE: "Qwen3MoeConfig"}.get(
        family, f"{family.capitalize()}Config"
    )
    for name in (*getattr(transformers, kind)().to_dict(), "rope_scaling", "rope_theta"):
        assert name in CONFIG_KEYS[MODEL_TYPES.get(family, family)], name
    for name in transformers.GenerationConfig().to_dict():
        assert name in GENERATION_KEYS, name
    for name in transformers.modeling_rope_utils.RopeParameters.__annotations__:
        assert name in ROPE_KEYS, name


@pytest.mark.parametrize("key", ["layer_types", "rope_theta", "suppress_tokens", "use_cache"])
def test_lists_in_lists_are_refused_or_left_out(key: str) -> None:
    deep = json.loads("[" * 900 + "]" * 900)
    said = config_json(QWEN3) | {key: deep}
    if key == "use_cache":
        assert load_config(said) == load_config(config_json(QWEN3))
        return
    with pytest.raises(ModelRejected, match=f"{key} (is|must be) "):
        load_config(said)
