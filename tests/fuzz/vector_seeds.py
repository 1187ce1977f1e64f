"""Seeds out of the vectors: the frames they hold, as bytes."""

import json
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

VECTORS = Path(__file__).parents[2] / "vectors"


@cache
def streams() -> tuple[bytes, ...]:
    """Every stream of the vectors: single messages, frames, broken ones."""
    paths = [*sorted(VECTORS.glob("messages/*.json")), VECTORS / "frames.json", VECTORS / "invalid.json"]
    cases = [case for path in paths for case in _read(path)["cases"]]
    # Those in parts are as long as their limits.
    return tuple(bytes.fromhex(case["wire"]) for case in cases if isinstance(case["wire"], str))


@cache
def conversations() -> dict[str, tuple[tuple[str, str, bytes], ...]]:
    """(connection, who speaks, the frame) of every step, by the conversation's name."""
    return {
        path.stem: tuple(
            (step["connection"], step["from"], bytes.fromhex(step["wire"]))
            for step in _read(path)["steps"]
            if isinstance(step.get("wire"), str)
        )
        for path in sorted(VECTORS.glob("conversations/*.json"))
    }


def said_by(who: str) -> Iterator[bytes]:
    """What one side says on each connection of each conversation, in one piece."""
    for steps in conversations().values():
        for name in dict.fromkeys(connection for connection, _, _ in steps):
            yield b"".join(wire for connection, side, wire in steps if (connection, side) == (name, who))


def ptx_texts(most_bytes: int) -> list[str]:
    """The PTX of the vectors up to that length."""
    paths = sorted((VECTORS / "gpu").glob("*.ptx"))
    return list(dict.fromkeys(path.read_text() for path in paths if path.stat().st_size <= most_bytes))


def _read(path: Path) -> Any:
    return json.loads(path.read_text(encoding="utf-8"))
