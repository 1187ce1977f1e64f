"""PTX gets the same code as in a plain CUDA program on a card. What is refused is refused with the linker's words."""

from collections.abc import Callable, Iterator
from importlib.resources import files
from pathlib import Path
from subprocess import CalledProcessError
from tempfile import TemporaryDirectory

import pytest

from gpulease.client import GpuSession, LoadFailed
from gpulease.client.decode import kernels
from helpers.daemon import Daemon
from helpers.kernels import TRANSFORM, VARIABLES
from helpers.plain_load import plain_figures

pytestmark = pytest.mark.gpu

QUOTIENT = b""".version 7.0
.target sm_75
.address_size 64
BEFORE
.visible .entry quotient(.param .u64 out)
{
.reg .b64 %at; .reg .f32 %a, %b;
ld.param.u64 %at, [out];
ld.global.f32 %a, [%at]; ld.global.f32 %b, [%at+4];
WITHIN
div.rn.f32 %a, %a, %b; sqrt.rn.f32 %a, %a;
st.global.f32 [%at], %a;
ret;
}
"""


def quotient(before: bytes = b"", within: bytes = b"") -> bytes:
    return QUOTIENT.replace(b"BEFORE", before).replace(b"WITHIN", within)


DECODE = ("scan", "add_rmsnorm_2048", "attend_whole_64", "linear_silu_bf16_16", "linear_bf16_in_turns_128x256_sm_90a")
"""Kernels for which relocatable code has more registers or local memory, or ignores setmaxnreg."""


@pytest.fixture
def session(daemon: Daemon) -> Iterator[GpuSession]:
    with daemon.builder(64 << 20).acquire() as lease, GpuSession(lease) as session:
        yield session


def own_figures(session: GpuSession, ptx: bytes) -> dict[str, tuple[int, int]]:
    figures = session.module_load(ptx).kernel_figures()
    return {name: (one.registers, one.local_bytes) for name, one in figures.items()}


@pytest.mark.parametrize("ptx", [quotient(), TRANSFORM, VARIABLES], ids=["quotient", "transform", "variables"])
def test_kernels_have_the_registers_of_a_plain_program(session: GpuSession, ptx: bytes) -> None:
    assert own_figures(session, ptx) == plain_figures(ptx)


@pytest.mark.parametrize("name", DECODE)
def test_the_decode_engine_s_kernels_too(session: GpuSession, name: str) -> None:
    ptx = files(kernels).joinpath(f"{name}.ptx").read_bytes()
    try:
        plain = plain_figures(ptx)
    except CalledProcessError:
        pytest.skip("it is for cards of another architecture")
    assert own_figures(session, ptx) == plain


def test_a_function_of_another_module_is_refused(session: GpuSession) -> None:
    with pytest.raises(LoadFailed) as caught:
        session.module_load(quotient(b".extern .func foreign;", b"call.uni foreign, ();"))
    assert "Undefined reference to 'foreign'" in caught.value.log


@pytest.mark.parametrize("space", [b"global", b"const"])
def test_a_variable_of_another_module_is_refused(session: GpuSession, space: bytes) -> None:
    """As a whole program the variable would be defined, with zeros."""
    uses = b".reg .b64 %%v; mov.u64 %%v, foreign; ld.%b.f32 %%a, [%%v];" % space
    with pytest.raises(LoadFailed) as caught:
        session.module_load(quotient(b".extern .%b .f32 foreign;" % space, uses))
    assert "Undefined reference to 'foreign'" in caught.value.log


def test_what_follows_a_nul_is_not_read(session: GpuSession) -> None:
    assert own_figures(session, quotient() + b"\0.visible .entry hidden() { nonsense }") == plain_figures(quotient())


@pytest.mark.usefixtures("cards")
def test_with_the_operator_s_cache_the_linker_compiles(
    start_daemon: Callable[..., Daemon], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whole programs would not be in the cache, so each worker would compile them again."""
    # Not in pytest's folder, which the workers' user can't open.
    with TemporaryDirectory() as folder:
        Path(folder).chmod(0o777)
        monkeypatch.setenv("CUDA_CACHE_PATH", folder)
        daemon = start_daemon(driver="cuda", vram=("1GiB",))
        with daemon.builder(64 << 20).acquire() as lease, GpuSession(lease) as session:
            figures = own_figures(session, quotient())
        assert any(path.is_file() for path in Path(folder).rglob("*"))
        assert figures != plain_figures(quotient())


def test_errors_have_their_lines(session: GpuSession) -> None:
    with pytest.raises(LoadFailed) as caught:
        session.module_load(quotient(within=b"add.f32 %a, %a, %nothing;"))
    assert caught.value.line == QUOTIENT[: QUOTIENT.index(b"WITHIN")].count(b"\n") + 1
    assert "%nothing" in caught.value.log
