"""LLVM IR text compiled to native code in this process, with llvmlite."""

import ctypes
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import cache
from typing import Any, Final

import llvmlite.binding as llvm

# Level 2 takes a third less time than level 3 and vectorises the same loops.
OPTIMISATION_LEVEL = 2

# The name by which IR calls the C library's clock_gettime; no other symbol has it.
CLOCK_GETTIME = "gpulease_clock_gettime"


class BadIr(Exception):
    """LLVM refused the IR: the translator has a bug, whatever the PTX."""


@dataclass(frozen=True, slots=True)
class NativeCode:
    """Compiled code, valid for as long as this object lives."""

    engine: Any

    def address(self, name: str) -> int:
        return int(self.engine.get_function_address(name))


@cache
def initialise() -> None:
    """Prepare LLVM for this machine. Starts no thread, so the process may fork afterwards."""
    # Set the options before the targets, because LLVM reads them when it is set up.
    llvm.set_option("gpulease", _REVISITS_CHANGES)
    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    # Generated code calls a few functions of the C library. They are bound by names that only our IR uses.
    libc = ctypes.CDLL(None)
    bind_symbol(CLOCK_GETTIME, libc.clock_gettime)
    for name in ("memcmp", "memcpy", "memmove", "memset"):
        bind_symbol(f"gpulease_{name}", getattr(libc, name))


class Effort(Enum):
    """How much the compiler optimises.

    FULL: all passes of OPTIMISATION_LEVEL.
    FEW: turns stack slots into values and simplifies, in half the time. For code that consists of vectors, in which no
    loops are left for LLVM to vectorise.
    SOME: as FEW, but inlines nothing. For long code, for which it takes little more than linear time.
    FIRST: as FEW, but combines no instructions and selects them plainly: a tenth of FULL's time, a third of FEW's. For
        code that may run only a few times.
    LEAST: takes time linear in the code's size; the code is not hopelessly slow.
    """

    FULL = "full"
    FEW = "few"
    SOME = "some"
    FIRST = "first"
    LEAST = "least"


# LLVM revisits a function of over 10,000 blocks only where it has changed something, but smaller ones as a whole,
# which takes time in the square of their blocks. With 0 all are treated like the large ones; the code is the same.
_REVISITS_CHANGES: Final = "-cgpp-huge-func=0"

# Passes in addition to those that LLVM itself runs at an effort's level.
_SIMPLIFIES: Final = ("sroa", "instruction_combine", "simplify_cfg", "dead_code_elimination")

# The translator gives each register a slot in memory, and inlining notes for every access which other accesses it can't
# overlap. So slots become values first: otherwise these notes would take most of the time of all passes.
_INLINES: Final = ("sroa", "always_inliner")
_PASSES: Final[Mapping[Effort, Sequence[str]]] = {
    Effort.FULL: (),
    Effort.FEW: (*_INLINES, *_SIMPLIFIES),
    Effort.SOME: _SIMPLIFIES,
    Effort.FIRST: (*_INLINES, "sroa", "simplify_cfg"),
    Effort.LEAST: ("sroa",),
}


def emit_object(text: str, effort: Effort = Effort.FULL) -> bytes:
    """Compile IR to object code, which calls by name and holds no address of this process. Raises BadIr."""
    initialise()
    try:
        # Use a separate context, because LLVM's global context keeps every constant that it has seen.
        module = llvm.parse_assembly(text, llvm.create_context())
        module.verify()
    except RuntimeError as error:
        raise BadIr(str(error)) from None
    # The target's level determines the selection of instructions, and the passes everything before that.
    level = 0 if effort in (Effort.LEAST, Effort.FIRST) else OPTIMISATION_LEVEL
    machine = _target_machine(level)
    builder = llvm.create_pass_builder(machine, llvm.create_pipeline_tuning_options(speed_level=level))
    # FULL uses LLVM's own pipeline. The other efforts name each pass.
    passes = builder.getModulePassManager() if effort is Effort.FULL else llvm.create_new_module_pass_manager()
    for name in _PASSES[effort]:
        getattr(passes, f"add_{name}_pass")()
    passes.run(module, builder)
    data: bytes = machine.emit_object(module)
    return data


def load_object(data: bytes) -> NativeCode:
    """Link object code, after which it can be called. All symbols that it names must be bound (`bind_symbol`)."""
    initialise()
    # The engine owns the memory of the code. Its module is empty, because the code is added as an object file.
    engine = llvm.create_mcjit_compiler(llvm.parse_assembly(""), _target_machine(OPTIMISATION_LEVEL))
    engine.add_object_file(llvm.ObjectFileRef.from_data(data))
    # This resolves the relocations, so from now on the code can be called.
    engine.finalize_object()
    return NativeCode(engine)


def target_identity() -> str:
    """Return LLVM's version, the target and the processor.

    Code with another identity may not run here, or may differ.
    """
    return f"{llvm.llvm_version_info} {llvm.get_default_triple()} {_host()}"


def _target_machine(level: int) -> Any:
    cpu, features = _host()
    return llvm.Target.from_default_triple().create_target_machine(cpu=cpu, features=features, opt=level)


@cache
def _host() -> tuple[str, str]:
    return llvm.get_host_cpu_name(), llvm.get_host_cpu_features().flatten()


def bind_symbol(name: str, function: Any) -> None:
    """Let IR call a C function, or code at an address, by this name."""
    if isinstance(function, int):
        function = ctypes.c_void_p(function)
    address = ctypes.cast(function, ctypes.c_void_p).value
    llvm.add_symbol(name, address)
