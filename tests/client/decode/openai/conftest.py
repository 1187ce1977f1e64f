"""What the decode server's tests share; each file has its own `rig`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

from helpers.decode.openai_rig import OpenAiRig

# Where it is used: every process of a run imports this file, and its import takes half a second.
if TYPE_CHECKING:
    import openai


@pytest.fixture
def client(rig: OpenAiRig) -> Iterator[openai.OpenAI]:
    """OpenAI's own client of the file's server."""
    with rig.client() as asked:
        yield asked
