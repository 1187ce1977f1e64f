"""Writes `vectors/gateway/`: `PYTHONPATH=.dev:tests python -m tests.client.serve.gateway.generate_vectors`.

A test generates the files again and compares them. If a file changes, requests are other operations, and need another
schema id.
"""

import json
from pathlib import Path
from typing import Any

from gpulease.client.serve.gateway.ledger import operation_hash, operation_key, operation_payload

FILE = Path(__file__).parents[4] / "vectors" / "gateway" / "operations.json"

CASES: tuple[tuple[str, str, int, bytes], ...] = (
    ("r", "m", 1, b""),
    ("order-17", "affine", 4096, bytes(range(256))),
    ("order-17", "affine", 4097, bytes(range(256))),
    # The same bytes, except where one string ends and the next begins.
    ("ab", "c", 1, b"d"),
    ("a", "bc", 1, b"d"),
    ("a", "b", 1, b"cd"),
    ("größe 日本", "модель", 16 << 20, b"\0\0"),
    ("x" * 200, "y" * 200, 2**64 - 1, b"\xff" * 64),
)


def document() -> str:
    cases = [_case(*case) for case in CASES]
    return json.dumps(cases, indent=1, ensure_ascii=False) + "\n"


def _case(request_id: str, model_id: str, output_len: int, input_bytes: bytes) -> dict[str, Any]:
    return {
        "request_id": request_id,
        "model_id": model_id,
        "output_len": hex(output_len),
        "input": input_bytes.hex(),
        "key": operation_key(request_id),
        "payload": operation_payload(request_id, model_id, output_len, input_bytes).hex(),
        "sha256": operation_hash(request_id, model_id, output_len, input_bytes).hex(),
    }


if __name__ == "__main__":
    FILE.parent.mkdir(exist_ok=True)
    FILE.write_text(document(), encoding="utf-8")
