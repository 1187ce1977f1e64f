from collections.abc import Iterator

import pytest

from helpers.service_manager import ServiceManager


@pytest.fixture
def manager() -> Iterator[ServiceManager]:
    """What systemd is for a daemon."""
    manager = ServiceManager()
    try:
        yield manager
    finally:
        manager.discard()
