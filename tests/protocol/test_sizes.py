import pytest

from gpulease.protocol.sizes import parse_size


@pytest.mark.parametrize(
    ("text", "size_bytes"),
    [
        ("1", 1),
        ("1073741824", 1 << 30),
        ("6GiB", 6 << 30),
        ("6 GiB", 6 << 30),
        ("6g", 6 << 30),
        ("6GB", 6 << 30),
        (" 512M ", 512 << 20),
        ("1.5K", 1536),
        ("2TiB", 2 << 40),
        ("7B", 7),
    ],
)
def test_sizes(text: str, size_bytes: int) -> None:
    assert parse_size(text) == size_bytes


@pytest.mark.parametrize(
    "text", ["", "GiB", "-1", "6 GiBs", "1e9", "0", "0.1B", "six", "6P", "6.GiB", "0x10", "9" * 400, "1" * 19]
)
def test_what_is_no_size(text: str) -> None:
    with pytest.raises(ValueError, match="is not a size"):
        parse_size(text)
