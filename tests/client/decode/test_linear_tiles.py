"""The choice of a linear's tile: one that the card runs, with enough programs, and small for few rows."""

import pytest

from gpulease.client.decode.engine.kernel_library import manifest
from gpulease.client.decode.engine.linear_tiles import MULTIPROCESSORS, SM_80, SM_90A, linear_grid, target_of, tile_of

FUNCTIONS = (
    "linear_bf16",
    "linear_silu_bf16",
    "linear_gelu_bf16",
    "linear_q8_0",
    "linear_q4_k",
    "linear_fp8",
    "linear_awq",
)


@pytest.mark.parametrize("function", FUNCTIONS)
@pytest.mark.parametrize("rows", [1, 16, 17, 64, 65, 128, 129, 1000])
def test_a_card_without_kernels_of_its_own_has_the_least_tile_with_room(function: str, rows: int) -> None:
    name = tile_of(function, SM_80, rows, 4096, 1)
    assert manifest().kernels[name].target == SM_80
    assert name == f"{function}_{next((tile for tile in (16, 64, 128) if tile >= rows), 128)}"


@pytest.mark.parametrize(
    ("rows", "columns", "parts", "tile"),
    [(1, 4096, 1, "16"), (16, 128256, 1, "16"), (17, 8192, 1, "64x64_sm_90a"), (64, 8192, 1, "64x64_sm_90a"),
     (64, 128256, 1, "64x128_sm_90a"),
     (65, 2048, 4, "64x128_sm_90a"), (256, 2048, 4, "64x128_sm_90a"), (256, 2048, 8, "in_turns_128x128_sm_90a"),
     (256, 3072, 4, "in_turns_128x128_sm_90a"), (512, 64, 1, "64x128_sm_90a"),
     (128, 128256, 1, "in_turns_128x256_sm_90a"), (512, 3072, 4, "in_turns_128x128_sm_90a"),
     (512, 2048, 8, "in_turns_128x256_sm_90a"), (128, 128250, 1, "128x256_sm_90a")],
)  # fmt: skip
def test_a_card_of_9_0_has_its_own_for_many_rows(rows: int, columns: int, parts: int, tile: str) -> None:
    assert tile_of("linear_bf16", SM_90A, rows, columns, parts) == f"linear_bf16_{tile}"


@pytest.mark.parametrize("gate", ["silu", "gelu"])
@pytest.mark.parametrize(
    ("rows", "columns", "tile"),
    [(128, 8192, "64x64_sm_90a"), (256, 8192, "in_turns_128x128_sm_90a"), (512, 14336, "in_turns_128x128_sm_90a"),
     (256, 8200, "128x128_sm_90a")],
)  # fmt: skip
def test_gated_linears_take_turns_where_their_tiles_fill_the_card(
    gate: str, rows: int, columns: int, tile: str
) -> None:
    assert tile_of(f"linear_{gate}_bf16", SM_90A, rows, columns, 1) == f"linear_{gate}_bf16_{tile}"


def test_programs_that_take_turns_are_as_many_as_run_at_once() -> None:
    assert linear_grid("linear_bf16_in_turns_128x256_sm_90a", 256, 128256, 1) == (MULTIPROCESSORS,)
    assert linear_grid("linear_bf16_in_turns_128x256_sm_90a", 100, 512, 4) == (8,)
    assert linear_grid("linear_bf16_128x256_sm_90a", 256, 512, 4) == (2, 2, 4)


def test_quantised_weights_have_the_same_kernels_on_every_card() -> None:
    assert tile_of("linear_q8_0", SM_90A, 300, 4096, 1) == "linear_q8_0_128"


@pytest.mark.parametrize(
    ("driver", "capability", "target"),
    [("cuda", 90, SM_90A), ("cuda", 80, SM_80), ("cuda", 100, SM_80), ("cuda", 0, SM_80), ("cpu", 90, SM_80)],
)
def test_wgmma_is_for_cards_of_9_0_alone(driver: str, capability: int, target: str) -> None:
    assert target_of(driver, capability) == target
