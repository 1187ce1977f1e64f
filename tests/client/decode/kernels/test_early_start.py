"""Kernels that start while the launch before them ends: the same statements, the same bits, weights before the wait."""

import re
from collections import Counter

import numpy as np
import pytest

from gpulease.client.decode.engine.early_start import EARLY_READS, PERMIT, WAIT
from gpulease.client.decode.engine.kernel_library import early_image, image, manifest
from gpulease.daemon.ptx.context import CpuContext
from helpers.decode_kernels import KernelRig, bf16

from .test_linear import multiplied, random_bf16, random_weight

ADDED = (WAIT, PERMIT, EARLY_READS)


def lines_of(name: str) -> list[str]:
    return early_image(name).decode().split("\n")


def test_no_statement_is_lost_or_added_but_wait_and_permission() -> None:
    for name in manifest().kernels:
        early = lines_of(name)
        plain = image(name).decode().replace(".target sm_80\n", ".target sm_90\n").split("\n")
        assert Counter(line for line in early if line not in ADDED) == Counter(plain), name
        assert early.count(WAIT) == 1, name
        assert early.count(PERMIT) == (0 if "in_turns" in name or name.startswith("rope_append") else 1), name


@pytest.mark.parametrize(
    "name", [name for name in manifest().kernels if re.match(r"linear_(silu_|gelu_)?bf16_\d", name)]
)
def test_the_first_tile_of_weights_is_copied_before_the_wait(name: str) -> None:
    facts, lines = manifest().kernels[name], lines_of(name)
    copies = [line for line in lines[: lines.index(WAIT)] if "cp.async.cg.shared" in line]
    # Every copy has 16 bytes. A kernel with a gate reads two weights, of the gate and of what it multiplies.
    weights = 2 if "F" in facts.parameters else 1
    tile_bytes = facts.constants["BN"] * facts.constants["BK"] * 2 * weights
    assert len(copies) * 16 * facts.threads == tile_bytes
    assert lines.index(EARLY_READS) < lines.index(copies[0])


UNWRITTEN = {"w", "scales", "rows", "cosines", "sines"}

FIRST_READS = ("linear_bf16_16", "linear_silu_bf16_64x64_sm_90a", "rope_append_64", "attend_64", "combine_64", "embed")


@pytest.mark.parametrize("name", [*FIRST_READS, "attend_whole_128", "linear_q8_0_16", "experts_bf16_16", "sample"])
def test_nothing_that_a_launch_writes_is_read_before_the_wait(name: str) -> None:
    """By following the addresses back from each read to the parameters that they are computed from."""
    facts, lines = manifest().kernels[name], lines_of(name)
    sources: dict[str, set[str]] = {}
    read = set[str]()
    for line in lines[: lines.index(WAIT)]:
        if access := re.search(r"\b(?:ld\.global\S* (.*)|cp\.async\.c\S* \[.*\]), \[ (%rd\d+) ", line):
            read |= sources[access[2]]
            for register in re.findall(r"%rd\d+", access[1] or ""):
                sources[register] = {"loaded"}
        elif parameter := re.match(r"\tld\.param\.b64 \t(%rd\d+), \[\w+_param_(\d+)\];", line):
            sources[parameter[1]] = {facts.parameters[int(parameter[2])]}
        elif wide := re.match(r"\t\S+ \t(%rd\d+), (.*);", line):
            sources[wide[1]] = set().union(*(sources.get(it, set()) for it in re.findall(r"%rd\d+", wide[2])))
    assert read <= UNWRITTEN
    assert read or name not in FIRST_READS


def test_copies_that_come_later_find_their_registers_unchanged() -> None:
    """Each register that such a copy reads is assigned once before the wait."""
    for name in manifest().kernels:
        lines = lines_of(name)
        wait = lines.index(WAIT)
        assigned = Counter(found[1] for line in lines[:wait] if (found := re.match(r"\t\S+ \t?(%\w+), ", line)))
        for line in lines[wait + 1 :]:
            if not line.startswith("\tcp.async.c"):
                break
            registers = re.findall(r"%\w+", line)
            assert [assigned[register] for register in registers] == [1] * len(registers), (name, line)


@pytest.mark.parametrize(
    "layout", ["bf16", *(pytest.param(name, marks=pytest.mark.exhaustive) for name in ("q8_0", "q4_k", "fp8", "awq"))]
)
def test_a_linear_gives_the_same_bits(rig: KernelRig, lasting: tuple[CpuContext, KernelRig], layout: str) -> None:
    """With fewer tiles of columns than are copied at first, and with more."""
    rng = np.random.default_rng(5)
    x = random_bf16(rng, 17, 1280)
    planes, _ = random_weight(rng, layout, 70, 1280)
    early = KernelRig(lasting[0], starts_early=True)
    for chunk in (256, 1280):
        plain = multiplied(rig, layout, 16, x, planes, 70, chunk)
        assert multiplied(early, layout, 16, x, planes, 70, chunk).tobytes() == plain.tobytes()


def test_a_gate_gives_the_same_bits(rig: KernelRig, lasting: tuple[CpuContext, KernelRig]) -> None:
    rng = np.random.default_rng(6)
    x, w = random_bf16(rng, 3, 512), bf16(rng.normal(0, 0.05, (2 * 40, 512)))
    found = []
    for one in (rig, KernelRig(lasting[0], starts_early=True)):
        y = np.zeros((3, 40), np.uint16)
        one.launch("linear_silu_bf16_16", (1, 2), y=y, x=x, w=w, R=3, F=40, K=512)
        found.append(y.tobytes())
    assert found[0] == found[1] != bytes(len(found[0]))
