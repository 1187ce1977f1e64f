"""Eight models on a card that holds three, requested by Zipf's law: times, hit rate, and a check of every output.

    PYTHONPATH=.dev:tests python -m lab.many_models --minutes 2
    PYTHONPATH=.dev:tests python -m lab.many_models --driver cuda --shape llama-1b --minutes 1

This starts a private daemon. The models are the tiny one with other weights; or they have the shape of a benchmark's
model, and random weights. Each output is compared with the first output of its model and prompt. Prints one JSON
object, and exits with 1 if an output differs.
"""

import asyncio
import json
import random
import statistics
import sys
import tempfile
import time
from array import array
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import click
import numpy as np

from gpulease.client.bench.decode_shapes import SHAPES
from gpulease.client.console.private_daemon import private_daemon
from gpulease.client.decode import (
    TINY_MODEL,
    DecoderSettings,
    ModelConfig,
    RandomCheckpoint,
    SamplingParameters,
    TenantConfig,
    open_model,
)
from gpulease.client.decode.checkpoint.model_tensors import model_tensors
from gpulease.client.decode.decode_errors import ModelUnavailable
from gpulease.client.decode.scheduler.model_residency import ModelState, ResidencyLimits
from gpulease.client.decode.supervisor.decoder import engine_bytes
from gpulease.client.decode.supervisor.model_pool import ModelPool, ModelSpec
from helpers.decode.hugging_face import config_json
from helpers.safetensors_head import safetensors_head

MODELS: Final = 8
RESIDENT: Final = 3
PROMPTS: Final = 4
"""Number of different prompts of each model."""

TOKENS: Final = 16
ROWS_WRITTEN: Final = 8192
"""Number of rows of a tensor that are written at a time."""

WAIT_S: Final = 300.0
SETTINGS: Final = DecoderSettings(max_rows=8, prefill_rows=8, max_sequences=4, positions=96, text_processes=1)
TENANTS: Final = (TenantConfig("ann", 4, 24),)

# These are the daemon's settings that the manual recommends. The card has room for three models, and leases are granted
# for all of them.
_LIMITS: Final = """
[limits]
park_memory = "{park_memory}"
overcommit = 8.0
park_stay_ms = 0
parks_per_minute = 100000
"""


def make_model(folder: Path, number: int) -> Path:
    """Write the tiny model with noise in its weights. Returns its folder."""
    folder.mkdir()
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        (folder / name).write_bytes((TINY_MODEL / name).read_bytes())
    data = np.frombuffer((TINY_MODEL / "model.safetensors").read_bytes(), np.uint8).copy()
    begin = 8 + int(data[:8].view("<u8")[0])
    weights = data[begin : begin + (data.size - begin) // 2 * 2].view("<u2")
    # Change only the lower bits of a bf16's mantissa.
    weights ^= np.random.default_rng(number).integers(0, 64, weights.size, np.uint16)
    (folder / "model.safetensors").write_bytes(data.tobytes())
    return folder


def make_random_model(folder: Path, config: ModelConfig, seed: int) -> Path:
    """Write a model with random weights and the tiny one's tokenizer. Returns its folder."""
    folder.mkdir()
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (folder / name).write_bytes((TINY_MODEL / name).read_bytes())
    (folder / "config.json").write_text(json.dumps(config_json(replace(config, end_tokens=(0,)))))
    checkpoint = RandomCheckpoint(config, seed)
    tensors = {name: checkpoint.tensor(name) for name, _ in model_tensors(config)}
    with (folder / "model.safetensors").open("wb") as file:
        file.write(safetensors_head({name: ("BF16", tensor.shape) for name, tensor in tensors.items()}))
        for tensor in tensors.values():
            # Write it in parts, because the values of a whole embedding would first be copied in memory.
            for row in range(0, tensor.rows, ROWS_WRITTEN):
                file.write(tensor.read(row, min(row + ROWS_WRITTEN, tensor.rows)).tobytes())
    return folder


class _Run:
    """The requests of a run, and their results."""

    def __init__(self, pool: ModelPool, skew: float, seed: int) -> None:
        self._pool, self._random = pool, random.Random(seed)
        self._weights = [1 / rank**skew for rank in range(1, MODELS + 1)]
        self._outputs: dict[tuple[str, int], list[int]] = {}
        self.first_s: dict[str, list[float]] = {"there": [], "parked": [], "unloaded": []}
        self.wrong = self.refused = 0

    async def request(self) -> None:
        model = str(self._random.choices(range(MODELS), self._weights)[0])
        prompt = self._random.randrange(PROMPTS)
        state = self._pool.state_of(model)
        kind = {ModelState.LOADED: "there", ModelState.UNLOADED: "unloaded"}.get(state, "parked")
        began = time.monotonic()
        tokens, first_s = array("I"), 0.0
        try:
            async with self._pool.use(model, tenant="ann", wait_s=WAIT_S) as use:
                sampling = SamplingParameters(temperature=0.8, seed=prompt)
                generation = use.decoder.submit(
                    [17 + prompt, 4, 9], max_tokens=TOKENS, sampling=sampling, tenant_id="ann"
                )
                use.hold([generation])
                async for emitted in generation:
                    first_s = first_s or time.monotonic() - began
                    tokens.append(emitted.token)
        except ModelUnavailable:
            self.refused += 1
            return
        self.first_s[kind].append(first_s)
        # The first output of each model and prompt is the reference. All models are loaded once before any is parked.
        if self._outputs.setdefault((model, prompt), list(tokens)) != list(tokens):
            self.wrong += 1

    def report(self) -> dict[str, Any]:
        every = [one for times in self.first_s.values() for one in times]
        found: dict[str, Any] = {"requests": len(every), "hit_rate": len(self.first_s["there"]) / len(every)}
        for name, times in {"all": every, **self.first_s}.items():
            if len(times) > 1:
                found[f"{name}_p50_ms"] = statistics.median(times) * 1e3
                found[f"{name}_p99_ms"] = statistics.quantiles(times, n=100, method="inclusive")[98] * 1e3
        changes = dict.fromkeys(("load", "load_failed", "park", "return", "unload"), 0)
        for (_, kind), count in self._pool.counts.items():
            changes[kind] += count
        return found | {"distinct": len({tuple(one) for one in self._outputs.values()}), "changes": changes}


async def _measure(address: str, folder: Path, size: int, options: dict[str, Any]) -> dict[str, Any]:
    shape = SHAPES.get(options["shape"])
    paths = {
        str(n): make_random_model(folder / str(n), shape, n) if shape else make_model(folder / str(n), n)
        for n in range(MODELS)
    }
    parked = 0 if options["unloads"] else MODELS * size
    limits = ResidencyLimits(RESIDENT * size, parked, options["stay"])
    pool = ModelPool(
        {name: ModelSpec(path, TENANTS, SETTINGS) for name, path in paths.items()}, limits, address=address
    )
    async with pool.serving():
        run = _Run(pool, options["skew"], options["seed"])
        # Load each model once, because the first load compiles the kernels.
        for name in paths:
            async with pool.use(name, tenant="ann", wait_s=WAIT_S):
                pass
        until = time.monotonic() + options["minutes"] * 60

        async def caller() -> None:
            while time.monotonic() < until:
                await run.request()

        await asyncio.gather(*(caller() for _ in range(options["callers"])))
        return run.report() | {"wrong": run.wrong, "refused": run.refused, "models": MODELS, "resident": RESIDENT}


@click.command()
@click.option("--minutes", default=2.0, show_default=True, help="How long to send requests.")
@click.option("--callers", default=2, show_default=True, help="Callers, each of which has one request at a time.")
@click.option("--skew", default=1.0, show_default=True, help="The exponent of Zipf's law.")
@click.option("--stay", default=0.2, show_default=True, help="pool.min_stay_secs.")
@click.option("--unloads", is_flag=True, help="Unload models instead of parking them.")
@click.option("--seed", default=1, show_default=True)
@click.option("--driver", type=click.Choice(("cpu", "cuda")), default="cpu", show_default=True)
@click.option("--shape", type=click.Choice(("tiny", *SHAPES)), default="tiny", show_default=True)
@click.option("--folder", type=click.Path(path_type=Path, exists=True), help="Where models are written.")
def main(**options: Any) -> None:
    """Measure, and print one JSON object."""
    shape = SHAPES.get(options["shape"])
    size = engine_bytes(RandomCheckpoint(shape, 1) if shape else open_model(TINY_MODEL), TENANTS, SETTINGS)
    card = f"{RESIDENT * size}"
    limits = _LIMITS.format(park_memory=MODELS * size + (4 << 30))
    with (
        tempfile.TemporaryDirectory(dir=options["folder"]) as folder,
        private_daemon(options["driver"], (card,), settings=limits) as address,
    ):
        report = asyncio.run(_measure(address, Path(folder), size, options))
    click.echo(json.dumps({name: round(it, 3) if isinstance(it, float) else it for name, it in report.items()}))
    sys.exit(1 if report["wrong"] else 0)


if __name__ == "__main__":
    main()
