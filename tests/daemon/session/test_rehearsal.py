"""The rehearsal of a warm worker before it has a lease."""

import gc
from collections.abc import Iterator

import pytest

from gpulease.daemon.drivers.interface import AdmitModule, ImageRejected, Poll, admit_all, keep_waiting
from gpulease.daemon.ptx.context import CpuContext
from gpulease.daemon.ptx.image import CpuModule
from gpulease.daemon.session.rehearsal import SLICE_BYTES, RehearsalFailed, rehearse
from gpulease.daemon.session.session import Session
from gpulease.protocol.framing import Frame
from gpulease.protocol.operations import Trait, having


class Deaf(CpuContext):
    """A context that loads nothing."""

    def module_load(self, image: bytes, admit: AdmitModule = admit_all) -> CpuModule:
        raise ImageRejected("the driver is too old")


class Forgetful(CpuContext):
    """A context that reads nothing but zeros."""

    def mem_read(self, address: int, into: memoryview, poll: Poll = keep_waiting) -> None:
        into[:] = bytes(len(into))


@pytest.fixture(autouse=True)
def _thaw() -> Iterator[None]:
    yield
    gc.unfreeze()
    gc.collect()
    # As the tests' start left it: no later collection walks through all tests.
    gc.freeze()


@pytest.mark.exhaustive
def test_a_rehearsal_leaves_the_context_as_it_was() -> None:
    context = CpuContext(SLICE_BYTES)
    try:
        rehearse(context)
        assert context.fault() is None
        # Twice, because one that kept its memory or its module would say so.
        rehearse(context)
        context.mem_free(context.mem_alloc(SLICE_BYTES))
    finally:
        context.close()


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("kind", "said"), [(Deaf, "MODULE_LOAD: the driver is too old"), (Forgetful, "result is not what it wrote")]
)
def test_a_context_that_fails_is_reported(kind: type[CpuContext], said: str) -> None:
    context = kind(SLICE_BYTES)
    try:
        with pytest.raises(RehearsalFailed, match=said):
            rehearse(context)
    finally:
        context.close()


def test_a_rehearsal_does_what_every_tenant_asks(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = set()

    def handle(session: Session, frame: Frame) -> bytes | memoryview | None:
        asked.add(frame.op)
        return handled(session, frame)

    handled = Session.handle
    monkeypatch.setattr(Session, "handle", handle)
    context = CpuContext(SLICE_BYTES)
    try:
        rehearse(context)
    finally:
        context.close()
    assert asked == having(Trait.WARMED_UP)
