"""LLVM IR text to native code in this process, through llvmlite."""

import ctypes
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import cache
from typing import Any, Final

import llvmlite.binding as llvm

# 2 takes a third less time than 3 and vectorises the same loops.
OPTIMISATION_LEVEL = 2


# The C library's clock, under a name that nothing else has.
CLOCK_GETTIME = "gpulease_clock_gettime"


class BadIr(Exception):
    """LLVM refused the IR: a mistake in the translator, never in the PTX."""


@dataclass(frozen=True, slots=True)
class NativeCode:
    """Compiled code; it stays valid for as long as this object is kept."""

    engine: Any

    def address(self, name: str) -> int:
        """Where a function begins."""
        return int(self.engine.get_function_address(name))


@cache
def initialise() -> None:
    """Make LLVM ready for this machine. Starts no thread, so a process may fork behind it."""
    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    libc = ctypes.CDLL(None)
    bind_symbol(CLOCK_GETTIME, libc.clock_gettime)
    for name in ("memcmp", "memcpy", "memmove", "memset"):
        bind_symbol(f"gpulease_{name}", getattr(libc, name))


class Effort(Enum):
    """How much is done to make code fast.

    `FEW` is for code of vectors, which has no loops left that could be made into vectors: what turns slots into values
    and simplifies, in half the time. `LEAST` is linear in the size, and not hopelessly slow.
    """

    FULL = "full"
    FEW = "few"
    LEAST = "least"


# Beside what LLVM does by itself at the level of an effort.
_PASSES: Final[Mapping[Effort, Sequence[str]]] = {
    Effort.FULL: (),
    Effort.FEW: ("always_inliner", "sroa", "instruction_combine", "simplify_cfg", "dead_code_elimination"),
    Effort.LEAST: ("sroa",),
}


def emit_object(text: str, effort: Effort = Effort.FULL) -> bytes:
    """IR to object code, which names what it calls and holds no address of this process. Raises BadIr."""
    initialise()
    try:
        # Of its own: LLVM's context for all keeps every constant it has seen.
        module = llvm.parse_assembly(text, llvm.create_context())
        module.verify()
    except RuntimeError as error:
        raise BadIr(str(error)) from None
    level = 0 if effort is Effort.LEAST else OPTIMISATION_LEVEL
    machine = _target_machine(level)
    builder = llvm.create_pass_builder(machine, llvm.create_pipeline_tuning_options(speed_level=level))
    passes = builder.getModulePassManager() if effort is Effort.FULL else llvm.create_new_module_pass_manager()
    for name in _PASSES[effort]:
        getattr(passes, f"add_{name}_pass")()
    passes.run(module, builder)
    data: bytes = machine.emit_object(module)
    return data


def load_object(data: bytes) -> NativeCode:
    """Object code to code that can be called; what it names must have been bound."""
    initialise()
    engine = llvm.create_mcjit_compiler(llvm.parse_assembly(""), _target_machine(OPTIMISATION_LEVEL))
    engine.add_object_file(llvm.ObjectFileRef.from_data(data))
    engine.finalize_object()
    return NativeCode(engine)


def target_identity() -> str:
    """What code is made by and for: another one's code may not run here, or not be the same."""
    return f"{llvm.llvm_version_info} {llvm.get_default_triple()} {_host()}"


def _target_machine(level: int) -> Any:
    cpu, features = _host()
    return llvm.Target.from_default_triple().create_target_machine(cpu=cpu, features=features, opt=level)


@cache
def _host() -> tuple[str, str]:
    return llvm.get_host_cpu_name(), llvm.get_host_cpu_features().flatten()


def bind_symbol(name: str, function: Any) -> None:
    """Let IR call a C function, or code at an address, by a name."""
    if isinstance(function, int):
        function = ctypes.c_void_p(function)
    address = ctypes.cast(function, ctypes.c_void_p).value
    llvm.add_symbol(name, address)
