import dataclasses
from typing import Any

import pytest

from gpulease.protocol.operations import SPECS

from .encodings import BODY_CLASSES, fields_of


@pytest.mark.parametrize("kind", BODY_CLASSES.values(), ids=BODY_CLASSES)
def test_a_message_is_a_frozen_record_of_known_encodings(kind: Any) -> None:
    assert kind.__dataclass_params__.frozen
    assert "__slots__" in vars(kind)
    assert kind.__doc__
    assert len(fields_of(kind)) == len(dataclasses.fields(kind))


def test_every_message_is_used() -> None:
    used = {body for spec in SPECS.values() for body in (spec.request, spec.reply)}
    assert used == set(BODY_CLASSES.values())
