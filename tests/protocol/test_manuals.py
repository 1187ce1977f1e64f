"""The manuals' tables of settings, metrics and log events, and the example of settings, say what the code says."""

from pathlib import Path

import pytest

from .generate_manuals import ROOT, texts


@pytest.mark.parametrize(("path", "text"), texts().items(), ids=[str(path.relative_to(ROOT)) for path in texts()])
def test_what_is_made_from_the_code_is_up_to_date(path: Path, text: str) -> None:
    command = "PYTHONPATH=.dev python -m tests.protocol.generate_manuals"
    assert path.read_text(encoding="utf-8") == text, f"write it: {command}"
