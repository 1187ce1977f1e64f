"""References of the decode engine that compute in separate processes, and write their results to a folder.

So their threads, memory and warnings are gone before the engine uses the card, and the processes need not end cleanly.
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
"""Time limit in seconds for one process, imports included."""


class Recorded:
    """A scorer that returns only what a reference has computed for some prompts."""

    def __init__(self, folder: Path) -> None:
        found = json.loads((folder / "outputs.json").read_text())
        self._outputs = {tuple(prompt): tokens for prompt, tokens in found}
        self._logits = {
            (*prompt, *tokens[:-1]): folder / f"{place}.npy" for place, (prompt, tokens) in enumerate(found)
        }

    def greedy(self, prompts: list[list[int]], count: int) -> list[list[int]]:
        """Return the recorded tokens after each prompt. `count` is ignored: the recorded number is returned."""
        outputs = [self._outputs[tuple(prompt)] for prompt in prompts]
        assert {len(output) for output in outputs} == {count}
        return outputs

    def logits(self, token_ids: list[int]) -> Logits:
        """Return the logits [tokens, vocabulary] of a prompt followed by all but the last of its recorded tokens."""
        logits: Logits = np.load(self._logits[tuple(token_ids)])
        return logits


def recorded(reference: str, model: Path, prompts: list[list[int]], count: int, to: Path) -> Recorded:
    """Compute `count` greedy tokens after each prompt, and the logits of the prompt and of these tokens.

    Args:
        reference: The module in this folder that computes them: `hugging_face` or `llama_cpp`.
        model: The model's folder or file.
        prompts: Tokens of each prompt.
        count: Number of tokens to decode after each prompt.
        to: The folder for the results, which must not exist.
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
    """Compute the results that `recorded` requests on the command line, and end the process at once."""
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
    # Sometimes llama.cpp's server would wait for one of its threads forever, so skip all clean-up.
    os._exit(0)
