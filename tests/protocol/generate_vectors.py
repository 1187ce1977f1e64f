"""Writes `vectors/` from the construct definitions: `PYTHONPATH=.dev python -m tests.protocol.generate_vectors`.

A test generates them in memory and compares them, so that a change of the wire format is always noticed. A changed file
is a changed protocol. It needs a new version, unless the format was never released.
"""

from . import vector_conversations, vector_invalid, vector_messages
from .vector_json import VECTORS, dump


def documents() -> dict[str, str]:
    """Return the text of every generated file, by its path inside `vectors/`."""
    files = {
        "frames.json": vector_invalid.frames_document(),
        "invalid.json": vector_invalid.invalid_document(),
    }
    files |= {f"messages/{name}.json": document for name, document in vector_messages.documents().items()}
    files |= {f"conversations/{name}.json": document for name, document in vector_conversations.documents().items()}
    return {path: dump(document) for path, document in files.items()}


def main() -> None:
    for path, text in documents().items():
        target = VECTORS / path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
