"""Special registers (PTX ISA section 10)."""

from gpulease.daemon.drivers.cpu.native.layout import Launch
from gpulease.daemon.drivers.cpu.translate.ir import INVARIANT, IrWriter, Value, constant

WARP_THREADS = 32

_AXES = ("x", "y", "z")

# Passed to the thread's function; the others come out of the launch.
ARGUMENTS = tuple(f"{name}.{axis}" for name in ("tid", "ctaid") for axis in _AXES)

_LAUNCH_FIELDS = {
    f"{name}.{axis}": field + 4 * number
    for name, field in (("ntid", Launch.block.offset), ("nctaid", Launch.grid.offset))
    for number, axis in enumerate(_AXES)
}

# Lanes compared with the thread's own (PTX ISA section 10).
_LANE_MASKS = ("lanemask_eq", "lanemask_le", "lanemask_lt", "lanemask_ge", "lanemask_gt")

NAMES = (*ARGUMENTS, *_LAUNCH_FIELDS, "laneid", "warpid", "nwarpid", *_LANE_MASKS, "clock", "clock64")


def read_special(ir: IrWriter, name: str) -> Value | None:
    """A special register's value, or None if it is not supported."""
    if name in ARGUMENTS:
        return Value("i32", f"%{name}")
    if name in _LAUNCH_FIELDS:
        place = ir.offset(Value("ptr", "%launch"), _LAUNCH_FIELDS[name])
        return ir.load("i32", place, extra=INVARIANT)
    if name in _LANE_MASKS:
        return _lane_mask(ir, name)
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
    return None


def _lane_mask(ir: IrWriter, name: str) -> Value:
    own = ir.binary("shl", constant("i32", 1), ir.binary("urem", flat_thread(ir), WARP_THREADS))
    below = ir.binary("sub", own, 1)
    match name:
        case "lanemask_eq":
            return own
        case "lanemask_lt":
            return below
        case "lanemask_le":
            return ir.binary("or", below, own)
        case "lanemask_ge":
            return ir.binary("xor", below, -1)
    return ir.binary("xor", ir.binary("or", below, own), -1)


def block_threads(ir: IrWriter) -> Value:
    """How many threads a block has."""
    area = ir.binary("mul", _launch_field(ir, "ntid.x"), _launch_field(ir, "ntid.y"))
    return ir.binary("mul", area, _launch_field(ir, "ntid.z"))


def flat_thread(ir: IrWriter) -> Value:
    """The thread's number in its block, x fastest (PTX ISA section 10.1)."""
    width, height = _launch_field(ir, "ntid.x"), _launch_field(ir, "ntid.y")
    rows = ir.binary("add", ir.binary("mul", Value("i32", "%tid.z"), height), Value("i32", "%tid.y"))
    return ir.binary("add", ir.binary("mul", rows, width), Value("i32", "%tid.x"))


def _launch_field(ir: IrWriter, name: str) -> Value:
    return read_special(ir, name) or constant("i32", 1)
