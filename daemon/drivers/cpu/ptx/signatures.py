"""Parameter lists of kernels, functions and prototypes (PTX ISA sections 5.1.6 and 11.3)."""

from gpulease.daemon.drivers.cpu.limits import MAX_PARAMETER_BYTES
from gpulease.daemon.drivers.cpu.ptx.cursor import Cursor
from gpulease.daemon.drivers.cpu.ptx.declarations import parse_parameter
from gpulease.daemon.drivers.cpu.ptx.syntax import Space, Variable


def parse_parameters(cursor: Cursor, space: Space) -> tuple[tuple[Variable, ...], int]:
    """Take `(.param .u32 a, ...)`, or nothing; also its size in bytes."""
    parameters: list[Variable] = []
    size = 0
    if not cursor.accept("("):
        return (), 0
    while not cursor.accept(")"):
        if parameters:
            cursor.expect(",")
        parameter = parse_parameter(cursor, size, space)
        size = parameter.offset + parameter.size
        if size > MAX_PARAMETER_BYTES:
            raise cursor.problem(f"the parameters take more than {MAX_PARAMETER_BYTES} bytes")
        if parameter.size == 0:
            raise cursor.problem(f"the parameter {parameter.name[:60]} has no size")
        parameters.append(parameter)
    return tuple(parameters), size


def skip_function_directives(cursor: Cursor) -> None:
    """Take what may follow a function's parameters: it changes nothing here (PTX ISA section 11.4)."""
    while cursor.peek.kind == "directive":
        at = cursor.take()
        if at.text != ".noreturn":
            raise cursor.problem(f"{at.text[:60]} is not supported", at)
