"""Links the kernels and functions of one image before any of them is translated.

This module decides which functions a kernel can reach, which functions are inlined, and the offsets of the shared
variables that functions name. These offsets are the same for all kernels.
"""

from collections.abc import Iterator
from dataclasses import replace

from gpulease.daemon.drivers.interface import ImageRejected
from gpulease.daemon.ptx.limits import (
    MAX_CALL_GRAPH_STEPS,
    MAX_INSTRUCTIONS,
    MAX_STATIC_SHARED_BYTES,
    MAX_WATCHING_INSTRUCTIONS,
    rejected,
)
from gpulease.daemon.ptx.parse.declarations import round_up
from gpulease.daemon.ptx.parse.syntax import (
    Address,
    CallSite,
    DeclaredVariable,
    Function,
    Image,
    Operand,
    Space,
    Symbol,
    Vector,
)
from gpulease.daemon.ptx.translate.heap import with_heap
from gpulease.daemon.ptx.translate.inliner import Inliner, map_variables, meets
from gpulease.daemon.ptx.translate.waits import find_waits, watches


def link(image: Image) -> Image:
    """Return the image ready for translation. Raises ImageRejected.

    Kernels that can't be linked are added to the image's refusals.
    """
    # The image is already linked.
    if image.addressed is not None:
        return image
    # Step 1: before bodies are copied, number the functions with addresses that are taken, and place shared variables.
    refusals, variables = dict(image.refusals), with_heap(image)
    image = replace(image, addressed=_addressed(image), refusals=refusals, variables=variables)
    image = _place_shared(image)
    # Step 2: functions with barriers or warp operations must be inlined, and so must all their callers.
    functions = {function.name: function for function in image.subroutines}
    callers, watching = _callers(image), watching_functions(image)
    meeting = _spread({name for name, function in functions.items() if meets(function)}, callers)
    # Step 3: functions that wait in a loop should also be inlined. Inside a call, a thread can't let other threads run,
    # so it would wait forever.
    turning = {name for name, function in functions.items() if find_waits(function.instructions, watching).yields}
    # If inlining makes a kernel too large, call these functions instead, so that the image can at least be loaded.
    if turning - meeting:
        to_inline = meeting | _spread(turning, callers)
        inlined = _inlined(image, functions, to_inline, MAX_WATCHING_INSTRUCTIONS)
        if inlined.refusals.keys() == image.refusals.keys():
            return inlined
    return _inlined(image, functions, meeting, MAX_INSTRUCTIONS)


def _inlined(image: Image, functions: dict[str, Function], to_inline: set[str], max_instructions: int) -> Image:
    # If a kernel can't be expanded, refuse only this kernel.
    inliner = Inliner(functions, to_inline, max_instructions)
    refusals, kernels = dict(image.refusals), []
    for kernel in image.functions:
        try:
            kernels.append(inliner.expand(kernel))
        except ImageRejected as error:
            refusals.setdefault(kernel.name, error)
            kernels.append(kernel)
    return replace(image, functions=tuple(kernels), refusals=refusals)


def callees_of(function: Function) -> set[str]:
    """Return the names of a function's callees; "" stands for a call through a register."""
    sites = (instruction.operands[-1] for instruction in function.instructions if instruction.opcode == "call")
    return {site.name for site in sites if isinstance(site, CallSite)}


class CallGraph:
    """Finds the functions that a kernel reaches. MAX_CALL_GRAPH_STEPS bounds the work for hostile images."""

    def __init__(self, image: Image) -> None:
        self._addressed = image.addressed or ()
        self._calls = {function.name: callees_of(function) for function in image.subroutines}
        self._steps = 0

    def reached(self, kernel: Function) -> set[str]:
        """Return the functions that a kernel may call, directly or not. Raises ImageRejected.

        A call through a pointer may call every function with an address that is taken.
        """
        reachable: set[str] = set()
        pending = [callees_of(kernel)]
        while pending:
            names = pending.pop()
            # Count each callee of each kernel, because in a hostile image every kernel could reach every function.
            self._steps += len(names)
            if self._steps > MAX_CALL_GRAPH_STEPS:
                raise rejected("too many kernels call too many functions", line=kernel.line, kernel=kernel.name)
            if "" in names and not reachable.issuperset(self._addressed):
                names = names.union(self._addressed)
            for name in names:
                if name in self._calls and name not in reachable:
                    reachable.add(name)
                    pending.append(self._calls[name])
        return reachable


def watching_functions(image: Image) -> frozenset[str]:
    """Return the functions that may poll memory that other threads write, directly or in a function that they call.

    "" is one of them if a call through a pointer may call one.
    """
    callers = _callers(image)
    watching = _spread({f.name for f in image.subroutines if any(watches(i) for i in f.instructions)}, callers)
    # If any function with an address that is taken may poll, so may a call through a pointer, and then also its
    # callers.
    return frozenset(_spread({*watching, ""}, callers) if watching.intersection(image.addressed or ()) else watching)


def _callers(image: Image) -> dict[str, set[str]]:
    callers: dict[str, set[str]] = {}
    for function in image.subroutines:
        for name in callees_of(function):
            callers.setdefault(name, set()).add(function.name)
    return callers


def _spread(seeds: set[str], callers: dict[str, set[str]]) -> set[str]:
    """Return the seeds and all functions that call them, directly or not."""
    spread, pending = set(seeds), list(seeds)
    while pending:
        fresh = callers.get(pending.pop(), set()) - spread
        spread |= fresh
        pending.extend(fresh)
    return spread


def variables_of(function: Function) -> Iterator[DeclaredVariable]:
    """Yield the variables that a function's instructions name. A variable may be yielded several times."""
    # Elements of vectors are also operands. They are appended to the list while it is iterated.
    pending: list[Operand] = [operand for i in function.instructions for operand in i.operands]
    for operand in pending:
        match operand:
            case Symbol(variable) | Address(DeclaredVariable() as variable):
                yield variable
            case Vector(elements):
                pending.extend(elements)


def _addressed(image: Image) -> tuple[str, ...]:
    # Instructions and initialisers of variables can take a function's address.
    defined = {function.name for function in image.subroutines}
    names = {v.name for f in (*image.functions, *image.subroutines) for v in variables_of(f) if v.space is Space.CODE}
    names.update(relocation.symbol for variable in image.variables for relocation in variable.relocations)
    return tuple(sorted(names & defined))


class _Shared:
    """The offsets of shared variables, one variable after another. Those of `before` come first."""

    def __init__(self, before: "_Shared | None" = None) -> None:
        self.size: int = before.size if before else 0
        self._before = before
        self._places: dict[tuple[str, DeclaredVariable], DeclaredVariable] = {}

    def add(self, owner: str, variable: DeclaredVariable) -> None:
        """Give a variable an offset unless it has one. The owner is a function's name; "" for the module."""
        if self.find(owner, variable) is None:
            offset = round_up(self.size, variable.alignment)
            self.size = offset + variable.size
            self._places[owner, variable] = replace(variable, offset=offset)

    def find(self, owner: str, variable: DeclaredVariable) -> DeclaredVariable | None:
        """Return a variable with its offset; None if it has none."""
        place = self._places.get((owner, variable))
        return self._before.find(owner, variable) if place is None and self._before else place


def _static(function: Function) -> dict[DeclaredVariable, str]:
    """Return the shared variables with a size that a function names, each with its owner."""
    variables = {v for v in variables_of(function) if v.space is Space.SHARED and not v.is_dynamic}
    return {v: "" if v in function.module_shared else function.name for v in sorted(variables, key=lambda v: v.offset)}


def _key(variable: DeclaredVariable, owner: str) -> DeclaredVariable:
    """Return a key for a variable. A module's variable has a different offset in each function, so its offset is 0."""
    return variable if owner else replace(variable, offset=0)


def _place_shared(image: Image) -> Image:
    """Place the shared variables of functions first, at the same offsets for all kernels, then those of each kernel."""
    # Step 1: lay out the variables of all functions.
    shared, sharing = _Shared(), set()
    for function in image.subroutines:
        for variable, owner in _static(function).items():
            shared.add(owner, _key(variable, owner))
            sharing.add(function.name)
    # Step 2: find the functions that use dynamic shared memory. It begins after all variables, and a function needs the
    # same offset for it in all kernels.
    dynamic = [v for f in (*image.functions, *image.subroutines) for v in variables_of(f) if v.is_dynamic]
    alignment = max([1, *(variable.alignment for variable in dynamic)])
    uses_dynamic = {f.name for f in image.subroutines if any(v.is_dynamic for v in variables_of(f))}
    graph = CallGraph(image)
    kernels, common = [], 0
    # Step 3: in kernels that reach a function with shared variables, move the kernel's own variables to the end.
    for kernel in image.functions:
        reached = graph.reached(kernel)
        if sharing & reached:
            try:
                kernel = _with_own_shared(kernel, shared, alignment)
            except ImageRejected as error:
                image.refusals.setdefault(kernel.name, error)
        if uses_dynamic & reached:
            common = max(common, kernel.dynamic_shared_offset)
        kernels.append((kernel, bool(uses_dynamic & reached)))
    # Step 4: let all kernels and functions that use dynamic memory in common use the largest of the offsets.
    return replace(
        image,
        functions=tuple(
            replace(kernel, dynamic_shared_offset=common) if is_dynamic else kernel for kernel, is_dynamic in kernels
        ),
        subroutines=tuple(
            replace(_moved(function, shared), shared_bytes=shared.size, dynamic_shared_offset=common)
            for function in image.subroutines
        ),
    )


def _with_own_shared(kernel: Function, shared: _Shared, alignment: int) -> Function:
    own = _Shared(shared)
    for variable, owner in _static(kernel).items():
        own.add(owner, _key(variable, owner))
    if own.size > MAX_STATIC_SHARED_BYTES:
        reason = f"the kernel and this image's functions need over {MAX_STATIC_SHARED_BYTES} bytes of .shared memory"
        raise rejected(reason, line=kernel.line, kernel=kernel.name)
    kernel = _moved(kernel, own)
    return replace(kernel, shared_bytes=own.size, dynamic_shared_offset=round_up(own.size, alignment))


def _moved(function: Function, shared: _Shared) -> Function:
    moves = {variable: shared.find(owner, _key(variable, owner)) for variable, owner in _static(function).items()}
    return map_variables(function, lambda variable: moves.get(variable) or variable) if moves else function
