"""Images compiled before: by this process, or by another that was laid out otherwise in memory."""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from gpulease.daemon import ptx
from gpulease.daemon.drivers.interface import ImageRejected
from gpulease.daemon.native import code_cache as kept_code
from gpulease.daemon.ptx import image
from gpulease.daemon.ptx.image import TranslatedImage, load_code, translate_image

# Names and addresses of all kinds, calls out of the code, two parts, a barrier: what must not be tied to one process.
IMAGE = b"""
.version 8.0
.target sm_75
.address_size 64
.global .u32 start = 41;
.global .u64 where = start;
.func (.param .b32 r) twice(.param .b32 a)
{
    .reg .b32 %a;
    ld.param.b32 %a, [a];
    add.u32 %a, %a, %a;
    st.param.b32 [r], %a;
    ret;
}
.visible .entry look(.param .u64 into) .maxntid 64, 1, 1
{
    .shared .b32 all[32];
    .reg .pred %p;
    .reg .b32 %v, %w;
    .reg .b64 %at, %from;
    .reg .f32 %f;
    ld.param.u64 %at, [into];
    ld.global.u64 %from, [where];
    ld.u32 %v, [%from];
    {
        .param .b32 given;
        .param .b32 got;
        st.param.b32 [given], %v;
        call (got), twice, (given);
        ld.param.b32 %v, [got];
    }
    shfl.sync.idx.b32 %w|%p, %v, 0, 31, -1;
    bar.sync 0;
    cvt.rn.f32.u32 %f, %w;
    sin.approx.f32 %f, %f;
    st.global.u32 [%at], %w;
    st.global.f32 [%at+4], %f;
    ret;
}
.visible .entry other() .reqntid 8, 2, 1 { ret; }
"""

SCRIPT = """
import sys
from gpulease.daemon.ptx import image, kernel_code
from gpulease.daemon.native import code_cache as kept_code
from gpulease.daemon.ptx.context import CpuContext
if sys.argv[2] == "kept":
    # Nothing may be translated or compiled.
    image.translate = kernel_code.emit_object = kept_code.emit_object = None
context = CpuContext(1 << 20)
kernels = context.module_load(open(sys.argv[1], "rb").read()).kernels
into = context.mem_alloc(8)
context.launch(kernels["look"], (1, 1, 1), (32, 1, 1), 0, into.to_bytes(8, "little"), 1)
found = bytearray(8)
context.mem_read(into, memoryview(found))
print(found.hex(), kernels["other"].required_block, kernels["look"].max_threads_per_block)
context.close()
"""


@pytest.fixture
def kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache, on disk and in this process."""
    monkeypatch.setenv(kept_code.DIRECTORY_VARIABLE, str(tmp_path / "kept"))
    monkeypatch.setattr(image, "_cached_code", type(image._cached_code)())
    return tmp_path / "kept"


def test_code_of_another_process_runs_here(kept: Path, tmp_path: Path) -> None:
    (tmp_path / "image.ptx").write_bytes(IMAGE)
    outputs = [
        subprocess.run(
            [sys.executable, "-P", "-c", SCRIPT, str(tmp_path / "image.ptx"), how],
            env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
            capture_output=True,
            text=True,
            timeout=60,
            check=True,
        ).stdout
        for how in ("new", "kept")
    ]
    assert outputs[0].startswith((82).to_bytes(4, "little").hex())
    assert outputs[0].endswith("(8, 2, 1) 64\n")
    assert outputs[1] == outputs[0]


def test_an_image_is_translated_once(kept: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = load_code(IMAGE, slice_bytes=1 << 20)
    monkeypatch.setattr(image, "translate_image", None)
    assert load_code(IMAGE, slice_bytes=1 << 20) is first
    image._cached_code.clear()
    assert load_code(IMAGE, slice_bytes=1 << 20).image == first.image


def test_a_slice_too_small_is_told_each_time(kept: Path) -> None:
    for slice_bytes in (8, 1 << 20, 8):
        if slice_bytes == 8:
            with pytest.raises(ImageRejected, match="the slice has 8"):
                load_code(IMAGE, slice_bytes=slice_bytes)
        else:
            load_code(IMAGE, slice_bytes=slice_bytes)


@pytest.mark.parametrize("what", ["text", "processor", "sources"])
def test_another_text_processor_or_translator_is_another_key(monkeypatch: pytest.MonkeyPatch, what: str) -> None:
    before = kept_code.key_of(b"image", b"text", ptx)
    kept_code._identity.cache_clear()
    assert kept_code.key_of(b"image", b"text", ptx) == before
    assert kept_code.key_of(b"ir", b"text", ptx) != before
    kept_code._identity.cache_clear()
    if what == "processor":
        monkeypatch.setattr(kept_code, "target_identity", lambda: "another")
    if what == "sources":
        monkeypatch.setattr(kept_code, "_sources", lambda *_: [("a.py", b"")])
    assert kept_code.key_of(b"image", b"text!" if what == "text" else b"text", ptx) != before
    kept_code._identity.cache_clear()


def test_all_sources_are_in_the_key() -> None:
    folder = Path(image.__file__).parent
    names = {name for name, _ in kept_code._sources(folder, "")}
    assert {"/image.py", "/native/block.ll", "/translate/runner.py", "/parse/parser.py"} <= names


def test_what_is_kept_is_all_that_is_known() -> None:
    compiled = translate_image(IMAGE, slice_bytes=1 << 20)
    assert TranslatedImage.from_bytes(compiled.to_bytes()) == compiled


def test_what_is_kept_but_makes_no_sense_is_translated_anew(kept: Path) -> None:
    compiled = translate_image(IMAGE, slice_bytes=1 << 20)
    for nonsense in (b"", b"\x80", b"\x94\x91\x01\x90\x90\x90"):
        kept_code.keep(kept_code.key_of(b"image", IMAGE, ptx), nonsense)
        image._cached_code.clear()
        assert load_code(IMAGE, slice_bytes=1 << 20).image.kernels == compiled.kernels


def test_code_held_in_the_process_is_bounded(kept: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(image, "MAX_HELD_CODE_BYTES", 1)
    for number in range(3):
        load_code(IMAGE + b"\n" * number, slice_bytes=1 << 20)
    assert len(image._cached_code) == 1


@pytest.fixture
def _as_before() -> Iterator[None]:
    yield
    kept_code._for_workers.clear()


@pytest.mark.usefixtures("_as_before")
def test_workers_keep_nothing_unless_the_operator_says_where(kept: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    key = kept_code.key_of(b"image", IMAGE, ptx)
    monkeypatch.delenv(kept_code.DIRECTORY_VARIABLE)
    assert kept_code.keep_for_workers(os.geteuid()) is None
    kept_code.keep(key, b"code")
    assert kept_code.read_kept(key) is None


@pytest.mark.usefixtures("_as_before")
def test_what_workers_keep_the_daemon_never_reads(kept: Path) -> None:
    key = kept_code.key_of(b"image", IMAGE, ptx)
    folder = kept_code.keep_for_workers(os.geteuid())
    assert folder is not None
    kept_code.keep(key, b"planted")
    assert kept_code.read_kept(key) == b"planted"
    kept_code._for_workers.clear()
    assert kept_code.read_kept(key) is None
    os.close(folder)


@pytest.mark.parametrize(
    ("variables", "place"),
    [
        ({"GPULEASE_CPU_CACHE": "/x"}, "/x"),
        ({"GPULEASE_CPU_CACHE": ""}, "None"),
        ({"XDG_CACHE_HOME": "/y"}, "/y/gpulease/cpu"),
        ({"XDG_CACHE_HOME": "y", "HOME": "/z"}, "/z/.cache/gpulease/cpu"),
    ],
)
def test_where_it_is(monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], place: str) -> None:
    for name in ("GPULEASE_CPU_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert str(kept_code._directory()) == place
