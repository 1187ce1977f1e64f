"""The gateway's file of models: the example, and errors in other files."""

from pathlib import Path

import pytest

from gpulease.client import InvalidRequest
from gpulease.client.serve.gateway.inference import MAX_LEASE_S, InferenceKernel
from gpulease.client.serve.gateway.settings import EXAMPLE, load_models

RIGHT = 'ptx = "k.ptx"\nkernel = "k"\nmin_vram_bytes = 1\n'


@pytest.fixture
def file(tmp_path: Path) -> Path:
    (tmp_path / "k.ptx").write_bytes(b"ptx")
    return tmp_path / "models.toml"


def test_the_example() -> None:
    (model,) = load_models(EXAMPLE).values()
    assert model.kernel == InferenceKernel("affine", 256, 4)
    assert b".entry affine" in model.image


def test_defaults(file: Path) -> None:
    file.write_text(f"[models.m]\n{RIGHT}")
    model = load_models(file)["m"]
    assert (model.image, model.lease_s, model.kernel.blocks(1025)) == (b"ptx", 10.0, 2)
    assert model.kernel.arguments == ("in", "input_len:u64", "out", "output_len:u64")


def test_a_kernel_s_own_arguments(file: Path) -> None:
    file.write_text(f'[models.m]\n{RIGHT}arguments = ["output_len:u32", "inout"]')
    kernel = load_models(file)["m"].kernel
    assert (kernel.arguments, kernel.is_in_place) == (("output_len:u32", "inout"), True)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("not toml", "models.toml"),
        ("", "1 to 256 tables"),
        ("other = 1\n[models.m]\n" + RIGHT, "nothing else"),
        ("models = 1", "1 to 256 tables"),
        ("[models]\nm = 1", "must be a table"),
        ('[models."a\\u0000b"]\n' + RIGHT, "model id"),
        ("[models.m]\n" + RIGHT + "vram = 1", "there is no setting models.m.vram"),
        (
            "[models.m]\n" + RIGHT + "lease_secs = true",
            "models.m.lease_secs must be a number above 0 and at most 300, not True",
        ),
        (
            "[models.m]\n" + RIGHT + f"lease_secs = {MAX_LEASE_S + 1}",
            "models.m.lease_secs must be a number above 0 and at most 300, not 301",
        ),
        (
            "[models.m]\n" + RIGHT + "max_output_bytes = 0",
            "models.m.max_output_bytes must be a whole number from 1 to 16777216, not 0",
        ),
        (
            "[models.m]\n" + RIGHT + "threads_per_block = 1025",
            "models.m.threads_per_block must be a whole number from 1 to 1024, not 1025",
        ),
        ("[models.m]\n" + RIGHT + 'arguments = "inout"', "models.m.arguments must be a list, not 'inout'"),
        (
            "[models.m]\n" + RIGHT + 'arguments = ["inout", 1]',
            "models.m: kernel k: arguments: 1 must be one of in, out",
        ),
        ("[models.m]\n" + RIGHT + 'arguments = [["inout"]]', r"\['inout'\] must be one of in, out"),
        ("[models.m]\n" + RIGHT + 'arguments = ["inout", "output_len"]', "'output_len' must be one of in, out"),
        ("[models.m]\n" + RIGHT + 'arguments = ["in", "in", "out"]', "each must occur only once"),
        ("[models.m]\n" + RIGHT + 'arguments = ["in", "inout"]', '"in" and "out", or only "inout"'),
        ("[models.m]\n" + RIGHT + 'arguments = ["output_len:u32"]', '"in" and "out", or only "inout"'),
        ('[models.m]\nkernel = "k"\n', "models.m.ptx must be given, and min_vram_bytes"),
        (
            "[models.m]\n" + RIGHT.replace("k.ptx", "none.ptx"),
            r"models.m.ptx: 'none.ptx': No such file or directory$",
        ),
    ],
)
def test_what_is_wrong_is_named(file: Path, text: str, said: str) -> None:
    file.write_text(text)
    with pytest.raises(InvalidRequest, match=said):
        load_models(file)


def test_no_file(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest, match=r"/nothing: No such file or directory$"):
        load_models(tmp_path / "nothing")
