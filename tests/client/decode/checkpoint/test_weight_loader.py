import asyncio
import gc
import os
import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import numpy as np
import pytest
from numpy.typing import NDArray

from gpulease.client import AllocFailed, GpuLeaseError, Unsupported, aio
from gpulease.client.decode.checkpoint import (
    Checkpoint,
    RandomCheckpoint,
    TensorType,
    open_model,
)
from gpulease.client.decode.checkpoint.model_tensors import feed_forward_parts
from gpulease.client.decode.checkpoint.rotary import local_rotary_tables, rotary_tables
from gpulease.client.decode.checkpoint.tensors import rounded_to_bf16
from gpulease.client.decode.checkpoint.weight_loader import load_weights, size_bytes
from gpulease.client.decode.checkpoint.weights import Layout, Linear, ModelWeights, Plane
from gpulease.client.decode.decode_errors import ModelRejected
from gpulease.client.decode.model_config import Experts, ModelConfig
from helpers.daemon import Daemon, python_environment
from helpers.made_models import (
    FOLDER_MODELS,
    LLAMA,
    MODELS,
    QWEN2,
    QWEN3,
    QWEN3_MOE,
    random_weights,
    write_folder,
    write_gguf,
)
from helpers.packed_models import PACKINGS, packed_entries, write_packed_folder
from helpers.waiting import wait_until

POSITIONS: Final = 40
MIXED: Final = {
    "v_proj.weight": TensorType.Q6_K,
    "o_proj.weight": TensorType.Q4_K,
    "down_proj.weight": TensorType.Q4_K,
    "lm_head.weight": TensorType.Q4_K,
    "embed_tokens.weight": TensorType.Q4_K,
}
"""Types of some tensors; the others are Q8_0. The types of q, k and v differ; those of gate and up are equal."""


@asynccontextmanager
async def session_of(daemon: Daemon, size: int) -> AsyncIterator[aio.GpuSession]:
    async with (
        aio.GpuBuilder(daemon.address).min_vram(size).lease_secs(60).acquire() as lease,
        aio.GpuSession(lease) as session,
    ):
        yield session


async def values_of(session: aio.GpuSession, plane: Plane, dtype: Any) -> NDArray[Any]:
    return np.frombuffer(await session.mem_read(plane.buffer, plane.offset, plane.size_bytes), dtype)


async def check_linear(
    session: aio.GpuSession, linear: Linear, checkpoint: Checkpoint, names: Sequence[str], layout: Layout
) -> None:
    """Compare planes with the rows of these tensors, one tensor after the other."""
    tensors = [checkpoint.tensor(name) for name in names]
    assert (linear.layout, linear.rows) == (layout, sum(tensor.rows for tensor in tensors))
    assert linear.columns == tensors[0].columns
    parts = [(t.bf16(0, t.rows),) if layout is Layout.BF16 else t.planes(0, t.rows) for t in tensors]
    for number, plane in enumerate(linear.planes):
        wanted = np.concatenate([part[number].reshape(len(part[number]), -1) for part in parts])
        assert (await values_of(session, plane, wanted.dtype) == wanted.ravel()).all(), (names, number)


async def check_f32(session: aio.GpuSession, plane: Plane | None, checkpoint: Checkpoint, *names: str) -> None:
    assert plane is not None
    wanted = np.concatenate([checkpoint.tensor(name).f32(0, 1)[0] for name in names])
    assert (await values_of(session, plane, np.float32) == wanted).all(), names


async def check_loaded(
    session: aio.GpuSession, weights: ModelWeights, checkpoint: Checkpoint, layouts: dict[str, Layout]
) -> None:
    """Compare every buffer with the checkpoint's values in the expected layouts."""
    config = checkpoint.config
    of = {name: layouts.get(name, Layout.BF16) for name in ("qkv", "output", "gate_up", "down", "head")}
    embedding = checkpoint.tensor("model.embed_tokens.weight")
    assert (await values_of(session, weights.embedding, np.uint16) == embedding.bf16(0, embedding.rows).ravel()).all()
    for number, layer in enumerate(weights.layers):
        at = f"model.layers.{number}."
        qkv = [f"{at}self_attn.{name}_proj" for name in "qkv"]
        parts = [f"{at}{part}" for part, _ in feed_forward_parts(config, number)]
        gate_up = [f"{part}{name}_proj.weight" for part in parts for name in ("gate", "up")]
        await check_linear(session, layer.qkv, checkpoint, [f"{name}.weight" for name in qkv], of["qkv"])
        await check_linear(session, layer.output, checkpoint, [f"{at}self_attn.o_proj.weight"], of["output"])
        await check_linear(session, layer.gate_up, checkpoint, gate_up, of["gate_up"])
        await check_linear(session, layer.down, checkpoint, [f"{part}down_proj.weight" for part in parts], of["down"])
        assert (layer.router is None) == (config.experts_of(number) is None)
        if layer.router is not None:
            await check_linear(session, layer.router, checkpoint, [f"{at}mlp.gate.weight"], Layout.BF16)
        await check_f32(session, layer.attention_norm, checkpoint, f"{at}input_layernorm.weight")
        inner_norm = "pre_feedforward" if config.has_outer_norms else "post_attention"
        await check_f32(session, layer.inner_norm, checkpoint, f"{at}{inner_norm}_layernorm.weight")
        outer = (layer.attention_outer_norm, layer.inner_outer_norm)
        for plane, name in zip(outer, ("post_attention", "post_feedforward"), strict=True):
            if config.has_outer_norms:
                await check_f32(session, plane, checkpoint, f"{at}{name}_layernorm.weight")
            else:
                assert plane is None
        if config.has_bias:
            await check_f32(session, layer.qkv_bias, checkpoint, *(f"{name}.bias" for name in qkv))
        if config.has_head_norm:
            await check_f32(session, layer.q_norm, checkpoint, f"{at}self_attn.q_norm.weight")
            await check_f32(session, layer.k_norm, checkpoint, f"{at}self_attn.k_norm.weight")
        assert (layer.qkv_bias is None, layer.q_norm is None) == (not config.has_bias, not config.has_head_norm)
    await check_f32(session, weights.norm, checkpoint, "model.norm.weight")
    if config.is_tied:
        assert weights.head == Linear(Layout.BF16, config.vocabulary, config.width, (weights.embedding,))
    else:
        await check_linear(session, weights.head, checkpoint, ["lm_head.weight"], of["head"])
    tables = [*rotary_tables(config, checkpoint.rotation(POSITIONS), 0, POSITIONS)]
    planes = [weights.cosines, weights.sines]
    if weights.local_tables is not None:
        # Only the first layer has a window.
        assert [weights.rotary_tables(layer) for layer in range(2)] == [weights.local_tables, tuple(planes)]
        tables += local_rotary_tables(config, 0, POSITIONS)
        planes += weights.local_tables
    assert len(tables) == (2 if config.local_rope_theta is None else 4)
    for plane, table in zip(planes, tables, strict=True):
        assert (await values_of(session, plane, np.float32) == table.ravel()).all()


def load_and_check(
    daemon: Daemon, checkpoint: Checkpoint, layouts: dict[str, Layout] | None = None, *, packed: bool = True
) -> None:
    async def scenario() -> None:
        size = size_bytes(checkpoint, packed=packed, positions=POSITIONS)
        async with session_of(daemon, size) as session:
            weights = await load_weights(session, checkpoint, packed=packed, positions=POSITIONS)
            assert (weights.config, weights.size_bytes) == (checkpoint.config, size)
            await check_loaded(session, weights, checkpoint, layouts or {})

    asyncio.run(scenario())


@pytest.mark.parametrize("config", FOLDER_MODELS.values(), ids=FOLDER_MODELS)
def test_a_folder_is_loaded_to_the_bit(daemon: Daemon, tmp_path: Path, config: ModelConfig) -> None:
    load_and_check(daemon, open_model(write_folder(tmp_path / "model", config, random_weights(config))))


@pytest.mark.parametrize("config", MODELS.values(), ids=MODELS)
def test_a_linear_stays_packed_where_all_that_it_is_made_of_are_of_one_type(
    daemon: Daemon, tmp_path: Path, config: ModelConfig
) -> None:
    path = write_gguf(tmp_path / "a.gguf", config, random_weights(config), kind=TensorType.Q8_0, kinds=MIXED)
    packed = {"output": Layout.Q4_K, "gate_up": Layout.Q8_0, "down": Layout.Q4_K, "head": Layout.Q4_K}
    load_and_check(daemon, open_model(path), packed)


def test_a_file_of_one_type_is_packed_but_for_its_embedding(daemon: Daemon, tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "a.gguf", LLAMA, random_weights(LLAMA), kind=TensorType.Q8_0)
    load_and_check(daemon, open_model(path), dict.fromkeys(("qkv", "output", "gate_up", "down", "head"), Layout.Q8_0))


def test_nothing_is_packed_where_that_is_not_wanted(daemon: Daemon, tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "a.gguf", QWEN3, random_weights(QWEN3), kind=TensorType.Q8_0, kinds=MIXED)
    load_and_check(daemon, open_model(path), packed=False)


@pytest.fixture
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make a chunk few rows, a window a part of one tensor or several tensors, and each window several parts."""
    for name, size in {"CHUNK_BYTES": 3000, "WINDOW_BYTES": 5000, "PART_BYTES": 1500}.items():
        monkeypatch.setattr(f"gpulease.client.decode.checkpoint.weight_loader.{name}", size)


def test_a_tensor_of_many_chunks_is_loaded_whole(daemon: Daemon, small_chunks: None) -> None:
    load_and_check(daemon, RandomCheckpoint(QWEN2, 5))


def test_a_file_s_tensor_of_many_windows_is_loaded_whole(daemon: Daemon, tmp_path: Path, small_chunks: None) -> None:
    load_and_check(daemon, open_model(write_folder(tmp_path / "model", QWEN2, random_weights(QWEN2))))


def test_packed_experts_become_bf16(daemon: Daemon, tmp_path: Path) -> None:
    config = replace(QWEN3_MOE, layers=2, experts=Experts(3, 2, 128, is_normalised=True, dense_layers=(0,)))
    folder = write_packed_folder(tmp_path, config, packed_entries(config, "fp8")[0], PACKINGS["fp8"])

    async def scenario() -> None:
        checkpoint = open_model(folder)
        size = size_bytes(checkpoint, positions=POSITIONS)
        async with session_of(daemon, size) as session:
            layers = (await load_weights(session, checkpoint, positions=POSITIONS)).layers
            layouts = [(layer.qkv.layout, layer.gate_up.layout, layer.down.layout) for layer in layers]
            assert layouts == [(Layout.FP8,) * 3, (Layout.FP8, Layout.BF16, Layout.BF16)]
            names = [f"model.layers.1.mlp.experts.{expert}.down_proj.weight" for expert in range(3)]
            await check_linear(session, layers[1].down, checkpoint, names, Layout.BF16)

    asyncio.run(scenario())


@pytest.mark.parametrize("method", PACKINGS)
def test_packed_weights_of_a_folder_stay_packed(
    daemon: Daemon, tmp_path: Path, method: str, small_chunks: None
) -> None:
    config = replace(QWEN2, layers=1)
    folder = write_packed_folder(tmp_path, config, packed_entries(config, method)[0], PACKINGS[method])
    load_and_check(daemon, open_model(folder), dict.fromkeys(("qkv", "output", "gate_up", "down"), Layout(method)))
    load_and_check(daemon, open_model(folder), packed=False)


def test_f32_weights_are_rounded_as_they_are_loaded(daemon: Daemon, tmp_path: Path) -> None:
    weights = {name: values * np.float32(1.001) for name, values in random_weights(QWEN2).items()}
    checkpoint = open_model(write_folder(tmp_path / "model", QWEN2, weights, kind="F32"))
    embedding = checkpoint.tensor("model.embed_tokens.weight")
    assert (embedding.bf16(0, 64) == rounded_to_bf16(weights["model.embed_tokens.weight"])).all()
    load_and_check(daemon, checkpoint)


def test_progress_ends_at_all_bytes(daemon: Daemon) -> None:
    told: list[tuple[int, int]] = []

    async def scenario() -> None:
        checkpoint = RandomCheckpoint(LLAMA, 1)
        size = size_bytes(checkpoint, positions=POSITIONS)
        async with session_of(daemon, size) as session:
            weights = await load_weights(
                session, checkpoint, positions=POSITIONS, progress=lambda done, total: told.append((done, total))
            )
            assert told[-1][0] == told[-1][1] <= weights.size_bytes

    asyncio.run(scenario())
    assert [done for done, _ in told] == sorted({done for done, _ in told})
    assert len({total for _, total in told}) == 1


# --- A load that fails leaves nothing behind. ---


@pytest.mark.parametrize("kind", ["BF16", "F32"])
def test_a_file_that_became_shorter_is_named_and_nothing_stays(
    daemon: Daemon, tmp_path: Path, kind: str, small_chunks: None, caplog: pytest.LogCaptureFixture
) -> None:
    checkpoint = open_model(write_folder(tmp_path / "model", QWEN2, random_weights(QWEN2), kind=kind))
    file = tmp_path / "model" / "model.safetensors"
    os.truncate(file, file.stat().st_size // 2)

    async def begin(session: aio.GpuSession, _: Checkpoint) -> None:
        with pytest.raises(ModelRejected, match=f"{file}: truncated: it became shorter while it was read"):
            await load_weights(session, checkpoint, positions=POSITIONS)

    failing(daemon, begin, checkpoint)
    gc.collect()
    assert caplog.records == []


async def check_all_is_free(session: aio.GpuSession) -> None:
    await session.mem_free(await session.mem_alloc(session.slice_bytes))


def test_a_model_that_does_not_fit_is_refused_before_anything_is_allocated(daemon: Daemon) -> None:
    checkpoint = RandomCheckpoint(LLAMA, 1)

    async def scenario() -> None:
        size = size_bytes(checkpoint, positions=POSITIONS)
        async with session_of(daemon, size // 2) as session:
            with pytest.raises(AllocFailed, match=f"random weights of seed 1 needs {size:,} bytes, but the lease has"):
                await load_weights(session, checkpoint, positions=POSITIONS)
            await check_all_is_free(session)

    asyncio.run(scenario())


class _Stop(Exception):
    pass


def failing(
    daemon: Daemon, begin: Callable[[aio.GpuSession, Checkpoint], Awaitable[None]], checkpoint: Checkpoint | None = None
) -> None:
    checkpoint = checkpoint or RandomCheckpoint(LLAMA, 1)

    async def scenario() -> None:
        async with session_of(daemon, size_bytes(checkpoint, positions=POSITIONS)) as session:
            await begin(session, checkpoint)
            await check_all_is_free(session)

    asyncio.run(scenario())


@pytest.mark.parametrize("chunks", [1, 5, 12])
def test_a_load_that_fails_in_the_middle_frees_all(daemon: Daemon, chunks: int) -> None:
    async def begin(session: aio.GpuSession, checkpoint: Checkpoint) -> None:
        told: list[int] = []

        def progress(done: int, total: int) -> None:
            told.append(done)
            if len(told) == chunks:
                raise _Stop

        with pytest.raises(_Stop):
            await load_weights(session, checkpoint, positions=POSITIONS, progress=progress)

    failing(daemon, begin)


async def cancelled_load(session: aio.GpuSession, checkpoint: Checkpoint) -> None:
    """Begin to load a model, and cancel the load before it ends."""
    task: asyncio.Task[Any]

    def progress(done: int, total: int) -> None:
        if done > total // 2:
            task.cancel()

    task = asyncio.ensure_future(load_weights(session, checkpoint, positions=POSITIONS, progress=progress))
    with pytest.raises(asyncio.CancelledError):
        await task


def test_a_load_that_is_cancelled_frees_all(daemon: Daemon) -> None:
    failing(daemon, cancelled_load)


def test_a_load_with_copies_in_flight_that_is_cancelled_frees_all(
    daemon: Daemon, tmp_path: Path, small_chunks: None
) -> None:
    async def begin(session: aio.GpuSession, checkpoint: Checkpoint) -> None:
        free = arena_room(session)
        await cancelled_load(session, checkpoint)
        # A thread that reads keeps its window until it has finished.
        gc.collect()
        await asyncio.to_thread(lambda: wait_until(lambda: arena_room(session) == free, "the windows are free"))

    failing(daemon, begin, open_model(write_folder(tmp_path / "model", QWEN2, random_weights(QWEN2))))


def arena_room(session: aio.GpuSession) -> int:
    """Return the size in bytes of the largest array for which the arena has room."""
    least, most = 0, 2 << 30
    while most - least > 1 << 20:
        half = (least + most) // 2
        array = session.empty(half, np.uint8)
        least, most = (half, most) if isinstance(array.base, np.ndarray) else (least, half)
        del array
    return least


def test_a_lease_that_ends_while_its_model_is_loaded_is_the_session_s_own_error(
    daemon: Daemon, tmp_path: Path, small_chunks: None
) -> None:
    checkpoint = open_model(write_folder(tmp_path / "model", QWEN2, random_weights(QWEN2)))

    async def scenario() -> None:
        size = size_bytes(checkpoint, positions=POSITIONS)
        async with aio.GpuBuilder(daemon.address).min_vram(size).lease_secs(60).acquire() as lease:
            session = await aio.GpuSession(lease)
            ends: list[asyncio.Task[None]] = []

            def progress(done: int, total: int) -> None:
                if done > total // 4 and not ends:
                    ends.append(asyncio.ensure_future(lease.free()))

            with pytest.raises(GpuLeaseError) as raised:
                await load_weights(session, checkpoint, positions=POSITIONS, progress=progress)
            assert not isinstance(raised.value, ModelRejected)
            await ends[0]

    asyncio.run(scenario())


def test_memory_that_others_took_meanwhile_is_the_session_s_own_error(daemon: Daemon) -> None:
    async def begin(session: aio.GpuSession, checkpoint: Checkpoint) -> None:
        taken = await session.mem_alloc(session.slice_bytes - (1 << 20))
        with pytest.raises(AllocFailed):
            await load_weights(session, checkpoint, positions=POSITIONS)
        await session.mem_free(taken)

    failing(daemon, begin)


# --- Sizes and libraries. ---


def test_a_size_is_what_a_card_takes_for_the_shapes_of_llama_3_1_8b() -> None:
    config = replace(
        LLAMA, layers=32, width=4096, heads=32, key_heads=8, head_width=128, inner_width=14336, vocabulary=128_256
    )
    assert size_bytes(RandomCheckpoint(config, 1), positions=2048) == pytest.approx(16.06e9, rel=0.001)


def test_no_library_of_the_extra_is_imported_before_a_file_is_opened() -> None:
    program = (
        "import sys, gpulease.client, gpulease.client.decode.checkpoint\n"
        "print({'gguf', 'safetensors', 'tokenizers', 'jinja2'} & set(sys.modules))"
    )
    command = [sys.executable, "-P", "-c", program]
    done = subprocess.run(command, env=python_environment(), capture_output=True, text=True, check=True)
    assert done.stdout == "set()\n"


@pytest.mark.parametrize("module", ["safetensors_folder", "gguf_file"])
def test_a_missing_library_is_a_sentence_that_names_the_extra(
    module: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, f"gpulease.client.decode.checkpoint.{module}", None)
    with pytest.raises(Unsupported, match=r"the libraries that read models are missing: .*pip install '.\[decode\]'"):
        open_model(tmp_path if module == "safetensors_folder" else tmp_path / "a.gguf")
