"""Output of kernels on a real card: the driver writes it to the worker's standard output."""

import pytest

from gpulease.client import GpuSession
from helpers.daemon import Daemon
from helpers.kernels import PTX

pytestmark = pytest.mark.gpu

SAYS = b"""
.version 8.0
.target sm_75
.address_size 64
.extern .func (.param .b32 r) vprintf(.param .b64 format, .param .b64 values);
.visible .entry say(.param .u64 text)
{
    .reg .b64 %d<3>;
    ld.param.u64 %d1, [text]; mov.u64 %d2, 0;
    .param .b64 a; .param .b64 b; .param .b32 c;
    st.param.b64 [a], %d1; st.param.b64 [b], %d2;
    call (c), vprintf, (a, b);
    ret;
}
"""


def test_what_a_kernel_prints_reaches_its_session_alone(daemon: Daemon) -> None:
    with (
        daemon.builder(64 << 20).acquire() as lease,
        daemon.builder(64 << 20).acquire() as other,
        GpuSession(lease) as session,
        GpuSession(other) as neighbour,
    ):
        assert session.printed() == ("", False)
        module, text = session.module_load(SAYS), session.mem_alloc(64)
        session.mem_write(text, 0, b"said by a kernel\n\0")
        for threads in (1, 3):
            session.launch(module, "say", [1], [threads], [text])
            assert session.printed() == ("said by a kernel\n" * threads, False)
        session.launch(module, "say", [1], [1], [text])
        session.sync()
        assert neighbour.printed() == ("", False)
        assert session.printed().text == "said by a kernel\n"
    assert "said by a kernel" not in daemon.log()


def test_numbers_are_formatted(daemon: Daemon) -> None:
    with daemon.builder(64 << 20).acquire() as lease, GpuSession(lease) as session:
        module = session.module_load((PTX / "calls.sm75.ptx").read_bytes())
        session.launch(module, "print", [1], [3], (-1).to_bytes(4, "little", signed=True), [4])
        lines = [f"-1 {c}bc {0.5 * k:5.2f}|{-(1 << 33):<4}|x\n5 values\n" for k, c in enumerate("abc")]
        assert sorted(session.printed().text.splitlines()) == sorted("".join(lines).splitlines())
