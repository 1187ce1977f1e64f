"""Compile the decode engine's kernels: `python -m gpulease.client.decode.kernels.build [FOLDER]`.

Developers run this with Triton installed (`pip install '.[kernels]'`). No GPU is needed. The build writes a PTX file
for each kernel, and `manifest.json`, which says how to launch them. The package contains these files.
"""

import json
import re
import sys
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.experimental.gluon._runtime import GluonASTSource

from gpulease.client.decode.kernels import gluon_source, triton_source

TARGETS: Final = {"sm_80": GPUTarget("cuda", 80, 32), "sm_90a": GPUTarget("cuda", 90, 32)}
"""Targets by name. Kernels for sm_80 use mma, ldmatrix and cp.async, which every later card and the embedded driver
support. Kernels for sm_90a use wgmma, which only cards of compute capability 9.0 support. Both give the same bits.
"""

PTX_VERSION: Final = 88
"""PTX ISA 8.8, which drivers of CUDA 12.9 and later accept."""

HEAD_WIDTHS: Final = (32, 64, 80, 96, 128, 256)
"""Widths of attention heads for which kernels are compiled."""

HEADS: Final = 16
"""Maximum number of query heads per key head. One matrix instruction has this many rows."""

ATTEND_TILES: Final = {
    32: (32, 1, 2, None),
    64: (128, 4, 2, 96),
    80: (64, 4, 3, 112),
    96: (64, 4, 3, 112),
    128: (64, 4, 3, 112),
    256: (32, 4, 2, None),
}
"""Attention's tile for each width of heads: positions read at once, a divisor of SPLIT; warps; pipeline stages; limit
of registers per thread, or None.
"""

AHEAD_TILES: Final = {64: (4, 96)}
"""Warps and registers of `attend_ahead` and `attend_whole_ahead`, for each width of heads that has these kernels. In
them, the rows of a matrix instruction are positions, and a split is one tile. Measured on an H200 with 256 rows at
position 128: 21.7 us with 4 warps, 23.1 us with 2, 30.0 us with 1.
"""

AHEAD_HEADS: Final = 8
"""Query heads that one program of `attend_ahead` computes. One matrix instruction has this many columns."""

SHORT: Final = 32
"""Maximum number of positions in the smaller tile that `attend_whole_ahead` uses for the end of a sequence."""

PROMPT_TILES: Final = {
    32: (32, 4, 3, None),
    64: (32, 4, 2, None),
    80: (32, 4, 3, None),
    96: (32, 4, 3, None),
    128: (32, 4, 3, None),
    256: (32, 8, 2, None),
}
"""`attend_prompt`'s tile for each width of heads: lanes; warps; pipeline stages; limit of registers per thread, or
None. A tile's lanes are its rows times the query heads per key head. The number of positions read at once determines
the rounding, so it is that of ATTEND_TILES.
"""

FP8_TILES: Final = {
    32: (32, 1, 2, 2),
    64: (128, 2, 4, 2),
    80: (64, 4, 4, 2),
    96: (64, 4, 4, 2),
    128: (64, 4, 4, 2),
    256: (32, 2, 8, 4),
}
"""Tile of attention on keys and values in FP8 for each width of heads: positions read at once, a divisor of SPLIT;
warps for one row; warps for several rows; how many of the latter compute different lanes. Only the positions decide the
bits. Measured on an H200 with 64 rows at position 8,192 and heads of width 64: 172 us with 2 warps and 128 positions,
185 us with 64 positions, 224 us with 4 warps.
"""

FP8_STAGES: Final = 2
"""Number of these tiles in shared memory. With 3, fewer programs run at once."""

FP8_LANES: Final = 32
"""Rows of a tile times the query heads for each key head, as in PROMPT_TILES."""

FP8: Final = {"FP8": 1}
"""The constant that makes `rope_append` write keys and values in float8 e4m3 instead of bf16."""

ROPE_HEADS: Final = 8
"""Heads that one program rotates. With more, a step of one row would have too few programs to fill the GPU."""

ROPE_REGISTERS: Final = 64
"""Registers per thread of `rope_append`, enough to load 8 parts at once. Measured on an H200 with one row: 1.0 us
instead of 1.7 us."""

SCAN_REGISTERS: Final = 64
"""Registers per thread of `scan`. Without this limit the compiler uses 80, and fewer programs run at once. Measured on
an H200 with 256 rows: 58 us instead of 65 us."""

SPLIT: Final = 128
"""Positions in one split. Attention divides a sequence into splits and adds their results in ascending order."""

CUT_ROWS: Final = 1024
"""Maximum number of a step's rows for which `cut_spans` may cut tiles. One program reads all rows at once."""

COMBINED: Final = 32
"""Number of splits for which `combine` computes the factors at once, one for each lane of its warp."""

COMBINE_UNROLLED: Final = 8
"""Number of splits that `combine` loads before it waits for memory. Measured on an H200 with one sequence of 32,000
positions and Llama-3.2-1B's shape: 0.19 ms per step with 8 splits, 0.28 ms with 16, 0.74 ms with 1.
"""

Tile = tuple[int, int, int, int, int]
"""Rows, columns and depth of a tile, stages of its pipeline, warps."""

LINEAR_TILES: Final[dict[str, Tile]] = {"16": (16, 64, 128, 4, 4), "64": (64, 64, 64, 5, 4), "128": (128, 64, 64, 4, 4)}
QUANTISED_TILES: Final[dict[str, Tile]] = LINEAR_TILES | {"16": (16, 64, 64, 5, 4)}
LINEAR_SILU_TILES: Final[dict[str, Tile]] = {
    "16": (16, 32, 64, 5, 4),
    "64": (64, 32, 64, 5, 4),
    "128": (128, 32, 64, 4, 4),
}
EXPERT_TILES: Final = ("16", "64")
"""Names of the tiles for experts. All rows of a tile are of one expert, so a larger tile would be mostly empty."""

LINEAR_TILES_SM_90A: Final[dict[str, Tile]] = {
    "64x64": (64, 64, 64, 5, 4),
    "64x128": (64, 128, 64, 4, 4),
    "128x256": (128, 256, 64, 4, 8),
}
LINEAR_SILU_TILES_SM_90A: Final[dict[str, Tile]] = {
    "64x32": (64, 32, 128, 3, 4),
    "64x64": (64, 64, 64, 4, 4),
    "128x128": (128, 128, 64, 4, 8),
}

IN_TURNS_TILES_SM_90A: Final[dict[str, Tile]] = {"128x128": (128, 128, 64, 6, 8), "128x256": (128, 256, 64, 4, 8)}
GATED_IN_TURNS_TILES_SM_90A: Final[dict[str, Tile]] = {"128x128": (128, 128, 64, 4, 8)}
COPIERS: Final = 4
"""Number of additional warps in the tiles above that copy and do not multiply."""

COPIER_REGISTERS: Final = 88
"""Registers of a thread that copies. It needs one address for each row of its tiles."""

IN_TURNS_REGISTERS: Final = 168
"""Average registers per thread, so that the program's 384 threads use all 65,536 registers of a multiprocessor."""

NORM_BLOCKS: Final = {512: 4, 2048: 8, 4096: 16}
"""Warps of a norm, by the number of columns that it reads at once. Large blocks are faster, but leave lanes idle in
small models.
"""

NORM_REGISTERS: Final = 96
"""Registers per thread of a norm, enough to load 8 parts at once. Without this number the driver's compiler uses half
as many, and loads a linear's parts one after the other. Measured on an H200 with one row: 1.8 us instead of 2.2 us."""

INEXACT: Final = re.compile(r"\b(?:\w+\.approx\S*|div\.full\S*|(?:add|sub|mul)\.f32|fma\.\S*f32|\w+\.ftz\S*)")
"""Matches instructions whose results the PTX ISA does not define exactly, or which ptxas may fuse with others."""

FUSED: Final = ("silu", "gelu", "attend_fp8", "attend_whole_fp8", "attend_prompt_fp8", "attend_spans_fp8")
"""Kernels with one of these parts in their name may contain fma.rn.f32, because `quotient` and `exp2_fp8` use it. An
explicit fma.rn.f32 has the same bits on every card and on the embedded driver."""

_POINTERS: Final = {"b": "*bf16", "f": "*fp32", "h": "*fp16", "w": "*i32", "c": "*i8", "u": "*u8"}


@dataclass(frozen=True)
class Job:
    """A kernel to compile.

    `types` and `constants` are by the name of the function's parameter. A parameter in neither of them is None, and the
    compiled kernel does not have it. `divisible` names the integers that are multiples of 16. `registers` is the limit
    per thread, or None to let the compiler choose.
    """

    function: Any
    types: dict[str, str]
    constants: dict[str, int]
    warps: int = 4
    stages: int = 3
    divisible: tuple[str, ...] = field(default=())
    target: str = "sm_80"
    registers: int | None = None


def jobs() -> dict[str, Job]:
    """Return every kernel of the package by the name of its file."""
    s, g = triton_source, gluon_source
    scanned = "bests:f tokens:w totals:f"
    norm = "weight:f splits stride D eps:fp32"
    # Kernels that do not depend on the model's shape have one file each.
    compiled = {
        "embed": Job(s.embed, _types("h:f table:b rows:w results:w tables:w D table_blocks"), {"BLOCK_D": 1024}),
        "embed_scaled": Job(
            s.embed,
            _types("h:f table:b rows:w results:w tables:w D table_blocks scale:fp32"),
            {"BLOCK_D": 1024},
        ),
        "silu": Job(s.silu, _types("x:b parts:f splits stride F"), {"BLOCK_F": 512}, divisible=("stride", "F")),
        "gelu": Job(s.gelu, _types("x:b parts:f splits stride F"), {"BLOCK_F": 512}, divisible=("stride", "F")),
        "scan": Job(
            s.scan,
            _types(f"{scanned} parts:f splits stride V blocks"),
            {"BLOCK_V": 2048},
            registers=SCAN_REGISTERS,
        ),
        "sample": Job(
            s.sample,
            _types(f"results:w parts:f rows:w {scanned} splits stride V blocks"),
            {"BLOCK_V": 2048, "LANES": 128},
            warps=8,
        ),
        "guide": Job(
            s.guide,
            _types("guided:f bests:f tokens:w parts:f guides:w entries:w masks:w splits stride V blocks mask_words"),
            {"BLOCK_V": 2048, "LANES": 256},
            warps=4,
        ),
        "route": Job(
            s.route,
            _types("experts:w shares:f parts:f rows:w splits stride E K is_normalised"),
            {"LANES": 256, "PLACES": 16},
            # One warp, because each step of the search needs several reductions over the lanes, one after the other.
            warps=1,
        ),
        "cut_spans": Job(
            s.cut_spans,
            _types("spans:w cuts:w rows:w R S count room whole_splits least_splits max_spans"),
            {"SPLIT": SPLIT, "LANES": CUT_ROWS},
            # One row a thread: all of them are scanned at once.
            warps=32,
        ),
        "group": Job(s.group, _types("pairs:w tiles:w experts:w P E T rows_per_tile"), {"LANES": 256, "BLOCK_P": 32}),
        "sample_guided": Job(
            s.sample_guided,
            _types(
                "results:w guided:f bests:f tokens:w parts:f guides:w rows:w own_bests:f own_tokens:w own_totals:f"
                " splits stride V blocks"
            ),
            {"BLOCK_V": 2048, "LANES": 128},
            warps=8,
        ),
        "rank": Job(
            s.rank,
            _types("ranked:w parts:f guides:w bests:f tokens:w splits stride V blocks"),
            {"BLOCK_V": 2048, "LANES": 512, "PLACES": 20},
            warps=8,
        ),
    }
    # The other functions are compiled to one file per tile. A file's name is the kernel's name in the manifest.
    for block, warps in NORM_BLOCKS.items():
        for name, function, outer in (
            ("add_rmsnorm", s.add_rmsnorm, ""),
            ("norm_add_rmsnorm", s.norm_add_rmsnorm, "outer:f "),
        ):
            compiled[f"{name}_{block}"] = Job(
                function,
                _types(f"x:b h:f parts:f {outer}{norm}"),
                {"BLOCK_D": block},
                warps,
                divisible=("stride", "D"),
                registers=NORM_REGISTERS,
            )
    # Linears are compiled for several tiles, and again with wgmma for cards of compute capability 9.0.
    for target, linear, silu in (
        ("sm_80", LINEAR_TILES, LINEAR_SILU_TILES),
        ("sm_90a", LINEAR_TILES_SM_90A, LINEAR_SILU_TILES_SM_90A),
    ):
        suffix = "" if target == "sm_80" else f"_{target}"
        compiled |= {
            f"linear_bf16_{name}{suffix}": _linear(s.linear_bf16, "w:b", tile, target) for name, tile in linear.items()
        }
        for name, tile in silu.items():
            compiled[f"linear_silu_bf16_{name}{suffix}"] = _linear_gated(s.linear_silu_bf16, tile, target)
            compiled[f"linear_gelu_bf16_{name}{suffix}"] = _linear_gated(s.linear_gelu_bf16, tile, target)
    for name, tile in IN_TURNS_TILES_SM_90A.items():
        types = _types("parts:f x:b w:b R N K chunk")
        divisible = ("N", "K", "chunk")
        compiled[f"linear_bf16_in_turns_{name}_sm_90a"] = _in_turns(g.linear_bf16_in_turns, types, divisible, tile)
    for name, tile in GATED_IN_TURNS_TILES_SM_90A.items():
        for gate, function in (("silu", g.linear_silu_bf16_in_turns), ("gelu", g.linear_gelu_bf16_in_turns)):
            types = _types("y:b x:b w:b R F K")
            compiled[f"linear_{gate}_bf16_in_turns_{name}_sm_90a"] = _in_turns(function, types, ("F", "K"), tile)
    for name, tile in QUANTISED_TILES.items():
        compiled[f"linear_q8_0_{name}"] = _linear(s.linear_q8_0, "w:c scales:h", tile, "sm_80")
        compiled[f"linear_q4_k_{name}"] = _linear(s.linear_q4_k, "w:u scales:h steps:u", tile, "sm_80")
        compiled[f"linear_fp8_{name}"] = _linear(s.linear_fp8, "w:u scales:f", tile, "sm_80")
        compiled[f"linear_awq_{name}"] = _linear(s.linear_awq, "w:u scales:h zeros:u", tile, "sm_80")
    for name in EXPERT_TILES:
        compiled[f"experts_silu_bf16_{name}"] = _experts(
            s.experts_silu_bf16, "y:b x:b w:b pairs:w tiles:w R F K C", ("F", "K"), LINEAR_SILU_TILES[name]
        )
        compiled[f"experts_bf16_{name}"] = _experts(
            s.experts_bf16, "parts:f y:b w:b shares:f pairs:w tiles:w R N K C", ("N", "K"), LINEAR_TILES[name]
        )
    for width in HEAD_WIDTHS:
        compiled |= _attention_jobs(width)
    return compiled


def _linear(function: Any, weights: str, tile: Tile, target: str) -> Job:
    rows, columns, depth, stages, warps = tile
    # The manifest lists parameters in this order. `weights` are the types of the weights and, if they have any, of
    # their scales and zeros.
    types = _types(f"parts:f x:b {weights} R N K chunk")
    return Job(function, types, {"BM": rows, "BN": columns, "BK": depth}, warps, stages, ("K", "chunk"), target)


def _in_turns(function: Any, types: dict[str, str], divisible: tuple[str, ...], tile: Tile) -> Job:
    rows, columns, depth, stages, warps = tile
    constants = {
        "BM": rows, "BN": columns, "BK": depth, "STAGES": stages, "WARPS": warps, "COPIERS": COPIERS,
        "COPIER_REGISTERS": COPIER_REGISTERS,
    }  # fmt: skip
    return Job(function, types, constants, warps, divisible=divisible, target="sm_90a", registers=IN_TURNS_REGISTERS)


def _linear_gated(function: Any, tile: Tile, target: str) -> Job:
    rows, columns, depth, stages, warps = tile
    constants = {"BM": rows, "BN": columns, "BK": depth}
    types = _types("y:b x:b w:b R F K")
    return Job(function, types, constants, warps, stages, ("F", "K"), target)


def _experts(function: Any, types: str, divisible: tuple[str, ...], tile: Tile) -> Job:
    rows, columns, depth, stages, warps = tile
    constants = {"BM": rows, "BN": columns, "BK": depth}
    return Job(function, _types(types), constants, warps, stages, divisible)


def _attention_jobs(width: int) -> dict[str, Job]:
    """Return the kernels of attention for heads of this width."""
    s, g = triton_source, gluon_source
    cache, divisible = "layer_bytes block_bytes", ("layer_bytes", "block_bytes")
    norms = "bias:f q_norm:f k_norm:f cosines:f sines:f"
    partials, read = "totals:f tops:f sums:f", f"q:b rows:w tables:w {cache} table_blocks H G"
    read_rows = f"q:b rows:w tables:w {cache} table_blocks R H G"
    compiled = {
        f"rope_append_{width}": Job(
            s.rope_append,
            _types(f"q:b parts:f {norms} rows:w splits stride {cache} H G has_bias has_norm eps:fp32"),
            {"HALF": width // 2, "HEADS": ROPE_HEADS},
            warps=min(4, 1 << (width // 16).bit_length() - 1),
            divisible=divisible,
            registers=ROPE_REGISTERS,
        ),
    }
    # There are no spans with a window, because a row with a window attends to too few positions to be split.
    read_spans = f"x:b {partials} q:b rows:w tables:w spans:w {cache} table_blocks H G scale:fp32"
    compiled |= {
        f"attend_spans_{width}": _attend_prompt(s.attend_spans, width, _types(read_spans)),
        f"attend_row_spans_{width}": _attend(s.attend_row_spans, width, _types(read_spans)),
        f"combine_spans_{width}": _combine(width, _types(f"x:b {partials} rows:w H cuts:w")),
    }
    # Keys and values in FP8. These kernels always have a window. For a model without one, the window is at least as
    # long as the sequence. The splits are combined by the kernels for bf16.
    append = compiled[f"rope_append_{width}"]
    compiled |= {
        f"rope_append_fp8_{width}": replace(append, constants=append.constants | FP8),
        f"attend_fp8_{width}": _attend_fp8(g.attend_fp8, width, f"{partials} {read} splits scale:fp32 window"),
        f"attend_whole_fp8_{width}": _attend_fp8(g.attend_whole_fp8, width, f"x:b {read} scale:fp32 window"),
        f"attend_prompt_fp8_{width}": _attend_fp8(g.attend_prompt_fp8, width, f"x:b {read_rows} scale:fp32 window"),
        f"attend_spans_fp8_{width}": _attend_fp8(g.attend_spans_fp8, width, read_spans),
    }
    # Compile each kernel twice: without a window, and with one.
    for name, window in ((f"{width}", ""), (f"window_{width}", " window")):
        compiled |= {
            f"attend_{name}": _attend_parts(width, _types(f"{partials} {read} splits scale:fp32{window}")),
            f"attend_whole_{name}": _attend_whole(width, _types(f"x:b {read} scale:fp32{window}")),
            f"attend_prompt_{name}": _attend_prompt(
                s.attend_prompt, width, _types(f"x:b {read_rows} scale:fp32{window}")
            ),
            f"combine_{name}": _combine(width, _types(f"x:b {partials} rows:w H splits{window}")),
        }
    return compiled


def _attend(function: Any, width: int, types: dict[str, str]) -> Job:
    positions, warps, stages, registers = ATTEND_TILES[width]
    constants = {"DH": width, "HEADS": HEADS, "SPLIT": SPLIT, "BT": positions}
    divisible = ("layer_bytes", "block_bytes")
    return Job(function, types, constants, warps, stages, divisible, registers=registers)


def _attend_ahead(function: Any, width: int, types: dict[str, str], **more: int) -> Job:
    warps, registers = AHEAD_TILES[width]
    constants = {"DH": width, "HEADS": AHEAD_HEADS, "SPLIT": SPLIT, "WARPS": warps, **more}
    return Job(function, types, constants, warps, divisible=("layer_bytes", "block_bytes"), registers=registers)


def _attend_fp8(function: Any, width: int, types: str) -> Job:
    positions, row_warps, tile_warps, sides = FP8_TILES[width]
    is_tile = function in {gluon_source.attend_prompt_fp8, gluon_source.attend_spans_fp8}
    warps = tile_warps if is_tile else row_warps
    lanes = {"LANES": FP8_LANES, "SIDES": sides} if is_tile else {"HEADS": AHEAD_HEADS}
    constants = {"DH": width, "SPLIT": SPLIT, "BT": positions, **lanes, "WARPS": warps, "STAGES": FP8_STAGES}
    return Job(function, _types(types), constants, warps, divisible=("layer_bytes", "block_bytes"))


def _attend_parts(width: int, types: dict[str, str]) -> Job:
    if width in AHEAD_TILES:
        return _attend_ahead(gluon_source.attend_ahead, width, types)
    return _attend(triton_source.attend, width, types)


def _attend_whole(width: int, types: dict[str, str]) -> Job:
    if width in AHEAD_TILES:
        return _attend_ahead(gluon_source.attend_whole_ahead, width, types, SHORT=SHORT)
    return _attend(triton_source.attend_whole, width, types)


def _combine(width: int, types: dict[str, str]) -> Job:
    constants = {"DH": width, "SPLIT": SPLIT, "LANES": COMBINED, "UNROLLED": COMBINE_UNROLLED}
    return Job(triton_source.combine, types, constants, warps=1)


def _attend_prompt(function: Any, width: int, types: dict[str, str]) -> Job:
    positions, whole_warps, _, _ = ATTEND_TILES[width]
    lanes, warps, stages, registers = PROMPT_TILES[width]
    constants = {"DH": width, "SPLIT": SPLIT, "BT": positions, "LANES": lanes, "WARPS": whole_warps}
    divisible = ("layer_bytes", "block_bytes")
    return Job(function, types, constants, warps, stages, divisible, registers=registers)


def _types(text: str) -> dict[str, str]:
    """Parse `name:type` items. A single letter means a pointer (_POINTERS), and a missing type i32."""
    pairs = (item.partition(":") for item in text.split())
    return {name: _POINTERS.get(kind, kind) or "i32" for name, _, kind in pairs}


def compiled(name: str, job: Job) -> tuple[str, dict[str, Any]]:
    """Compile one kernel. Returns its PTX and its entry in the manifest."""
    # Triton uses vector loads and cp.async if pointers and strides are multiples of 16. Every launch guarantees this.
    names = job.function.arg_names
    aligned = [n for n, kind in job.types.items() if kind.startswith("*") or n in job.divisible]
    # Compile without a launch: types, constants and alignment are given instead of arguments.
    kind = GluonASTSource if job.function.is_gluon() else ASTSource
    source = kind(
        fn=job.function,
        signature={n: job.types.get(n, "constexpr") for n in names},
        constexprs={(names.index(n),): job.constants.get(n) for n in names if n not in job.types},
        attrs={(names.index(n),): [["tt.divisibility", 16]] for n in aligned},
    )
    # A fused multiply-add rounds once where the embedded driver rounds twice, so fusion is off.
    options = {"num_warps": job.warps, "num_stages": job.stages, "enable_fp_fusion": False, "ptx_version": PTX_VERSION}
    if job.registers:
        options["maxnreg"] = job.registers
    kernel = triton.compile(source, target=TARGETS[job.target], options=options)
    # Fail the build rather than ship a kernel that could give other bits on another card.
    ptx = _without_debug(kernel.asm["ptx"])
    allowed = {"fma.rn.f32"} if any(part in name for part in FUSED) else set[str]()
    if inexact := sorted(set(INEXACT.findall(ptx)) - allowed):
        raise SystemExit(f"{name}: inexact instructions: {', '.join(inexact)}")
    metadata = kernel.metadata
    if metadata.global_scratch_size or metadata.profile_scratch_size:
        raise SystemExit(f"{name}: the kernel wants scratch memory, which no launch gives it")
    entry = {
        "kernel": metadata.name,
        "target": job.target,
        "threads": 32 * metadata.num_warps,
        "shared_bytes": metadata.shared,
        "parameters": list(job.types),
        "constants": job.constants,
    }
    return ptx, entry


def _without_debug(ptx: str) -> str:
    # Line tables contain paths of the developer's machine, and would make the files differ between machines.
    ptx = re.sub(r"\t\.section\s+\.debug_\w+\s*\{.*?\n\t\}\n?", "", ptx, flags=re.DOTALL)
    kept = (
        line
        for line in ptx.splitlines()
        if not re.match(r"\s*(\.loc|\.file|//|\$L__(tmp|func|cfi|info|debug|line)\w*:?)", line) and line.strip()
    )
    return "\n".join(re.sub(r"\s*//.*", "", line).replace(", debug", "") for line in kept) + "\n"


def build(folder: Path) -> None:
    """Compile all kernels into a folder, and write the manifest. Exits on a kernel with inexact instructions."""
    # The digest of the kernels covers the manifest, and so the version of Triton.
    manifest = {"triton": triton.__version__, "split": SPLIT, "heads": HEADS, "kernels": {}}
    for name, job in jobs().items():
        ptx, manifest["kernels"][name] = compiled(name, job)
        (folder / f"{name}.ptx").write_text(ptx)
    (folder / "manifest.json").write_text(json.dumps(manifest, indent=1) + "\n")


if __name__ == "__main__":
    build(Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parent)
