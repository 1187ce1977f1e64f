"""Classes of `fast_dataclass` do what the standard library's do."""

import copy
import dataclasses
import inspect
import math
import pickle
from collections.abc import Callable
from dataclasses import FrozenInstanceError, field
from functools import partial
from typing import Any, Generic, TypeVar

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpulease.protocol.fast_dataclass import dataclass, replace

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Nothing:
    """No field."""


@dataclass(frozen=True, slots=True)
class One:
    """One field."""

    only: Any


@dataclass(frozen=True, slots=True)
class Many:
    """Every kind of field."""

    first: int
    second: str = "two"
    made: list[int] = field(default_factory=list)
    hidden: int = field(default=0, repr=False)
    ignored: int = field(default=0, compare=False)
    unhashed: Any = field(default=0, hash=False)
    named: int = field(default=7, kw_only=True)


@dataclass(frozen=True, slots=True)
class Checked:
    """One that checks itself, and has methods of its own."""

    number: int

    def __post_init__(self) -> None:
        if self.number < 0:
            raise ValueError("negative")

    def __repr__(self) -> str:
        return "own"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Checked) and self.number % 10 == other.number % 10

    def __hash__(self) -> int:
        return self.number % 10


@dataclass(frozen=True, slots=True, kw_only=True)
class Named:
    """Parameters by name."""

    left: int
    right: int = 1


@dataclasses.dataclass(frozen=True, slots=True)
class StandardNothing:
    """No field."""


@dataclasses.dataclass(frozen=True, slots=True)
class StandardOne:
    """One field."""

    only: Any


@dataclasses.dataclass(frozen=True, slots=True)
class StandardMany:
    """Every kind of field."""

    first: int
    second: str = "two"
    made: list[int] = field(default_factory=list)
    hidden: int = field(default=0, repr=False)
    ignored: int = field(default=0, compare=False)
    unhashed: Any = field(default=0, hash=False)
    named: int = field(default=7, kw_only=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class Base:
    """Fields that a class below inherits."""

    left: int = 1
    right: int = 2


@dataclass(frozen=True, slots=True)
class Derived(Base):
    """Inherited fields, and some of its own before them."""

    own: int = 3
    more: int = 4


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class StandardBase:
    """Fields that a class below inherits."""

    left: int = 1
    right: int = 2


@dataclasses.dataclass(frozen=True, slots=True)
class StandardDerived(StandardBase):
    """Inherited fields, and some of its own before them."""

    own: int = 3
    more: int = 4


@dataclass(slots=True)
class Changeable:
    first: int
    second: list[int] = field(default_factory=list)
    ignored: int = field(default=0, compare=False)


@dataclasses.dataclass(slots=True)
class StandardChangeable:
    first: int
    second: list[int] = field(default_factory=list)
    ignored: int = field(default=0, compare=False)


@dataclass(slots=True)
class FurtherChangeable(Changeable):
    own: int = 1


@dataclass(slots=True, eq=False)
class OneOfItsKind:
    number: int


@dataclass(frozen=True, slots=True, eq=False)
class FrozenOneOfItsKind:
    number: int


@dataclasses.dataclass(slots=True, eq=False)
class StandardOneOfItsKind:
    number: int


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class StandardFrozenOneOfItsKind:
    number: int


@dataclass(frozen=True, slots=True)
class Holder(Generic[T]):
    first: T
    second: T
    third: T


@dataclass(slots=True)
class HashedByItself:
    number: int

    def __hash__(self) -> int:
        return 7


Pair = tuple[Callable[..., Any], Callable[..., Any]]
PAIRS: list[Pair] = [(Nothing, StandardNothing), (One, StandardOne), (Many, StandardMany)]
IN_PAIRS = pytest.mark.parametrize(
    ("ours", "theirs"), [*PAIRS, (Derived, StandardDerived)], ids=["none", "one", "many", "derived"]
)
NOT_FROZEN_OR_COMPARED: list[Pair] = [
    (Changeable, StandardChangeable),
    (OneOfItsKind, StandardOneOfItsKind),
    (FrozenOneOfItsKind, StandardFrozenOneOfItsKind),
]


def outcome(act: Callable[[], Any]) -> Any:
    """What it returns or the error it raises, without the class's prefix."""
    try:
        found = act()
    except (TypeError, FrozenInstanceError) as error:
        found = (type(error), str(error))
    return str(found).replace("Standard", "")


@IN_PAIRS
@given(
    arguments=st.lists(st.integers(0, 2), max_size=3),
    named=st.dictionaries(st.sampled_from(["named", "made"]), st.just(3)),
)
def test_calls_give_the_same_instance_or_error(
    ours: Any, theirs: Any, arguments: list[int], named: dict[str, int]
) -> None:
    assert outcome(lambda: ours(*arguments, **named)) == outcome(lambda: theirs(*arguments, **named))


@IN_PAIRS
def test_signature_fields_and_patterns(ours: Any, theirs: Any) -> None:
    ours_takes, theirs_takes = (
        [(item.name, item.kind, item.annotation) for item in inspect.signature(kind).parameters.values()]
        for kind in (ours, theirs)
    )
    assert ours_takes == theirs_takes
    assert outcome(lambda: dataclasses.fields(ours)) == outcome(lambda: dataclasses.fields(theirs))
    assert ours.__match_args__ == theirs.__match_args__
    assert repr(ours.__dataclass_params__) == repr(theirs.__dataclass_params__)
    assert ours.__slots__ == theirs.__slots__


values = st.sampled_from([0, 1, math.nan, "1", ()])
many = st.tuples(values, values, st.just([1]), values, values, values)


@given(many, many)
def test_equality(first: tuple[Any, ...], second: tuple[Any, ...]) -> None:
    for (ours, theirs), count in zip(PAIRS, (0, 1, len(first)), strict=True):
        one, other = first[:count], second[:count]
        assert (ours(*one) == ours(*other)) is (theirs(*one) == theirs(*other))
        assert ours(*one) != theirs(*one)


def test_hashes_are_those_of_the_compared_fields() -> None:
    assert hash(One("a")) == hash(StandardOne("a"))
    assert hash(Nothing()) == hash(StandardNothing())
    assert outcome(lambda: hash(Many(1))) == outcome(lambda: hash(StandardMany(1)))


@IN_PAIRS
def test_an_instance_can_not_be_changed(ours: Any, theirs: Any) -> None:
    item, like = (kind(*kind.__match_args__[:1]) for kind in (ours, theirs))
    for name in ours.__match_args__:
        assert outcome(partial(setattr, item, name, 1)) == outcome(partial(setattr, like, name, 1))
        assert outcome(partial(delattr, item, name)) == outcome(partial(delattr, like, name))
    with pytest.raises(FrozenInstanceError):
        item.new = 1
    assert repr(item) == repr(like).replace("Standard", "")


@pytest.mark.parametrize(("ours", "theirs"), NOT_FROZEN_OR_COMPARED)
def test_classes_that_are_not_frozen_or_not_compared(ours: Any, theirs: Any) -> None:
    for kind in (ours, theirs):
        kind.item, kind.other = kind(1), kind(1)
    assert (ours.item == ours.other) is (theirs.item == theirs.other)
    assert ours.item == ours.item
    assert outcome(lambda: hash(ours.item) == hash(ours.other)) == outcome(
        lambda: hash(theirs.item) == hash(theirs.other)
    )
    for name in ours.__match_args__:
        assert outcome(partial(setattr, ours.item, name, 2)) == outcome(partial(setattr, theirs.item, name, 2))
    with pytest.raises((AttributeError, FrozenInstanceError)):
        ours.item.new = 1
    assert repr(ours.item) == repr(theirs.item).replace("Standard", "")
    assert repr(copy.deepcopy(ours.item)) == repr(pickle.loads(pickle.dumps(ours.item))) == repr(ours.item)
    assert repr(ours.__dataclass_params__) == repr(theirs.__dataclass_params__)
    assert list(inspect.signature(ours).parameters) == list(inspect.signature(theirs).parameters)


def test_a_class_that_is_not_frozen_has_the_hash_that_it_defines_and_can_be_derived_from() -> None:
    assert hash(HashedByItself(1)) == 7
    further = FurtherChangeable(1, own=2)
    further.second.append(3)
    assert further == FurtherChangeable(1, [3], 5, 2)
    assert further != Changeable(1, [3])
    with pytest.raises(TypeError, match="frozen"):

        @dataclass(slots=True)
        class _NotFrozen(One):  # type: ignore[misc]
            number: int


def test_a_generic_class_has_its_parameters() -> None:
    assert Holder[int](1, 2, third=3) == Holder(1, 2, 3)


def test_a_copy_is_equal_and_replaced_fields_differ() -> None:
    item = Many(1, made=[2], named=3)
    assert copy.deepcopy(item) == item
    assert copy.deepcopy(item).made is not item.made
    assert pickle.loads(pickle.dumps(item)) == item
    assert dataclasses.replace(item, first=5) == Many(5, made=[2], named=3)
    assert Many(1).made is not Many(1).made
    derived = Derived(5, right=6)
    assert pickle.loads(pickle.dumps(derived)) == copy.copy(derived) == derived
    assert dataclasses.replace(derived, left=7) == Derived(5, left=7, right=6)


def test_a_class_keeps_methods_of_its_own() -> None:
    with pytest.raises(ValueError, match="negative"):
        Checked(-1)
    assert (repr(Checked(1)), Checked(1) == Checked(11), hash(Checked(13))) == ("own", True, 3)


def test_parameters_by_name_alone() -> None:
    assert Named(left=2) == Named(left=2, right=1)
    assert str(inspect.signature(Named)) == "(*, left: int, right: int = 1) -> None"
    with pytest.raises(TypeError, match="positional"):
        Named(1)  # type: ignore[call-arg]


def test_what_it_can_not_do_is_refused() -> None:
    with pytest.raises(TypeError, match=r"dataclasses\.dataclass"):
        dataclass(frozen=True, slots=False)
    with pytest.raises(TypeError, match="not parameters"):

        @dataclass(frozen=True, slots=True)
        class _Hidden:
            number: int = field(default=0, init=False)


def test_a_copy_has_the_other_values() -> None:
    many = Many(1, made=[2], hidden=3, ignored=4, unhashed=5, named=6)
    for changes in ({}, {"second": "other"}, {"first": 9, "named": 8}):
        copied = replace(many, **changes)
        assert copied == dataclasses.replace(many, **changes)
        assert (type(copied), copied.ignored, copied.made) == (Many, 4, [2])
    with pytest.raises(FrozenInstanceError):
        replace(many).first = 1  # type: ignore[misc]
    with pytest.raises(TypeError, match="third must be a field of Many"):
        replace(many, third=3)  # type: ignore[call-arg]
    with pytest.raises(ValueError, match="negative"):
        replace(Checked(1), number=-1)
    assert replace(Nothing()) == Nothing()
