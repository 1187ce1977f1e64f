"""A replacement for the standard library's `dataclass` that takes a fifth of the time, for all classes made at a start.

The standard library compiles six functions for each frozen class, which took a fifth of a daemon's start, and three for
any other. This module compiles only the constructor. The others are closures over the fields' names.

A frozen class refuses assignment, so its constructor sets each field by a call of `object.__setattr__`, which takes ten
times as long as an assignment. Therefore a class with many fields has a twin: a class with the same slots that accepts
assignment. The constructor sets the new instance's class to the twin, assigns the fields, and sets the class back.
"""

from collections.abc import Callable
from enum import Enum
from functools import cache
from operator import attrgetter
from types import CodeType, FunctionType
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    # Type checkers support these two, and the effect of the first on a class.
    from dataclasses import dataclass as dataclass
    from dataclasses import replace as replace
else:
    from dataclasses import MISSING, Field, FrozenInstanceError, fields
    from dataclasses import dataclass as _slotted

    C = TypeVar("C", bound=type)

    MIN_FIELDS_FOR_TWIN = 3
    """Minimum number of fields for a twin. With fewer, changing an instance's class twice costs more than it saves."""

    def dataclass(*, slots: bool, frozen: bool = False, kw_only: bool = False, eq: bool = True) -> Callable[[C], C]:
        """Return a decorator for classes with slots.

        Raises TypeError for features that only `dataclasses.dataclass` has.
        """
        if not slots:
            raise TypeError("use dataclasses.dataclass for a class that has no slots")

        def finish(cls: C) -> C:
            # Without a docstring the standard library makes one from a signature, which takes longer than all the rest.
            if not cls.__doc__:
                cls.__doc__ = cls.__name__
            # With these arguments the standard library finds the fields and makes the slots, and compiles nothing. Only
            # a class that derives from a frozen one must be called frozen, which compiles two methods.
            derives = frozen and hasattr(cls, "__dataclass_params__")
            return _finished(
                _slotted(cls, init=False, repr=False, eq=False, frozen=derives, slots=True, kw_only=kw_only),
                frozen=frozen,
                eq=eq,
            )

        return finish

    def replace(instance: Any, /, **changes: Any) -> Any:
        """Copy an instance of one of these classes, with other values for some fields.

        Takes a quarter of the time of the standard library's `replace`. Raises TypeError for a name that is not a
        field's.
        """
        return _copier(type(instance))(instance, changes)

    @cache
    def _copier(cls: type) -> Callable[[Any, dict[str, Any]], Any]:
        """Compile the copying of a class's fields, at its first `replace`."""
        names = [item.name for item in fields(cls)]
        check = "new.__post_init__()" if hasattr(cls, "__post_init__") else ""
        lines = [
            "new = _new(_twin)",
            *(f"new.{name} = old.{name}" for name in names),
            "for name, value in changes.items():",
            " if name not in _names: raise TypeError(f'{name} must be a field of {_cls.__qualname__}')",
            " setattr(new, name, value)",
            "_set_class(new, _cls)",
            check,
            "return new",
        ]
        namespace = {"_new": object.__new__, "_twin": _twin_of(cls), "_cls": cls, "_names": frozenset(names)}
        namespace["_set_class"] = object.__dict__["__class__"].__set__
        exec("def copy(old, changes):\n " + "\n ".join(lines), namespace)
        copier: Callable[[Any, dict[str, Any]], Any] = namespace["copy"]
        return copier

    def _finished(cls: C, *, frozen: bool, eq: bool) -> C:
        class_fields = fields(cls)
        # The compiled constructor does not support fields with init=False.
        if not all(item.init for item in class_fields):
            raise TypeError(f"{cls.__qualname__}: use dataclasses.dataclass for fields that are not parameters")
        # Code that inspects the class needs these attributes, as does the standard library, which requires that a class
        # that derives from a frozen one is frozen, too.
        parameters = cls.__dataclass_params__
        parameters.init = parameters.repr = True
        parameters.eq, parameters.frozen = eq, frozen
        # Step 1: set the methods that every class needs: a constructor and, for a frozen class, methods that refuse
        # assignment.
        cls.__init__ = _constructor(cls, class_fields, frozen=frozen)
        if frozen:
            cls.__setattr__, cls.__delattr__ = _refuse_to_set, _refuse_to_delete
            # Copying and unpickling can't set attributes one by one on a frozen instance.
            cls.__getstate__, cls.__setstate__ = _state_of, _restore
        # Step 2: set the methods that the class does not define itself, from the fields that take part in each.
        own = vars(cls)
        if "__repr__" not in own:
            cls.__repr__ = _representation([item.name for item in class_fields if item.repr])
        if not eq:
            return cls
        compared = _values_of([item.name for item in class_fields if item.compare])
        # A class that defines `__eq__` alone has None there (the language reference, "object.__hash__").
        if own.get("__hash__") is None:
            cls.__hash__ = _hash_of(class_fields) if frozen else None
        if "__eq__" not in own:
            cls.__eq__ = _equality(compared)
        return cls

    def _hash_of(class_fields: tuple[Field[Any], ...]) -> Callable[[Any], int]:
        hashed = _values_of([item.name for item in class_fields if (item.compare if item.hash is None else item.hash)])
        return lambda self: hash(hashed(self))

    def _constructor(cls: type, class_fields: tuple[Field[Any], ...], *, frozen: bool) -> Callable[..., None]:
        # Keyword-only parameters must follow all others, and `sorted` keeps the fields' order otherwise.
        ordered = sorted(class_fields, key=attrgetter("kw_only"))
        by_position = [item for item in ordered if not item.kw_only]
        by_name = ordered[len(by_position) :]
        # Step 1: get the code for a class of this shape.
        has_twin = frozen and len(ordered) >= MIN_FIELDS_FOR_TWIN
        code = _constructor_code(
            len(by_position),
            tuple(item.default_factory is not MISSING for item in ordered),
            setting=_Setting.BY_TWIN if has_twin else _Setting.BY_OBJECT if frozen else _Setting.PLAIN,
            has_check=hasattr(cls, "__post_init__"),
        )
        # Step 2: put the fields' names in the places of its names. They are variables and attributes, or constants that
        # name an attribute.
        own_names = {_place(index): item.name for index, item in enumerate(ordered)}
        code = code.replace(
            co_qualname=f"{cls.__qualname__}.__init__",
            co_varnames=tuple(own_names.get(name, name) for name in code.co_varnames),
            co_names=tuple(own_names.get(name, name) for name in code.co_names),
            co_consts=tuple(own_names.get(value, value) if type(value) is str else value for value in code.co_consts),
        )
        # Step 3: make the function, with the objects to which it refers and its parameters' defaults.
        names: dict[str, Any] = {"_set": object.__setattr__, "_MISSING": MISSING, "__name__": cls.__module__}
        if has_twin:
            names |= {"_twin": _twin_of(cls), "_set_class": object.__dict__["__class__"].__set__}
        defaults: dict[str, Any] = {}
        for index, item in enumerate(ordered):
            if item.default_factory is not MISSING:
                names[f"_make_{index}"] = item.default_factory
                defaults[item.name] = MISSING
            elif item.default is not MISSING:
                defaults[item.name] = item.default
            elif defaults and not item.kw_only:
                raise TypeError(f"non-default argument {item.name!r} follows default argument")
        constructor = FunctionType(code, names)
        constructor.__defaults__ = tuple(defaults[item.name] for item in by_position if item.name in defaults) or None
        constructor.__kwdefaults__ = {item.name: defaults[item.name] for item in by_name if item.name in defaults}
        constructor.__annotations__ = {item.name: item.type for item in class_fields} | {"return": None}
        return constructor

    class _Setting(Enum):
        """How a constructor sets a field: by assignment, with the twin's class, or by `object.__setattr__`."""

        PLAIN = "plain"
        BY_TWIN = "by twin"
        BY_OBJECT = "by object"

    def _place(index: int) -> str:
        return f"_field_{index}"

    @cache
    def _constructor_code(
        by_position: int, is_made: tuple[bool, ...], *, setting: _Setting, has_check: bool
    ) -> CodeType:
        """Compile the constructor of all classes of one shape, with `_place` in the place of each field's name.

        Compiling a separate one for each class would take half of the time that making the class takes.

        Args:
            by_position: The number of parameters that can be passed by position. The others follow them.
            is_made: For each field, whether it has a default factory.
            setting: How fields are set.
            has_check: Whether the class has a `__post_init__`.
        """
        parameters, lines = ["self"], []
        # Frozen instances refuse assignment, so set their fields through `object`, or while their class is the twin.
        assignment = "_set(self, {0!r}, {1})" if setting is _Setting.BY_OBJECT else "self.{0} = {1}"
        for index, makes in enumerate(is_made):
            name = _place(index)
            if index == by_position:
                parameters.append("*")
            parameters.append(name)
            # Call a default factory in the body, once for each instance.
            value = f"_make_{index}() if {name} is _MISSING else {name}" if makes else name
            lines.append(assignment.format(name, value))
        if setting is _Setting.BY_TWIN:
            lines = ["_own = self.__class__", "_set_class(self, _twin)", *lines, "_set_class(self, _own)"]
        if has_check:
            lines.append("self.__post_init__()")
        made: dict[str, Any] = {}
        exec(f"def __init__({', '.join(parameters)}):\n " + "\n ".join(lines or ["pass"]), made)
        code: CodeType = made["__init__"].__code__
        return code

    def _twin_of(cls: type) -> type:
        """Return a class with the instance layout of `cls`, but with instances that accept assignment."""
        own = vars(cls)
        members = {"__slots__": own["__slots__"], "__module__": cls.__module__}
        # Both methods must be the standard ones; otherwise the interpreter calls Python code for each assignment.
        members |= {"__setattr__": object.__setattr__, "__delattr__": object.__delattr__}
        # `__bases__` of a generic class has only plain Generic; `type` also needs its parameters, which are here.
        if "__orig_bases__" in own:
            members["__orig_bases__"] = own["__orig_bases__"]
        return type(cls.__name__, cls.__bases__, members)

    def _values_of(names: list[str]) -> Callable[[Any], tuple[Any, ...]]:
        """Return a function from an instance to a tuple of those attributes."""
        if len(names) > 1:
            return attrgetter(*names)
        if not names:
            return lambda _: ()
        (name,) = names
        return lambda instance: (getattr(instance, name),)

    def _representation(names: list[str]) -> Callable[[Any], str]:
        def represent(self: Any) -> str:
            return f"{type(self).__qualname__}({', '.join(f'{name}={getattr(self, name)!r}' for name in names)})"

        return represent

    def _equality(compared: Callable[[Any], tuple[Any, ...]]) -> Callable[[Any, object], bool]:
        def equal(self: Any, other: object) -> bool:
            # Compare only instances of the same class, as the standard library does: a subclass may have more fields.
            return compared(self) == compared(other) if other.__class__ is self.__class__ else NotImplemented

        return equal

    def _refuse_to_set(self: Any, name: str, value: object) -> None:
        raise FrozenInstanceError(f"cannot assign to field {name!r}")

    def _refuse_to_delete(self: Any, name: str) -> None:
        raise FrozenInstanceError(f"cannot delete field {name!r}")

    def _state_of(self: Any) -> list[Any]:
        return [getattr(self, item.name) for item in fields(self)]

    def _restore(self: Any, state: list[Any]) -> None:
        for item, value in zip(fields(self), state, strict=True):
            object.__setattr__(self, item.name, value)
