"""The specifications of the operations say what the tables beside them say."""

from gpulease.client.engine.operations import ONE_STREAM_FENCES, STREAMS_FENCES
from gpulease.daemon.session.replies import _DRIVER_STATUS
from gpulease.daemon.session.server import _SERVED
from gpulease.daemon.workers.monitors import KNOWN_WAITS
from gpulease.protocol.opcodes import SessionOption, Status
from gpulease.protocol.operations import (
    SESSION_OPCODES,
    SPECS,
    Trait,
    having,
)


def test_traits() -> None:
    assert having(Trait.WAITS_IN_DRIVER) == KNOWN_WAITS
    assert having(Trait.SETTLES) == STREAMS_FENCES
    assert having(Trait.SETTLES) | having(Trait.SETTLES_ALONE) == ONE_STREAM_FENCES


def test_abilities_and_failures() -> None:
    with_values = {SessionOption.REGIONS, SessionOption.OWN_MEMORY}
    told = {spec.ability for spec in SPECS.values()} - {None} - with_values
    assert told == {SessionOption(option.type) for option in _SERVED}
    for op in SESSION_OPCODES:
        assert SPECS[op].driver_failure is _DRIVER_STATUS.get(op, Status.SESSION_FAILED)
