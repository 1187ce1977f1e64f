from collections.abc import Iterator

import pytest

from helpers.service_manager import ServiceManager


@pytest.fixture
def manager() -> Iterator[ServiceManager]:
    manager = ServiceManager()
    try:
        yield manager
    finally:
        manager.discard()
