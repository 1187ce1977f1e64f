"""Another process reads the same texts of a model as this one would."""

from pathlib import Path

import pytest

from gpulease.client.decode import TINY_MODEL, open_model
from gpulease.client.decode.decode_errors import ModelRejected, TextProcessesFailed
from gpulease.client.decode.supervisor import model_texts
from gpulease.client.decode.supervisor.model_texts import read_model_texts
from gpulease.client.decode.text.named_prefixes import NamedPrefix, shared_prefixes
from gpulease.client.decode.text.text_jobs import packed
from gpulease.client.decode.text.tokenizer import Tokenizer

TEXT = "You answer questions about the documentation of a programming language."


def test_a_tokenizer_and_prefixes_are_those_of_the_files() -> None:
    ours = open_model(TINY_MODEL).tokenizer()
    assert isinstance(ours, Tokenizer)
    prefixes = NamedPrefix("a", text=TEXT), NamedPrefix("b", system=TEXT), NamedPrefix("c", token_ids=tuple(range(20)))
    texts = read_model_texts(TINY_MODEL, prefixes, 256)
    assert texts.prefixes == shared_prefixes(prefixes, ours, 256)
    theirs = texts.tokenizer
    assert theirs.table() == ours.table()
    assert packed(theirs.values()) == packed(ours.values())
    assert theirs.render_chat([{"role": "user", "content": "a"}], {}) == ours.render_chat(
        [{"role": "user", "content": "a"}], {}
    )
    assert theirs._loaded is None


def test_mistakes_in_a_model_s_files_and_prefixes_are_named(tmp_path: Path) -> None:
    with pytest.raises(ModelRejected, match=r"nothing.gguf: the file or folder does not exist"):
        read_model_texts(tmp_path / "nothing.gguf")
    with pytest.raises(ModelRejected, match="prefix short must have at least 16 tokens"):
        read_model_texts(TINY_MODEL, [NamedPrefix("short", text="a")], 256)


def test_a_process_that_ends_by_itself_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model_texts, "MODULE", "gpulease.client.decode.supervisor.none")
    with pytest.raises(TextProcessesFailed, match="the process that read the tokenizer ended with status 1"):
        read_model_texts(TINY_MODEL)
    monkeypatch.setattr(model_texts, "START_LIMIT_S", 0.0)
    with pytest.raises(TextProcessesFailed, match=r"no process could read the tokenizer: .*timed out"):
        read_model_texts(TINY_MODEL)
