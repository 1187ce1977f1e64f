"""What lists settings says what their declarations say."""

from pathlib import Path

import pytest

from .generate_settings import ROOT, texts


@pytest.mark.parametrize(("path", "text"), texts().items(), ids=[str(path.relative_to(ROOT)) for path in texts()])
def test_it_is_made_from_the_declarations(path: Path, text: str) -> None:
    command = "PYTHONPATH=.dev python -m tests.protocol.generate_settings"
    assert path.read_text(encoding="utf-8") == text, f"write it: {command}"
