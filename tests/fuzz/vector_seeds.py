"""Seeds from the vectors: their frames as bytes."""

import json
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

VECTORS = Path(__file__).parents[2] / "vectors"


@cache
def streams() -> tuple[bytes, ...]:
    """Return every stream of the vectors: single messages, frames, and invalid ones."""
    paths = [*sorted(VECTORS.glob("messages/*.json")), VECTORS / "frames.json", VECTORS / "invalid.json"]
    cases = [case for path in paths for case in _read(path)["cases"]]
    # Leave out streams that are given in parts, because they are as long as their limits.
    return tuple(bytes.fromhex(case["wire"]) for case in cases if isinstance(case["wire"], str))


@cache
def conversations() -> dict[str, tuple[tuple[str, str, bytes], ...]]:
    """Return (connection, sender, frame) of every step, by the conversation's name."""
    return {
        path.stem: tuple(
            (step["connection"], step["from"], bytes.fromhex(step["wire"]))
            for step in _read(path)["steps"]
            if isinstance(step.get("wire"), str)
        )
        for path in sorted(VECTORS.glob("conversations/*.json"))
    }


def said_by(who: str) -> Iterator[bytes]:
    """Yield everything that one side sends on each connection of each conversation."""
    for steps in conversations().values():
        for name in dict.fromkeys(connection for connection, _, _ in steps):
            yield b"".join(wire for connection, side, wire in steps if (connection, side) == (name, who))


def ptx_texts(most_bytes: int) -> list[str]:
    """Return the PTX texts of the vectors with at most that many bytes."""
    paths = sorted((VECTORS / "gpu").glob("*.ptx"))
    return list(dict.fromkeys(path.read_text() for path in paths if path.stat().st_size <= most_bytes))


def _read(path: Path) -> Any:
    return json.loads(path.read_text(encoding="utf-8"))
