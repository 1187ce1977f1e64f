"""Runs every target briefly, with its seeds and with similar inputs."""

import importlib
import random
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gpulease.protocol import Opcode
from gpulease.protocol.messages import Empty
from gpulease.protocol.operations import SESSION_OPCODES, SPECS, Trait, having

from . import TARGETS, ptx_texts, session_requests

MOST_SEEDS = {
    "images": 6,
    "ptx": 40,
    "serving": 16,
    "sessions": 25,
    "submits": 40,
    "control": 60,
    "audit": 100,
    "settings": 300,
}
"""Number of seeds, for targets whose seeds take long. The same seeds are chosen in every run."""

EXAMPLES = {"images": 4, "ptx": 15, "serving": 15, "sessions": 12, "submits": 25, "control": 25, "audit": 40}
OTHERS_EXAMPLES = 60
QUICK = settings(deadline=None, suppress_health_check=list(HealthCheck))


@cache
def target(name: str) -> Any:
    return importlib.import_module(f".{name}", __package__)


@cache
def some_seeds(name: str) -> list[bytes]:
    found = sorted(set(target(name).seeds()))
    assert all(len(seed) <= target(name).MAX_BYTES for seed in found)
    most = MOST_SEEDS.get(name, len(found))
    return random.Random(5).sample(found, min(most, len(found)))


def test_each_operation_of_a_session_gets_a_body_and_each_recorded_one_is_a_node() -> None:
    with_body = {op for op in SESSION_OPCODES if SPECS[op].request is not Empty}
    assert session_requests.BODIES.keys() == with_body - {Opcode.SUBMIT_RUN} | {Opcode.PING}
    assert having(Trait.RECORDED) < {op for op, _ in session_requests.NODES}


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", TARGETS)
def test_seeds(name: str) -> None:
    assert len(some_seeds(name)) >= MOST_SEEDS.get(name, 40)
    for seed in some_seeds(name):
        target(name).check(seed)


@st.composite
def mutations(draw: st.DrawFn, name: str) -> bytes:
    """Draw a seed with some changes."""
    seed = draw(st.sampled_from(some_seeds(name)))
    if name in ("ptx", "images"):
        return ptx_texts.mutate(seed, target(name).MAX_BYTES, draw(st.integers(0, 2**32)))
    data = bytearray(seed)
    for _ in range(draw(st.integers(0, 4))):
        at = draw(st.integers(0, len(data)))
        data[at : at + draw(st.integers(0, 4))] = draw(st.binary(max_size=4))
    return bytes(data)


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", TARGETS)
def test_mutations(name: str) -> None:
    @settings(QUICK, max_examples=EXAMPLES.get(name, OTHERS_EXAMPLES))
    @given(mutations(name))
    def run(data: bytes) -> None:
        target(name).check(data)

    run()


def test_a_campaign(tmp_path: Path) -> None:
    """Run the fuzzer itself, if it is installed. It is guided by the code of the product that is reached."""
    pytest.importorskip("atheris")
    root = Path(__file__).parents[2]
    path = [str(root / folder) for folder in (".dev", "tests")]
    command = [sys.executable, "-m", "tests.fuzz", "rings", str(tmp_path), "-runs=2000", "-print_final_stats=1"]
    command.append(f"-artifact_prefix={tmp_path}/")
    ended = subprocess.run(
        command, cwd=root, env={"PYTHONPATH": ":".join(path)}, capture_output=True, text=True, timeout=100, check=False
    )
    assert ended.returncode == 0, ended.stderr
    assert "number_of_executed_units" in ended.stderr
    assert list(tmp_path.iterdir()), "nothing new was reached"
