"""llama.cpp as a reference for the decode engine, through xllamacpp: one thread, an f32 cache, no flash attention.

It returns log-probabilities, not logits. Convert the engine's logits with `agreement.log_probabilities` to compare
them.
"""

import importlib.util
from pathlib import Path
from typing import Any

import gguf
import numpy as np

from helpers.decode.agreement import Logits
from helpers.decode.recorded import record

IS_INSTALLED = importlib.util.find_spec("xllamacpp") is not None
CONTEXT = 256
"""Number of positions for which llama.cpp has memory."""


class LlamaCpp:
    def __init__(self, path: Path) -> None:
        import xllamacpp

        parameters = xllamacpp.CommonParams()
        parameters.model.path = str(path)
        parameters.n_ctx = CONTEXT
        parameters.n_gpu_layers = 0
        parameters.n_parallel = 1
        parameters.warmup = False
        parameters.verbosity = -1
        parameters.cpuparams.n_threads = parameters.cpuparams_batch.n_threads = 1
        parameters.cache_type_k = parameters.cache_type_v = xllamacpp.ggml_type.GGML_TYPE_F32
        parameters.flash_attn_type = xllamacpp.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_DISABLED
        self._server = xllamacpp.Server(parameters)
        self._vocabulary = len(gguf.GGUFReader(path).fields["tokenizer.ggml.tokens"].contents())

    def logits(self, token_ids: list[int]) -> Logits:
        """Return log-probabilities [tokens, vocabulary] of every position, with a request for each."""
        rows = np.full((len(token_ids), self._vocabulary), np.nan)
        for place in range(len(token_ids)):
            (told,) = self._asked(token_ids[: place + 1], 1, self._vocabulary)
            for entry in told["top_logprobs"]:
                rows[place, entry["id"]] = entry["logprob"]
        return rows

    def greedy(self, prompts: list[list[int]], count: int) -> list[list[int]]:
        """Return the `count` likeliest next tokens of each prompt."""
        return [[told["id"] for told in self._asked(prompt, count, 1)] for prompt in prompts]

    def _asked(self, token_ids: list[int], count: int, alternatives: int) -> list[dict[str, Any]]:
        """Return llama.cpp's reply for `count` greedy tokens. End tokens do not end the generation."""
        found: list[dict[str, Any]] = []
        while len(found) < count:
            request = {
                "prompt": [*token_ids, *(told["id"] for told in found)],
                "n_predict": count - len(found),
                "n_probs": alternatives,
                "temperature": 0,
                "cache_prompt": False,
            }
            answer = self._server.handle_completions(request)["choices"][0]["logprobs"]["content"]
            assert answer, "llama.cpp gave no token"
            found += answer
        return found


if __name__ == "__main__":
    record(LlamaCpp)
