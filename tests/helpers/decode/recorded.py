"""References of the decode engine that compute in separate processes, and write their results to a folder.

So their threads, memory and warnings are gone before the engine takes the card, and they need not end in good order.
"""

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np

from helpers.decode.agreement import Logits, Scorer

MAX_SECONDS = 480.0
"""For one process, its imports included."""


class Recorded:
    """A scorer that returns what a reference computed for some prompts, and nothing else."""

    def __init__(self, folder: Path) -> None:
        found = json.loads((folder / "outputs.json").read_text())
        self._outputs = {tuple(prompt): tokens for prompt, tokens in found}
        self._logits = {
            (*prompt, *tokens[:-1]): folder / f"{place}.npy" for place, (prompt, tokens) in enumerate(found)
        }

    def greedy(self, prompts: list[list[int]], count: int) -> list[list[int]]:
        """The tokens found behind each prompt: as many as were asked for then."""
        outputs = [self._outputs[tuple(prompt)] for prompt in prompts]
        assert {len(output) for output in outputs} == {count}
        return outputs

    def logits(self, token_ids: list[int]) -> Logits:
        """Logits [tokens, vocabulary] of a prompt with all but the last of its tokens behind it."""
        logits: Logits = np.load(self._logits[tuple(token_ids)])
        return logits


def recorded(reference: str, model: Path, prompts: list[list[int]], count: int, to: Path) -> Recorded:
    """Compute `count` greedy tokens behind each prompt, and all logits of both.

    Args:
        reference: The module of this folder that computes: `hugging_face` or `llama_cpp`.
        model: The folder or file that it computes.
        prompts: Tokens of each prompt.
        count: Tokens to decode behind each.
        to: A folder to make for what was found.
    """
    to.mkdir()
    (to / "prompts.json").write_text(json.dumps(prompts))
    command = [sys.executable, "-m", f"helpers.decode.{reference}", str(model), str(to), str(count)]
    path = os.pathsep.join(part for part in sys.path if part)
    environment = os.environ | {"PYTHONPATH": path}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=MAX_SECONDS)
    assert done.returncode == 0, done.stderr
    return Recorded(to)


def record(opened: Callable[[Path], Scorer]) -> None:
    """Do what `recorded` asks for on the command line, and end the process at once."""
    parser = argparse.ArgumentParser()
    parser.add_argument("model", type=Path)
    parser.add_argument("folder", type=Path)
    parser.add_argument("count", type=int)
    asked = parser.parse_args()
    scorer = opened(asked.model)
    prompts = json.loads((asked.folder / "prompts.json").read_text())
    outputs = list(zip(prompts, scorer.greedy(prompts, asked.count), strict=True))
    for place, (prompt, tokens) in enumerate(outputs):
        np.save(asked.folder / f"{place}.npy", scorer.logits([*prompt, *tokens[:-1]]))
    (asked.folder / "outputs.json").write_text(json.dumps(outputs))
    # llama.cpp's server waits for ever for a thread of its own now and then.
    os._exit(0)
