"""Modules that declare images or clusters load; kernels that need them say so at their launch, and others run."""

import pytest

from gpulease.daemon.drivers.interface import LaunchRejected
from gpulease.daemon.ptx.context import CpuContext

ONE = (1, 1, 1)
TEXT = b""".version 8.0
.target sm_90
.address_size 64
.global .surfref image;
.visible .global .texref pixels;
.global .samplerref unused[2];
.visible .entry reads() { .reg .b32 %r<2>; suld.b.1d.b32.trap {%r1}, [image, {%r1}]; ret; }
.visible .entry samples() { .reg .b32 %r; .reg .f32 %f<5>; tex.1d.v4.f32.s32 {%f1,%f2,%f3,%f4}, [pixels, {%r}]; ret; }
.visible .entry plain() { ret; }
.visible .entry alone() .explicitcluster .maxclusterrank 8 { ret; }
.visible .entry of_one() .reqnctapercluster 1, 1, 1 { ret; }
.visible .entry of_two() .explicitcluster .reqnctapercluster 2, 1, 1 { ret; }
"""


def test_each_kernel_by_itself(context: CpuContext) -> None:
    kernels = context.module_load(TEXT).kernels
    for name in ("plain", "alone", "of_one"):
        context.launch(kernels[name], ONE, ONE, 0, b"", 0)
    context.sync()
    for name, said in (("reads", "plain memory"), ("samples", "plain memory"), ("of_two", "clusters of several")):
        with pytest.raises(LaunchRejected, match=said):
            context.launch(kernels[name], ONE, ONE, 0, b"", 0)
