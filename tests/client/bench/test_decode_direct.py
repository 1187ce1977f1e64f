"""The engine on the driver itself computes what the leased engine computes; the driver is the embedded one."""

import asyncio
import ctypes
import json
import subprocess
import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from gpulease.client.bench import decode_direct, decode_speed, decode_steps
from gpulease.client.bench.decode_direct import DirectSession, DriverFailed
from gpulease.client.bench.decode_speed import DecodePlan
from gpulease.daemon.ptx import kernel_code
from gpulease.daemon.ptx.driver import CpuDriver
from helpers.daemon import Daemon
from helpers.decode.shared_code import compiling_once


class CudaOnCpu:
    """The calls of cuda.bindings.driver that the benchmark makes, on a context of the embedded driver."""

    def __init__(self) -> None:
        self.context = CpuDriver().open_context("GPU-0", 256 << 20)
        self.captured: list[Callable[[], object]] | None = None
        self.waits = 0
        self._kept: list[Any] = []
        self.CUstreamCaptureMode = SimpleNamespace(CU_STREAM_CAPTURE_MODE_THREAD_LOCAL=1)
        self.CUfunction_attribute = SimpleNamespace(CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES=8)

    def __getattr__(self, name: str) -> Callable[..., tuple[int, Any]]:
        call = getattr(self, name.removeprefix("cu").lower())
        return lambda *args: (0, call(*args))

    def ctxgetdevice(self) -> int:
        return 0

    def devicetotalmem(self, device: int) -> int:
        return 256 << 20

    def memalloc(self, size: int) -> int:
        return self.context.mem_alloc(size)

    def memsetd8(self, address: int, value: int, size: int) -> None:
        assert value == 0

    def memallochost(self, size: int) -> int:
        self._kept.append(ctypes.create_string_buffer(size))
        return ctypes.addressof(self._kept[-1])

    def memcpyhtod(self, address: int, host: int, size: int) -> None:
        self.context.mem_write(address, memoryview((ctypes.c_ubyte * size).from_address(host)).cast("B"))

    def memcpyhtodasync(self, address: int, host: int, size: int, stream: int) -> None:
        self._put(lambda: self.memcpyhtod(address, host, size))

    def memcpydtohasync(self, host: int, address: int, size: int, stream: int) -> None:
        into = memoryview((ctypes.c_ubyte * size).from_address(host)).cast("B")
        self._put(lambda: self.context.mem_read(address, into))

    def moduleloaddata(self, text: int) -> Any:
        return self.context.module_load(ctypes.string_at(text))

    def modulegetfunction(self, module: Any, name: bytes) -> Any:
        return module.kernels[name.decode()]

    def funcsetattribute(self, kernel: Any, attribute: int, value: int) -> None:
        assert attribute == 8
        assert value > 48 << 10

    def launchkernel(self, kernel: Any, *args: Any) -> None:
        *shape, shared_bytes, _, places, extra = args
        assert extra == 0
        params = bytearray(kernel.parameter_bytes)
        addresses = (ctypes.c_uint64 * len(kernel.parameters)).from_address(places)
        for parameter, address in zip(kernel.parameters, addresses, strict=True):
            params[parameter.offset : parameter.offset + parameter.size] = ctypes.string_at(address, parameter.size)
        grid, block = tuple(shape[:3]), tuple(shape[3:])
        self._put(lambda: self.context.launch(kernel, grid, block, shared_bytes, bytes(params), 1))

    def streamcreate(self, flags: int) -> int:
        return self.context.stream_create()

    def eventcreate(self, flags: int) -> object:
        return object()

    def streambegincapture(self, stream: int, mode: int) -> None:
        self.captured = []

    def streamendcapture(self, stream: int) -> Any:
        captured, self.captured = self.captured, None
        return captured

    def graphinstantiate(self, graph: Any, flags: int) -> Any:
        return graph

    def graphlaunch(self, graph: Any, stream: int) -> None:
        for step in graph:
            step()

    def streamwaitevent(self, stream: int, event: object, flags: int) -> None:
        self.waits += 1

    def eventrecord(self, event: object, stream: int) -> None:
        pass

    def streamsynchronize(self, stream: int) -> None:
        self.context.sync()

    def ctxsynchronize(self) -> None:
        self.context.sync()

    def _put(self, step: Callable[[], object]) -> None:
        if self.captured is None:
            step()
        else:
            self.captured.append(step)


@pytest.mark.exhaustive
def test_the_engine_on_the_driver_itself_has_the_leased_engine_s_results(
    daemon: Daemon, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("PREFILL", "STEPS"):
        monkeypatch.setattr(decode_steps, name, 4)
    # The driver in this process takes the kernels that the leased engine's worker has compiled.
    monkeypatch.setattr(kernel_code, "compile_source", compiling_once(kernel_code.compile_source))
    told: list[Any] = []
    # Kernels alone are another test's, and take most of the time.
    plan = DecodePlan(("two-layers",), (1, 4), (20,), times_kernels=False)
    target, steps = asyncio.run(decode_speed.measure(daemon.address, "two-layers", plan, told.append))
    api = CudaOnCpu()
    try:
        asyncio.run(decode_direct.measure(api, "two-layers", target, (1, 4), (20,)))
    finally:
        api.context.close()
    figures = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert {(f["batch"], f["context"]): f["results"] for f in figures} == {at: steps[at].results for at in steps}
    assert len({figure["results"] for figure in figures}) == 2
    # Each step but the first of each figure waits for the one before it.
    assert api.waits == 2 * (decode_steps.WARM_STEPS + 4)


def test_a_call_that_fails_names_the_driver_s_reason() -> None:
    api = SimpleNamespace(cuCtxGetDevice=lambda: (700, None), cuGetErrorString=lambda error: (0, b"an illegal access"))
    with pytest.raises(DriverFailed, match="an illegal access"):
        DirectSession(api)


def test_without_a_driver_one_figure_says_so() -> None:
    command = [sys.executable, "-P", "-m", "gpulease.client.bench.decode_direct", "two-layers", "sm_80", "1", "20"]
    done = subprocess.run(command, capture_output=True, text=True, check=True, env={"CUDA_VISIBLE_DEVICES": ""})
    figure = json.loads(done.stdout)
    assert figure["figure"] == "direct"
    assert figure["skipped"]
