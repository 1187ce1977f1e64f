"""The model server's file of models: accepted files, and a sentence for each error in others."""

from pathlib import Path

import pytest

from gpulease.client import InvalidRequest
from gpulease.client.http.settings_file import MAX_MODELS
from gpulease.client.serve.models.example.digits import HIDDEN, load_weights
from gpulease.client.serve.models.model_settings import EXAMPLE, load_settings

GOOD = """
method_id = 1
module = "kernel"
kernel = "k"
input_bytes = 8
output_bytes = 4
min_vram_bytes = 1_048_576
"""


def write(folder: Path, *tables: str) -> Path:
    (folder / "kernel").write_bytes(b"PTX")
    path = folder / "models.toml"
    path.write_text("\n".join(tables))
    return path


def model(name: str, *lines: str, method_id: int = 1) -> str:
    return f"[models.{name}]\n" + GOOD.replace("method_id = 1", f"method_id = {method_id}") + "\n".join(lines)


def test_the_example() -> None:
    models = load_settings(EXAMPLE)
    assert {name: found.smaller for name, found in models.items()} == {"digits": "digits-small", "digits-small": ""}
    for name, found in models.items():
        assert found.weights == load_weights(name).to_bytes()
        assert found.constants == (HIDDEN[name],)


def test_what_is_not_said_is_usual(tmp_path: Path) -> None:
    found = load_settings(write(tmp_path, model("one", "lease_secs = 7", "constants = [1, 2]")))["one"]
    assert (found.module, found.lease_secs, found.constants, found.max_batch) == (b"PTX", 7.0, (1, 2), 1)


@pytest.mark.parametrize(
    ("lines", "said"),
    [
        (["max_batch = 0"], "models.one.max_batch must be a whole number from 1 to 4096, not 0"),
        (["max_batch = true"], "models.one.max_batch must be a whole number from 1 to 4096, not True"),
        (["max_batch = 1.5"], "models.one.max_batch must be a whole number from 1 to 4096, not 1.5"),
        (["lease_secs = nan"], "models.one.lease_secs must be a number from 0.1 to 86400, not nan"),
        (["lease_secs = inf"], "models.one.lease_secs must be a number from 0.1 to 86400, not inf"),
        (['is_pure = "yes"'], "models.one.is_pure must be true or false, not "),
        (["is_pure = 1"], "models.one.is_pure must be true or false, not "),
        (["constants = [-1]"], "must be a list of integers"),
        (["constants = [true]"], "must be a list of integers"),
        (['weights = "nowhere"'], "models.one.weights: 'nowhere': No such file or directory$"),
        (["weights = 5"], "models.one.weights must be a string, not 5"),
        (["speed = 5"], "there is no setting models.one.speed"),
        (['smaller = "other"'], "must be another model"),
        (['smaller = "one"'], "must be another model"),
        (["max_batch = 4096", "[models.two]"], "models.two.method_id must be given, and module, and kernel"),
        (['input_type = "f33"'], "models.one.input_type must be 'f16', 'f32', "),
        (["input_type = [1]"], "models.one.input_type must be 'f16', "),
        (['input_type = "f32"'], "must be set together"),
        (['input_type = "f64"', 'output_type = "f64"'], "output_bytes must be a multiple of the size of f64, not 4"),
    ],
)
def test_what_is_wrong(tmp_path: Path, lines: list[str], said: str) -> None:
    with pytest.raises(InvalidRequest, match=said.replace("[", r"\[")):
        load_settings(write(tmp_path, model("one", *lines)))


@pytest.mark.parametrize(
    ("tables", "said"),
    [
        ([], "must contain 1 to"),
        (["[other]"], "must contain 1 to"),
        (["models = 3"], "must contain 1 to"),
        (["models.one = 3"], "must be a table"),
        (["not TOML"], "models.toml"),
        ([f"[models.m{n}]" for n in range(MAX_MODELS + 1)], "must contain 1 to"),
        ([model('"a b"')], "letters, digits and hyphens"),
        ([model('""')], "letters, digits and hyphens"),
        ([model("one"), model("two")], "the same method_id"),
        ([model("one", 'smaller = "two"'), model("two", 'smaller = "one"', method_id=2)], "must be another model"),
        (
            [model("one", 'smaller = "two"'), model("two", method_id=2).replace("input_bytes = 8", "input_bytes = 9")],
            "can't replace",
        ),
        ([model("one", "max_batch = 4096").replace("output_bytes = 4", "output_bytes = 100_000")], "must have at most"),
    ],
)
def test_what_is_wrong_with_all(tmp_path: Path, tables: list[str], said: str) -> None:
    with pytest.raises(InvalidRequest, match=said):
        load_settings(write(tmp_path, *tables))


def test_an_empty_module(tmp_path: Path) -> None:
    path = write(tmp_path, model("one"))
    (tmp_path / "kernel").write_bytes(b"")
    with pytest.raises(InvalidRequest, match="module: 'kernel' must have 1 to"):
        load_settings(path)
