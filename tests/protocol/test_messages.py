import dataclasses
from typing import Any

from gpulease.protocol.operations import SPECS

from .encodings import BODY_CLASSES, fields_of


def test_a_message_is_a_frozen_record_of_known_encodings() -> None:
    kinds: list[Any] = list(BODY_CLASSES.values())
    assert [kind for kind in kinds if not kind.__dataclass_params__.frozen] == []
    assert [kind for kind in kinds if "__slots__" not in vars(kind)] == []
    assert [kind for kind in kinds if not kind.__doc__] == []
    assert [kind for kind in kinds if len(fields_of(kind)) != len(dataclasses.fields(kind))] == []


def test_every_message_is_used() -> None:
    used = {body for spec in SPECS.values() for body in (spec.request, spec.reply)}
    assert used == set(BODY_CLASSES.values())
