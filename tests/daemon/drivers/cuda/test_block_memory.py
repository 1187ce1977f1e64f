"""Which launches make a function opt in to more shared memory, and which are refused."""

import pytest

from gpulease.daemon.drivers.cuda.launch_code import DEFAULT_SHARED_BYTES, DynamicSharedMemory
from gpulease.daemon.drivers.interface import LaunchRejected

CARD = 232448
OWN = 1024


class Function:
    """A function that counts what it was let have."""

    def __init__(self, *, agrees: bool = True) -> None:
        self.let: list[int] = []
        self._agrees = agrees

    def opt_in(self, size_bytes: int) -> bool:
        self.let.append(size_bytes)
        return self._agrees


def shared_by(function: Function, card_bytes: int = CARD) -> DynamicSharedMemory:
    return DynamicSharedMemory(OWN, card_bytes, function.opt_in)


def test_up_to_the_default_nothing_is_asked_of_the_driver() -> None:
    function = Function()
    shared = shared_by(function)
    for size_bytes in (0, DEFAULT_SHARED_BYTES - OWN):
        shared.allow("k", size_bytes)
    assert function.let == []


def test_a_function_opts_in_once_to_all_it_can_have() -> None:
    function = Function()
    shared = shared_by(function)
    for size_bytes in (DEFAULT_SHARED_BYTES - OWN + 1, CARD - OWN, 0, CARD - OWN):
        shared.allow("k", size_bytes)
    assert function.let == [CARD - OWN]


def test_a_byte_more_than_the_card_has_is_refused_before_the_driver_is_asked() -> None:
    function = Function()
    with pytest.raises(LaunchRejected, match=f"kernel k: {CARD - OWN + 1} bytes .* {OWN} .* {CARD} "):
        shared_by(function).allow("k", CARD - OWN + 1)
    assert function.let == []


def test_a_card_that_offers_no_more_than_the_default() -> None:
    function = Function()
    shared = shared_by(function, card_bytes=0)
    shared.allow("k", DEFAULT_SHARED_BYTES - OWN)
    with pytest.raises(LaunchRejected, match=f"the {DEFAULT_SHARED_BYTES} "):
        shared.allow("k", DEFAULT_SHARED_BYTES - OWN + 1)
    assert function.let == []


def test_what_the_driver_refuses_is_asked_again_at_the_next_launch() -> None:
    function = Function(agrees=False)
    shared = shared_by(function)
    for _ in range(2):
        shared.allow("k", CARD - OWN)
    assert function.let == [CARD - OWN] * 2
