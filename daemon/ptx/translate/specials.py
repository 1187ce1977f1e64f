"""Reads the special registers of threads, lanes and the machine (PTX ISA section 10)."""

from gpulease.daemon.native.compiler import CLOCK_GETTIME
from gpulease.daemon.ptx.native.structures import QueuedLaunch
from gpulease.daemon.ptx.translate.ir import IrWriter, Value, constant

WARP_THREADS = 32

_AXES = ("x", "y", "z")

# These registers are arguments of the function that runs a thread. All others are read from the launch or computed.
ARGUMENTS = tuple(f"{name}.{axis}" for name in ("tid", "ctaid") for axis in _AXES)

# The offsets of the dimensions in the head of a launch.
_LAUNCH_FIELDS = {
    f"{name}.{axis}": field + 4 * number
    for name, field in (("ntid", QueuedLaunch.block.offset), ("nctaid", QueuedLaunch.grid.offset))
    for number, axis in enumerate(_AXES)
}

# Registers that describe the machine, which has one multiprocessor.
MACHINE = ("clock_hi", "smid", "nsmid", "gridid", "globaltimer", "globaltimer_lo", "globaltimer_hi")

# Returns the nanoseconds since 1970, like %globaltimer of a card (PTX ISA section 10.23).
GLOBAL_TIME_IR = f"""
declare i32 @{CLOCK_GETTIME}(i32, ptr)
define internal i64 @global_time() noinline {{
  %time = alloca [16 x i8], align 8
  %failed = call i32 @{CLOCK_GETTIME}(i32 0, ptr %time)
  %seconds = load i64, ptr %time
  %rest.at = getelementptr i8, ptr %time, i64 8
  %rest = load i64, ptr %rest.at
  %whole = mul i64 %seconds, 1000000000
  %sum = add i64 %whole, %rest
  ret i64 %sum
}}
"""

# A cluster always has one block, so the number and the indices of clusters are the same as those of blocks.
_CLUSTER = {f"cluster_ctaid.{axis}": 0 for axis in _AXES} | {f"cluster_nctaid.{axis}": 1 for axis in _AXES}
_CLUSTER |= {"cluster_ctarank": 0, "cluster_nctarank": 1}

# The address of the grid's barrier, which exists only in a cooperative launch. The code that nvcc 13.0 makes for
# grid.sync reads the address from these registers.
GRID_BARRIER = ("envreg1", "envreg2")

_AS_BLOCKS = {f"clusterid.{axis}": f"ctaid.{axis}" for axis in _AXES}
_AS_BLOCKS |= {f"nclusterid.{axis}": f"nctaid.{axis}" for axis in _AXES}

# Shared memory of a block (PTX ISA sections 10.30 and 10.32); see `read_shared_size`.
SHARED_SIZES = ("total_smem_size", "dynamic_smem_size")

# Masks of the lanes with numbers equal to, below or above the thread's lane (PTX ISA section 10).
_LANE_MASKS = ("lanemask_eq", "lanemask_le", "lanemask_lt", "lanemask_ge", "lanemask_gt")

NAMES = (
    *ARGUMENTS,
    *_LAUNCH_FIELDS,
    "laneid",
    "warpid",
    "nwarpid",
    *_LANE_MASKS,
    "clock",
    "clock64",
    *MACHINE,
    *_CLUSTER,
    *_AS_BLOCKS,
    *GRID_BARRIER,
    *SHARED_SIZES,
)


def read_special(ir: IrWriter, name: str) -> Value | None:
    """Read a special register; None if it is not supported."""
    # Step 1: registers that are constant here, or equal to another register.
    name = _AS_BLOCKS.get(name, name)
    if name in GRID_BARRIER:
        return constant("i32", 0)
    if name in _CLUSTER:
        return constant("i32", _CLUSTER[name])
    # Step 2: registers that are arguments of the function or in the launch, and the masks of lanes.
    if name in ARGUMENTS:
        return ir.argument(name)
    if name in _LAUNCH_FIELDS:
        return ir.fixed("i32", Value("ptr", "%launch"), _LAUNCH_FIELDS[name])
    if name in _LANE_MASKS:
        return _lane_mask(ir, name)
    # Step 3: registers computed from the thread's number in its block, or read from the host's clock.
    match name:
        case "laneid":
            return ir.binary("urem", flat_thread(ir), WARP_THREADS)
        case "warpid":
            return ir.binary("udiv", flat_thread(ir), WARP_THREADS)
        case "nwarpid":
            return ir.binary("udiv", ir.binary("add", block_threads(ir), WARP_THREADS - 1), WARP_THREADS)
        case "clock64":
            return ir.intrinsic("llvm.readcyclecounter", "i64")
        case "clock":
            return ir.cast("trunc", ir.intrinsic("llvm.readcyclecounter", "i64"), "i32")
    return _read_machine(ir, name) if name in MACHINE else None


def read_shared_size(ir: IrWriter, name: str, dynamic_offset: int) -> Value:
    """Read one of SHARED_SIZES. `dynamic_offset` is the offset at which dynamic shared memory begins."""
    total = ir.fixed("i32", Value("ptr", "%launch"), QueuedLaunch.shared_bytes.offset)
    if name == "total_smem_size":
        return total
    # Without dynamic memory, the total may be less than that offset, because the offset is aligned.
    return ir.intrinsic("llvm.usub.sat.i32", "i32", total, constant("i32", dynamic_offset))


def _read_machine(ir: IrWriter, name: str) -> Value | None:
    match name:
        case "smid":
            return constant("i32", 0)
        case "nsmid":
            return constant("i32", 1)
        case "gridid":
            # The tag of a launch is its number.
            return ir.fixed("i64", Value("ptr", "%launch"), QueuedLaunch.tag.offset)
        case "clock_hi":
            return _half(ir, ir.intrinsic("llvm.readcyclecounter", "i64"), 32)
    # The others call a function that reads the clock.
    ir.require(GLOBAL_TIME_IR)
    time = ir.value("i64", "call i64 @global_time()")
    return {"globaltimer": time, "globaltimer_lo": _half(ir, time, 0), "globaltimer_hi": _half(ir, time, 32)}[name]


def _half(ir: IrWriter, value: Value, shift: int) -> Value:
    return ir.cast("trunc", ir.binary("lshr", value, shift), "i32")


def _lane_mask(ir: IrWriter, name: str) -> Value:
    # Compute the mask from the lane's own bit and the bits below it.
    own_bit = ir.binary("shl", constant("i32", 1), ir.binary("urem", flat_thread(ir), WARP_THREADS))
    below = ir.binary("sub", own_bit, 1)
    match name:
        case "lanemask_eq":
            return own_bit
        case "lanemask_lt":
            return below
        case "lanemask_le":
            return ir.binary("or", below, own_bit)
        case "lanemask_ge":
            return ir.binary("xor", below, -1)
    return ir.binary("xor", ir.binary("or", below, own_bit), -1)


def block_threads(ir: IrWriter) -> Value:
    area = ir.binary("mul", _launch_field(ir, "ntid.x"), _launch_field(ir, "ntid.y"))
    return ir.binary("mul", area, _launch_field(ir, "ntid.z"))


def flat_thread(ir: IrWriter) -> Value:
    """Return the thread's number in its block, with x varying fastest (PTX ISA section 10.1)."""
    # Code for lanes has already computed the numbers of all threads.
    if (thread := ir.flat_thread()) is not None:
        return thread
    width, height = _launch_field(ir, "ntid.x"), _launch_field(ir, "ntid.y")
    rows = ir.binary("add", ir.binary("mul", ir.argument("tid.z"), height), ir.argument("tid.y"))
    return ir.binary("add", ir.binary("mul", rows, width), ir.argument("tid.x"))


def _launch_field(ir: IrWriter, name: str) -> Value:
    return read_special(ir, name) or constant("i32", 1)
