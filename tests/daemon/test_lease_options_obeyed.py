import re
from pathlib import Path

import pytest

from gpulease.protocol.lease_options import KEPT_OPTIONS, WORKER_OPTIONS

DAEMON = Path(__file__).parents[2] / "daemon"
OF_WORKERS = ("session", "workers", "zygote")


@pytest.mark.parametrize("name", KEPT_OPTIONS)
def test_a_lease_option_is_read_where_it_is_obeyed(name: str) -> None:
    folders = OF_WORKERS if name in WORKER_OPTIONS else ("leases", "broker")
    sources = [path.read_text(encoding="utf-8") for folder in folders for path in (DAEMON / folder).rglob("*.py")]
    assert any(re.search(rf"\b(lease|options|spec|terms)\.{name}\b", source) for source in sources)
