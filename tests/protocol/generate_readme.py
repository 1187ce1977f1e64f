"""Writes tables of `protocol/README.md` and `client/README.md` from the code.

`PYTHONPATH=.dev python -m tests.protocol.generate_readme` writes them.

Each stands between `<!-- name -->` and `<!-- end of name -->`. A test compares.
"""

from pathlib import Path
from typing import Final

from gpulease.protocol.capabilities import ALL_PERMISSIONS, names_of
from gpulease.protocol.connection_states import TRANSITIONS
from gpulease.protocol.lease_options import OPTIONS
from gpulease.protocol.opcodes import SessionOption
from gpulease.protocol.operations import SPECS, OperationSpec, Trait

from .generated_tables import table, with_tables
from .vector_json import VECTORS

SPECIFICATION: Final = VECTORS.parent / "protocol" / "README.md"
GUIDE: Final = VECTORS.parent / "client" / "README.md"

SHOWN_TRAITS: Final = {
    Trait.READ_ONLY: "read-only",
    Trait.OPERATORS: "operators",
    Trait.IN_STREAM: "in a stream",
    Trait.RECORDED: "a node",
}
"""What of an operation's traits a peer must know; the others are the daemon's and the client's own."""


def permission_of(spec: OperationSpec) -> str:
    """Return what a token must permit for an operation, for a cell."""
    if not spec.needs.permissions:
        return "—"
    if spec.needs.permissions == ALL_PERMISSIONS:
        return "any"
    names = names_of(spec.needs.permissions)
    return names[0] if len(names) == 1 else f"{'any' if spec.needs.any_suffices else 'all'} of a session's"


def operation_row(spec: OperationSpec) -> list[str]:
    return [
        f"0x{spec.op:04X}",
        spec.op.name,
        ", ".join(state.name for state in spec.states) or "never",
        "may be" if spec.is_session else "no",
        f"`{spec.request.__name__}`" if spec.states else "—",
        f"`{spec.reply.__name__}`",
        permission_of(spec),
        "—" if spec.ability is None else spec.ability.name,
        ", ".join(text for trait, text in SHOWN_TRAITS.items() if trait in spec.traits) or "—",
        spec.does,
    ]


def guide_tables() -> dict[str, str]:
    """Return the guide's tables by the names of their places."""
    rows = [[f"`.{option.call}`", option.effect] for option in OPTIONS if option.call]
    return {"lease options": table(["method", "effect"], rows)}


def specification_tables() -> dict[str, str]:
    """Return the specification's tables by the names of their places."""
    titles = ["number", "operation", "asked in", "quiet", "request", "reply", "permission", "option", "traits"]
    return {
        "operations": table([*titles, "what it does"], [operation_row(spec) for spec in SPECS.values()]),
        "abilities": table(
            ["type", "option", "operations that it announces"],
            [
                [
                    str(int(option)),
                    option.name,
                    ", ".join(op.name for op, spec in SPECS.items() if spec.ability is option) or "—",
                ]
                for option in SessionOption
            ],
        ),
        "lease options": table(["tag", "length", "value"], [option.row for option in OPTIONS]),
        "states": table(
            ["state", "trigger", "next state"],
            [[state.name, trigger.name, after.name] for (state, trigger), after in TRANSITIONS.items()],
        ),
    }


TABLES: Final = {SPECIFICATION: specification_tables, GUIDE: guide_tables}
"""The documents, and what makes the tables of each."""


def made(path: Path) -> str:
    """Return a document with its generated tables. Raises ValueError if a table has no place in it."""
    return with_tables(path.read_text(encoding="utf-8"), TABLES[path]())


def main() -> None:
    for path in TABLES:
        path.write_text(made(path), encoding="utf-8")


if __name__ == "__main__":
    main()
