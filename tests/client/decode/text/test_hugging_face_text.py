import json
from pathlib import Path
from typing import Any, Final

import msgspec
import pytest
from tokenizers import Tokenizer as LibraryTokenizer
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors

from gpulease.client.decode.decode_errors import ModelRejected
from gpulease.client.decode.text import hugging_face_text
from gpulease.client.decode.text.hugging_face_text import folder_begin_token, folder_tokenizer
from gpulease.client.decode.text.letters import LETTERS

CHATML: Final = "{{ bos_token }}{{ messages[0].content }}{{ eos_token }}"


def library(begins: str | None = None) -> LibraryTokenizer:
    made = LibraryTokenizer(models.BPE(dict(LETTERS), []))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens(["<begin>", "<end>"])
    template = processors.TemplateProcessing(single="<begin> $A", special_tokens=[("<begin>", 256)])
    if begins == "alone":
        made.post_processor = template
    if begins == "in a sequence":
        made.post_processor = processors.Sequence([processors.ByteLevel(trim_offsets=False), template])
    return made


def write(folder: Path, made: LibraryTokenizer, says: dict[str, Any] | None = None) -> Path:
    made.save(str(folder / "tokenizer.json"))
    if says is not None:
        (folder / "tokenizer_config.json").write_text(json.dumps(says))
    return folder


@pytest.mark.parametrize(("begins", "token"), [("alone", 256), ("in a sequence", 256), (None, None)])
def test_the_begin_token_is_the_post_processor_s(tmp_path: Path, begins: str | None, token: int | None) -> None:
    made = library(begins)
    folder = write(tmp_path, made)
    assert folder_begin_token(folder) == token
    assert (made.encode("a").ids[0] == 256) == (token is not None)


ENDS: Final = [("<begin>", 256), ("<end>", 257)]


@pytest.mark.parametrize(
    ("processor", "sentence"),
    [
        (processors.TemplateProcessing(single="$A <end>", special_tokens=ENDS), "puts at most one token before a text"),
        (processors.TemplateProcessing(single="<begin> $A <end>", special_tokens=ENDS), "and none after it"),
        (processors.TemplateProcessing(single="<begin> <end> $A", special_tokens=ENDS), "puts at most one token"),
        (processors.BertProcessing(("<end>", 257), ("<begin>", 256)), "post_processor is 'BertProcessing'"),
        (processors.RobertaProcessing(("<end>", 257), ("<begin>", 256)), "post_processor is 'RobertaProcessing'"),
    ],
    ids=["behind", "around", "two", "bert", "roberta"],
)
def test_other_tokens_around_a_text_are_refused(
    tmp_path: Path, processor: processors.PostProcessor, sentence: str
) -> None:
    made = library()
    made.post_processor = processor
    with pytest.raises(ModelRejected, match=f"tokenizer.json: .*{sentence}"):
        folder_begin_token(write(tmp_path, made))


@pytest.mark.parametrize(
    ("begins", "says", "token"),
    [
        (None, {"add_bos_token": True, "bos_token": "<begin>"}, 256),
        (None, {"add_bos_token": True, "bos_token": {"content": "<end>"}}, 257),
        # A token that is not an added one.
        (None, {"add_bos_token": True, "bos_token": "a"}, ord("a")),
        ("alone", {"add_bos_token": False, "bos_token": "<end>"}, None),
        ("alone", {"add_bos_token": None, "bos_token": "<end>"}, 256),
        ("alone", {"add_eos_token": False}, 256),
        ("alone", {"add_bos_token": False, "tokenizer_class": "LlamaTokenizerFast"}, None),
        (None, {"add_bos_token": True, "bos_token": "<begin>", "tokenizer_class": "GemmaTokenizer"}, 256),
        ("alone", {"add_bos_token": False, "tokenizer_class": "PreTrainedTokenizerFast"}, 256),
        (None, {"add_bos_token": True, "bos_token": "<begin>", "tokenizer_class": "Qwen2Tokenizer"}, None),
    ],
)
def test_the_settings_say_whether_a_text_begins_with_a_token(
    tmp_path: Path, begins: str | None, says: dict[str, Any], token: int | None
) -> None:
    assert folder_begin_token(write(tmp_path, library(begins), says)) == token


def test_a_gemma_s_pieces_have_spaces_at_their_ends_and_bytes_for_other_letters(tmp_path: Path) -> None:
    """Its file is a BPE of pieces with ▁, without a space before a text: as transformers' GemmaTokenizer builds it."""
    pieces = ["<pad>", "<eos>", "<bos>", "<unk>", "<start_of_turn>", "a", "b", "▁", "a▁", "▁▁"]
    numbers = {piece: number for number, piece in enumerate(pieces)}
    numbers |= {f"<0x{byte:02X}>": len(pieces) + byte for byte in range(256)}
    merges = [("a", "▁"), ("▁", "▁")]
    made = LibraryTokenizer(models.BPE(numbers, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    made.normalizer = normalizers.Replace(" ", "▁")
    made.pre_tokenizer = pre_tokenizers.Split(" ", "merged_with_previous")
    made.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    made.add_special_tokens(pieces[:5])
    made.post_processor = processors.TemplateProcessing(single="<bos> $A", special_tokens=[("<bos>", 2)])
    says = {"tokenizer_class": "GemmaTokenizer", "add_bos_token": True, "add_eos_token": False, "bos_token": "<bos>"}
    more = {"sp_model_kwargs": None, "spaces_between_special_tokens": False, "image_token": "<start_of_turn>"}
    folder = write(tmp_path, made, says | more)
    assert folder_begin_token(folder) == 2
    tokenizer = folder_tokenizer(folder, 2)
    tokens = tokenizer.encode("a b  a<start_of_turn>é")
    assert tokens == [2, 8, 6, 9, 5, 4, len(pieces) + 0xC3, len(pieces) + 0xA9]
    assert tokenizer.decode([*tokens[1:5], *tokens[6:]]) == "a b  aé"


def test_settings_that_begin_with_no_token_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelRejected, match="add_bos_token is true, but bos_token '<s>' is not a token"):
        folder_begin_token(write(tmp_path, library(), {"add_bos_token": True, "bos_token": "<s>"}))


def test_settings_that_differ_about_the_space_before_a_text_are_refused(tmp_path: Path) -> None:
    made = library()
    assert folder_begin_token(write(tmp_path, made, {"add_prefix_space": False})) is None
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    assert folder_begin_token(write(tmp_path, made, {"add_prefix_space": True})) is None
    with pytest.raises(ModelRejected, match=r"add_prefix_space is False, but .*tokenizer.json differs"):
        folder_begin_token(write(tmp_path, made, {"add_prefix_space": False}))


def test_tokens_that_the_settings_alone_name_are_tokens(tmp_path: Path) -> None:
    added = {"content": "<more>", "single_word": False, "lstrip": False, "rstrip": True, "normalized": False}
    says = {"added_tokens_decoder": {"258": added | {"special": True}}, "additional_special_tokens": ["<last>"]}
    tokenizer = folder_tokenizer(write(tmp_path, library(), says), None)
    assert tokenizer.encode("a<more>  b<last>") == [ord("a"), 258, ord("b"), 259]


def test_a_token_that_has_another_number_in_the_settings_is_refused(tmp_path: Path) -> None:
    says = {"added_tokens_decoder": {"256": {"content": "<end>", "special": True}}}
    with pytest.raises(ModelRejected, match=r"added_tokens_decoder has '<end>' as 256, but tokenizer.json differs"):
        folder_tokenizer(write(tmp_path, library(), says), None)


def test_an_older_folder_s_special_tokens_are_in_a_file_of_their_own(tmp_path: Path) -> None:
    folder = write(tmp_path, library(), {"chat_template": CHATML, "eos_token": "<end>", "bos_token": None})
    (folder / "special_tokens_map.json").write_text('{"bos_token": {"content": "<begin>"}, "eos_token": "<odd>"}')
    template = folder_tokenizer(folder, None).chat_template
    assert template is not None
    assert template.render([{"content": "a"}]) == "<begin>a<end>"


def test_a_chat_begins_as_its_template_writes_it(tmp_path: Path) -> None:
    tokenizer = folder_tokenizer(write(tmp_path, library("alone"), {"chat_template": "{{ messages[0].content }}"}), 256)
    assert tokenizer.encode_chat([{"content": "a"}]) == [ord("a")]
    assert tokenizer.encode("a") == [256, ord("a")]


def test_a_folder_without_a_tokenizer_has_no_begin_token(tmp_path: Path) -> None:
    assert folder_begin_token(tmp_path) is None


def test_a_folder_s_tokenizer_is_the_library_s(tmp_path: Path) -> None:
    tokenizer = folder_tokenizer(write(tmp_path, library("alone")), 256)
    assert tokenizer.encode("aé<end>") == library("alone").encode("aé<end>").ids
    assert tokenizer.chat_template is None


@pytest.mark.parametrize(
    "says",
    [
        {"chat_template": CHATML, "bos_token": "<begin>", "eos_token": "<end>"},
        {"chat_template": CHATML, "bos_token": {"content": "<begin>"}, "eos_token": {"content": "<end>"}},
        {
            "chat_template": [{"name": "tool_use", "template": "x"}, {"name": "default", "template": CHATML}],
            "bos_token": "<begin>",
            "eos_token": "<end>",
        },
    ],
    ids=["texts", "objects", "templates by name"],
)
def test_a_chat_template_is_found_as_transformers_writes_it(tmp_path: Path, says: dict[str, Any]) -> None:
    tokenizer = folder_tokenizer(write(tmp_path, library(), says), None)
    assert tokenizer.encode_chat([{"role": "user", "content": "a"}]) == [256, ord("a"), 257]


def test_a_template_in_a_file_of_its_own_goes_first(tmp_path: Path) -> None:
    folder = write(tmp_path, library(), {"chat_template": "old", "bos_token": "<begin>"})
    (folder / "chat_template.jinja").write_text("{{ bos_token }}new")
    template = folder_tokenizer(folder, None).chat_template
    assert template is not None
    assert template.render([]) == "<begin>new"


@pytest.mark.parametrize(
    ("name", "text", "sentence"),
    [
        ("tokenizer.json", b"{", "tokenizer.json: not a valid tokenizer"),
        ("tokenizer.json", b"\xff", "tokenizer.json: must be UTF-8"),
        ("tokenizer.json", b'{"model": {"type": "BPE"}}', "tokenizer.json: not a valid tokenizer"),
        ("tokenizer_config.json", b"[]", "tokenizer_config.json: must be a JSON object"),
        ("tokenizer_config.json", b'{"chat_template": 7}', "tokenizer_config.json: chat_template must be a string"),
        ("tokenizer_config.json", b'{"chat_template": "{% if %}"}', "tokenizer_config.json: the chat template is inv"),
        ("chat_template.jinja", b"{% if %}", "chat_template.jinja: the chat template is invalid"),
    ],
)
def test_a_broken_file_is_named(tmp_path: Path, name: str, text: bytes, sentence: str) -> None:
    folder = write(tmp_path, library())
    (folder / name).write_bytes(text)
    with pytest.raises(ModelRejected, match=sentence):
        folder_tokenizer(folder, None)


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        (b"{", "tokenizer.json: must be JSON"),
        (b"[]", "tokenizer.json: must be a JSON object"),
        (b'"' + b"\xff" + b'"', "tokenizer.json: must be"),
        (b'{"model": {"vocab": ]}}', "tokenizer.json: must be JSON"),
        (b'{"model": 7}', "tokenizer.json: model must be an object, not '7'"),
        (b'{"added_tokens": ' + b"[" * 9999 + b"]" * 9999 + b"}", "tokenizer.json: must be JSON"),
    ],
)
def test_a_broken_file_has_no_begin_token(tmp_path: Path, text: bytes, sentence: str) -> None:
    (tmp_path / "tokenizer.json").write_bytes(text)
    with pytest.raises(ModelRejected, match=sentence):
        folder_begin_token(tmp_path)


def test_no_object_is_made_of_a_vocabulary(tmp_path: Path) -> None:
    """Nothing else of the process would run meanwhile."""
    write(tmp_path, library())
    model = hugging_face_text._tokenizer_members(tmp_path / "tokenizer.json").object("model")
    assert model is not None
    assert {type(model.values[key]) for key in ("vocab", "merges")} == {msgspec.Raw}


def test_a_missing_tokenizer_is_named(tmp_path: Path) -> None:
    with pytest.raises(ModelRejected, match=r"tokenizer.json: No such file or directory"):
        folder_tokenizer(tmp_path, None)
