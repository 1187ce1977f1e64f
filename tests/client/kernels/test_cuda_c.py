"""CUDA C is compiled without a driver; what is wrong with it is said with the compiler's words."""

import asyncio
from typing import Any

import pytest

from gpulease.client import GpuSession, InvalidRequest, LoadFailed, Unsupported, aio
from gpulease.client.examples import saxpy
from gpulease.client.kernels import cuda_c
from gpulease.client.kernels.cuda_c import ptx_of
from helpers.daemon import Daemon
from helpers.nvrtc import needs_nvrtc


@needs_nvrtc
def test_saxpy(daemon: Daemon, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GPULEASE_ADDRESS", daemon.address)
    assert saxpy.run(1000) == 0


@needs_nvrtc
def test_the_asyncio_face_compiles(daemon: Daemon) -> None:
    async def main() -> list[str]:
        async with (
            await aio.GpuBuilder(daemon.address).min_vram(1 << 20).acquire() as lease,
            aio.GpuSession(lease) as session,
        ):
            return list((await session.compile(saxpy.SOURCE)).kernels)

    assert asyncio.run(main()) == ["saxpy"]


@needs_nvrtc
def test_a_wrong_source_s_error_has_line_and_log(daemon: Daemon) -> None:
    with daemon.builder().acquire() as lease, GpuSession(lease) as session:
        with pytest.raises(LoadFailed, match=r"kernel.cu\(2\): error.*undefined") as caught:
            session.compile("__global__ void f() {\n  missing = 1; }")
        assert caught.value.line == 2
        assert "PTX" not in str(caught.value), "the line is one of the source that was compiled"
        assert "1 error detected" in caught.value.log
        session.sync()


@needs_nvrtc
def test_the_default_is_sm_80_and_ptx_9_0() -> None:
    ptx = ptx_of(saxpy.SOURCE)
    assert b".version 9.0\n.target sm_80" in ptx
    assert b".target sm_90" in ptx_of(saxpy.SOURCE, arch=90)


@needs_nvrtc
def test_options_reach_the_compiler() -> None:
    assert b"st.global.u32" in ptx_of('extern "C" __global__ void f(int *p) { *p = N; }', ["-DN=4"])
    with pytest.raises(InvalidRequest, match="--no-such-option"):
        ptx_of(saxpy.SOURCE, ["--no-such-option"])


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ((b"", ()), "must be a string of CUDA C"),
        (("\0", ()), "zero byte"),
        (("", "-DN=4"), "must be a sequence"),
        (("", ("-arch=sm_90",)), "for example arch=90"),
        (("", (), "sm_90"), "must be a compute capability"),
        (("", (), 60), "from 75"),
    ],
)
def test_what_makes_no_sense_is_refused(arguments: Any, said: str) -> None:
    with pytest.raises(InvalidRequest, match=said):
        ptx_of(*arguments)


def test_a_missing_compiler_is_told_with_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "cuda.bindings", None)
    with pytest.raises(Unsupported, match=r"cuda-bindings is not installed.*\.\[cuda-c\]"):
        cuda_c.ptx_of(saxpy.SOURCE)
