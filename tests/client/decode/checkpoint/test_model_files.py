"""Paths that are not regular files are refused, because reading one could wait or never end."""

import os
import socket
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Final

import pytest
from tokenizers import Tokenizer, decoders, models

from gpulease.client.decode.checked_file import file_sha256
from gpulease.client.decode.checkpoint import open_model
from gpulease.client.decode.decode_errors import ModelRejected
from gpulease.client.decode.text.letters import LETTERS
from helpers.made_models import QWEN2, random_weights, write_folder, write_gguf

SMALL: Final = replace(QWEN2, layers=1, width=32, heads=1, key_heads=1, inner_width=32, vocabulary=4)


def make_socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as bound:
        # Bind through the folder's descriptor: the path itself may be too long for a socket's address.
        bound.bind(f"/proc/self/fd/{(folder := os.open(path.parent, os.O_PATH))}/{path.name}")
        os.close(folder)


IMPOSTORS: Final[dict[str, Callable[[Path], None]]] = {
    "fifo": lambda path: os.mkfifo(path),
    "device": lambda path: path.symlink_to("/dev/zero"),
    "folder": lambda path: path.mkdir(),
    "socket": make_socket,
}


def model_folder(folder: Path, files: int = 1) -> Path:
    library = Tokenizer(models.BPE(dict(LETTERS), []))
    library.decoder = decoders.ByteLevel()
    write_folder(folder, SMALL, random_weights(SMALL), files=files)
    library.save(str(folder / "tokenizer.json"))
    for name in ("generation_config.json", "tokenizer_config.json", "special_tokens_map.json"):
        (folder / name).write_text("{}")
    (folder / "chat_template.jinja").write_text("chat")
    return folder


@pytest.mark.parametrize("impostor", IMPOSTORS)
@pytest.mark.parametrize(
    ("name", "files"),
    [
        ("config.json", 1),
        ("generation_config.json", 1),
        ("tokenizer.json", 1),
        ("tokenizer_config.json", 1),
        ("special_tokens_map.json", 1),
        ("chat_template.jinja", 1),
        ("model.safetensors", 1),
        ("model.safetensors.index.json", 2),
        ("model-00002-of-00002.safetensors", 2),
    ],
)
def test_what_is_no_file_in_a_model_s_folder_is_refused(tmp_path: Path, impostor: str, name: str, files: int) -> None:
    folder = model_folder(tmp_path / "model", files)
    open_model(folder).tokenizer()
    (folder / name).unlink()
    IMPOSTORS[impostor](folder / name)
    with pytest.raises(ModelRejected, match=f"{folder / name}: .*"):
        open_model(folder).tokenizer()


@pytest.mark.parametrize("impostor", [name for name in IMPOSTORS if name != "folder"])
def test_what_is_no_file_in_the_place_of_gguf_is_refused(tmp_path: Path, impostor: str) -> None:
    path = write_gguf(tmp_path / "a.gguf", SMALL, random_weights(SMALL))
    open_model(path)
    path.unlink()
    IMPOSTORS[impostor](path)
    with pytest.raises(ModelRejected, match=f"{path}: .*"):
        open_model(path)


@pytest.mark.parametrize("impostor", IMPOSTORS)
def test_what_is_no_file_has_no_digest(tmp_path: Path, impostor: str) -> None:
    IMPOSTORS[impostor](tmp_path / "a")
    with pytest.raises(ModelRejected, match=f"{tmp_path / 'a'}: can't be read"):
        file_sha256(tmp_path / "a")
