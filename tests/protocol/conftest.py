import pytest


@pytest.fixture(autouse=True)
def _no_leaks() -> None:
    """Nothing here starts or opens anything, and looking whether it did takes longer than most of these tests."""
