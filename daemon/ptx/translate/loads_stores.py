"""Loads and stores (PTX ISA sections 9.7.9.8, 9.7.9.9 and 9.7.9.11).

The threads of a block run on one host thread. Other blocks may run on other host threads at the same time. So strong
accesses become atomic accesses of LLVM, with the ordering that PTX gives (section 8.5). `.volatile` accesses become
relaxed atomic accesses that are never removed. Weak accesses become plain ones. A race on a weak load gives an
arbitrary value, but the value is loaded into a register only once. If it is used as an address, the check and the
access use the same register, so an access that is not allowed is impossible. Cache hints do not change results and are
ignored.
"""

from gpulease.daemon.ptx.native.structures import Access
from gpulease.daemon.ptx.parse.syntax import SCALARS, Address, DeclaredVariable, Instruction, Operand, Space, Vector
from gpulease.daemon.ptx.translate.access import MAX_ACCESS_BYTES, checked_access
from gpulease.daemon.ptx.translate.forms import FLOATS, InstructionFamily, Modifiers
from gpulease.daemon.ptx.translate.ir import Value
from gpulease.daemon.ptx.translate.operand_values import OperandTranslator

# A cluster always has one block, so its shared memory is the block's.
_SHARED = ("shared", "shared::cta", "shared::cluster")
_SPACES = ("global", "const", *_SHARED, "local", "param", "param::entry", "param::func")
_STORE_SPACES = ("global", *_SHARED, "local", "param", "param::func")
_TYPES = (*(f"{kind}{bits}" for bits in (8, 16, 32, 64) for kind in "bus"), *FLOATS)
_VECTORS = ("v2", "v4")
_ORDERINGS = {"relaxed": "monotonic"}
_POLICY = SCALARS["b64"]
_SCOPES = ("cta", "cluster", "gpu", "sys")
_LOAD_HINTS = ("ca", "cg", "cs", "lu", "cv")
_STORE_HINTS = ("wb", "cg", "cs", "wt")
_EVICTIONS = tuple(f"L1::{way}" for way in ("evict_normal", "evict_unchanged", "evict_first", "evict_last"))
_EVICTIONS += ("L1::no_allocate",)
_POLICIES = ("L2::cache_hint",)
_PREFETCHES = ("L2::64B", "L2::128B", "L2::256B")

FAMILY = InstructionFamily(
    "Loads and stores",
    "9.7.9",
    scope=_SCOPES,
    evict=_EVICTIONS,
    policy=_POLICIES,
    prefetch=_PREFETCHES,
    vec=_VECTORS,
    type=_TYPES,
)


@FAMILY.form("ld{.weak}{.space}{.hint}{.evict}{.policy}{.prefetch}{.vec}.type", (2, 3), space=_SPACES, hint=_LOAD_HINTS)
@FAMILY.form("ld.space{.hint}.nc{.evict}{.policy}{.prefetch}{.vec}.type", (2, 3), space=("global",), hint=_LOAD_HINTS)
@FAMILY.form("ld.volatile{.space}{.vec}.type", 2, space=_SPACES)
@FAMILY.form(
    "ld.order.scope{.space}{.evict}{.policy}{.prefetch}{.vec}.type",
    (2, 3),
    order=("relaxed", "acquire"),
    space=("global", *_SHARED),
)
def load(t: OperandTranslator, i: Instruction, m: Modifiers) -> None:
    """Load. If a register is wider than the type, the value is extended."""
    scalar, space = m.scalar(), _space(m)
    check_policy(t, i, m, 2)
    into = elements(t, m, i.operands[0])
    kind = f"i{scalar.bits}"

    # Load each element separately. The access is checked as a whole, because its size is a power of two.
    def make(pointer: Value) -> list[Value]:
        places = [t.ir.offset(pointer, number * scalar.size) for number in range(len(into))]
        return [t.ir.value(kind, f"load{_how(m)} {kind}, {place}{_order(m)}, align {scalar.size}") for place in places]

    values = checked_access(t, i.operands[1], space, (scalar.size * len(into), Access.LOAD), make)
    for element, value in zip(into, values, strict=True):
        t.write_wide(element, scalar, t.from_bits(value, scalar))


@FAMILY.form(
    "st{.weak}{.space}{.hint}{.evict}{.policy}{.vec}.type",
    (2, 3),
    writes=False,
    space=_STORE_SPACES,
    hint=_STORE_HINTS,
)
@FAMILY.form("st.volatile{.space}{.vec}.type", 2, writes=False, space=_STORE_SPACES)
@FAMILY.form(
    "st.order.scope{.space}{.evict}{.policy}{.vec}.type",
    (2, 3),
    writes=False,
    order=("relaxed", "release"),
    space=("global", *_SHARED),
)
def store(t: OperandTranslator, i: Instruction, m: Modifiers) -> None:
    """Store. If a register is wider than the type, its low bits are stored."""
    scalar, space = m.scalar(), _space(m)
    _refuse_constant(t, i.operands[0], space)
    check_policy(t, i, m, 2)
    values = [t.to_bits(t.read_wide(source, scalar), scalar) for source in elements(t, m, i.operands[1])]

    def make(pointer: Value) -> list[Value]:
        for number, value in enumerate(values):
            place = t.ir.offset(pointer, number * scalar.size)
            t.ir.emit(f"store{_how(m)} {value}, {place}{_order(m)}, align {scalar.size}")
        return []

    checked_access(t, i.operands[0], space, (scalar.size * len(values), Access.STORE), make)


def check_policy(t: OperandTranslator, i: Instruction, m: Modifiers, count: int) -> None:
    """Check that a cache policy follows `count` operands if and only if there is `.L2::cache_hint`, and ignore it."""
    if (len(i.operands) > count) != ("policy" in m):
        raise t.problem("a cache policy goes with .L2::cache_hint")
    if "policy" in m:
        t.read(i.operands[count], _POLICY)


def _refuse_constant(t: OperandTranslator, operand: Operand, space: Space) -> None:
    """Raise ImageRejected for a store to the parameters of this function (section 5.1.6)."""
    # Use the variable's space, because the instruction has `.param` for several spaces.
    base = operand.base if isinstance(operand, Address) else None
    declared_space = base.space if isinstance(base, DeclaredVariable) else space
    if declared_space is Space.PARAM:
        raise t.problem("a parameter can't be written")


def _space(m: Modifiers) -> Space:
    """Return the space in an instruction; generic if it has none."""
    return Space(m.get("space").split("::")[0] or "generic")


def _how(m: Modifiers) -> str:
    """Return LLVM's keywords for a strong access; "" for a weak one."""
    return " atomic volatile" if _order(m) else ""


def _order(m: Modifiers) -> str:
    """Return LLVM's ordering of an access, with a space before it; "" for a weak access."""
    # LLVM never splits a relaxed atomic access, and never merges it with another one.
    if "volatile" in m or m.get("hint") == "cv":
        return " monotonic"
    order = m.get("order")
    return f" {_ORDERINGS.get(order, order)}" if order else ""


def elements(t: OperandTranslator, m: Modifiers, operand: Operand) -> tuple[Operand, ...]:
    """Return the registers of a scalar or vector access. A scalar may be in braces, as Triton writes it."""
    count = int(m.get("vec")[1:] or 1)
    if count == 1 and not isinstance(operand, Vector):
        return (operand,)
    if not isinstance(operand, Vector) or len(operand.elements) != count:
        raise t.problem(f"expected {count} register{'s' * (count > 1)}")
    if count * m.scalar().size > MAX_ACCESS_BYTES:
        raise t.problem(f"an access of over {MAX_ACCESS_BYTES} bytes")
    return operand.elements
