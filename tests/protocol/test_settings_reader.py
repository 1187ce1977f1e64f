"""Settings by their declarations: what is taken, and the sentence about what is not."""

from dataclasses import dataclass
from enum import Enum
from typing import Annotated, Any

import pytest

from gpulease.protocol.settings_reader import (
    MAX_SHOWN_CHARS,
    MAX_WHOLE,
    BadSetting,
    Setting,
    check_bounds,
    declared,
    read_settings,
    read_size,
    read_values,
)


class Order(Enum):
    FIRST = "first"
    LAST = "last"


def read_hex(value: Any) -> bytes:
    return bytes.fromhex(value)


@dataclass(frozen=True, slots=True)
class Inner:
    share: Annotated[float, Setting("Share.", over=0)]
    rate: Annotated[float, Setting("Rate.", least=0.5, most=2)] = 1.0

    def __post_init__(self) -> None:
        check_bounds(self)
        if self.share == self.rate:
            raise ValueError("share and rate must differ")


@dataclass(frozen=True, slots=True)
class Outer:
    size_bytes: Annotated[
        int, Setting("Size.", key="size", what="a size", read=read_size, least=1024, unit="bytes", example='"1KiB"')
    ] = 1024
    count: Annotated[int, Setting("Count.", least=2, or_zero=True)] = 0
    is_on: Annotated[bool, Setting("Switch.")] = False
    order: Annotated[Order, Setting("Order.")] = Order.FIRST
    mode: Annotated[str, Setting("Mode.", choices=("slow", "fast"))] = "slow"
    key: Annotated[bytes | None, Setting("Key.", what="hexadecimal digits", read=read_hex, is_secret=True)] = None
    inner: Annotated[Inner | None, Setting("Inner.")] = None
    made: int = 7


def test_each_value_is_of_its_fields_type() -> None:
    table = {"size": "2KiB", "count": 3, "is_on": True, "order": "last", "mode": "fast", "key": "0a"}
    found = read_settings(Outer, table | {"inner": {"share": 2}})
    assert found == Outer(2048, 3, True, Order.LAST, "fast", b"\n", Inner(2.0))
    assert found.inner is not None
    assert type(found.inner.share) is float
    assert read_settings(Outer, {}) == Outer()
    assert read_values(Outer, {"size": "1KiB"}) == {"size_bytes": 1024}


@pytest.mark.parametrize(
    ("table", "says"),
    [
        ([], "it must be a table, not []"),
        ({"sizes": 1}, "there is no setting sizes; did you mean 'size'?"),
        ({"made": 1}, "there is no setting made; did you mean 'mode'?"),
        ({"size_bytes": 1}, "there is no setting size_bytes; known are size, count, is_on, order, mode, key, inner"),
        ({"size": 5}, "size must be a string, not 5"),
        ({"size": "5"}, "size must be a size of at least 1024 bytes, not '5'"),
        ({"size": "big"}, "size: 'big' is not a size: write a number of bytes, or one with KiB, MiB, GiB or TiB"),
        ({"count": 1}, "count must be a whole number of at least 2, or 0, not 1"),
        ({"count": True}, "count must be a whole number of at least 2, or 0, not True"),
        ({"count": 2.0}, "count must be a whole number of at least 2, or 0, not 2.0"),
        ({"count": MAX_WHOLE + 1}, f"count must be at most {MAX_WHOLE}, not {MAX_WHOLE + 1}"),
        ({"count": 16**5000}, f"count must be at most {MAX_WHOLE}, not a number of thousands of digits"),
        (
            {"count": "x" * 1000},
            f"count must be a whole number of at least 2, or 0, not '{'x' * (MAX_SHOWN_CHARS - 2)}…",
        ),
        ({"is_on": 1}, "is_on must be true or false, not 1"),
        ({"order": "lost"}, "order must be 'first' or 'last', not 'lost'; did you mean 'last'?"),
        ({"order": []}, "order must be 'first' or 'last', not []"),
        ({"mode": "fats"}, "mode must be 'slow' or 'fast', not 'fats'; did you mean 'fast'?"),
        ({"inner": {}}, "inner.share must be given"),
        ({"inner": 1}, "inner must be a table, not 1"),
        ({"inner": {"share": 0}}, "inner.share must be a number above 0, not 0"),
        ({"inner": {"share": 16**5000}}, "inner.share must be a number above 0, not a number of thousands of digits"),
        ({"inner": {"share": float("inf")}}, "inner.share must be a number above 0, not inf"),
        ({"inner": {"share": 1, "rate": float("nan")}}, "inner.rate must be a number from 0.5 to 2, not nan"),
        ({"inner": {"share": 1, "rate": 1}}, "inner: share and rate must differ"),
        ({"inner": {"share": 1, "a b\n": 1}}, "there is no setting inner.'a b\\n'; known are share, rate"),
    ],
)
def test_the_sentence_names_the_setting_and_what_it_must_be(table: Any, says: str) -> None:
    with pytest.raises(BadSetting) as refused:
        read_settings(Outer, table)
    assert str(refused.value) == says


@pytest.mark.parametrize("secret", ["hunter2", 5, ["hunter2"]])
def test_a_secret_is_never_repeated(secret: Any) -> None:
    with pytest.raises(BadSetting, match=r"^key must be hexadecimal digits$"):
        read_settings(Outer, {"key": secret})


def test_an_instance_made_in_a_program_has_the_same_bounds() -> None:
    with pytest.raises(ValueError, match=r"^rate must be a number from 0\.5 to 2, not 3$"):
        Inner(1, 3)


class Unread:
    pass


@pytest.mark.parametrize(
    ("kind", "says"),
    [
        (Annotated[Unread, Setting("It.")], "needs a read function"),
        (Annotated[dict[str, str], Setting("It.")], "needs a read function"),
        (Annotated[Unread, Setting("It.", read=read_hex)], "must say what its value is"),
        (Annotated[int, Setting("")], "must say what it does"),
        (Annotated[int, Setting("It.", key="other")], "a key of its own"),
    ],
)
def test_a_declaration_that_says_too_little_is_an_error(kind: Any, says: str) -> None:
    class Declares:
        other: Annotated[int, Setting("Other.")] = 1
        value: Any = None

    Declares.__annotations__["value"] = kind
    with pytest.raises(TypeError, match=says):
        declared(dataclass(Declares))
