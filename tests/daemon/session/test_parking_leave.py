"""A session that came from another process leaves again only once it was whole."""

import os
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from gpulease.daemon.contract.control_page import sealed_memory
from gpulease.daemon.contract.messages import LeaveOrder, ReturnFailedReport, ReturnOrder
from gpulease.daemon.drivers.interface import OutOfMemory, PageMove
from gpulease.daemon.host.copy_ring import CopyRing
from gpulease.daemon.session.image import CantLeave, SessionParts
from gpulease.daemon.session.operations import LeaseOver
from gpulease.daemon.session.parking import SessionParking


class Card:
    is_full = True
    is_over = False

    def adopt_parked(
        self, state: bytes, host: memoryview, pages: Sequence[int] = (), ring: CopyRing | None = None
    ) -> None: ...

    def unpark(self, poll: Any) -> PageMove:
        if self.is_over:
            raise LeaseOver
        if self.is_full:
            raise OutOfMemory("the card is full")
        return PageMove(0, 0, 0)

    def forget_ahead(self) -> None: ...


def test_a_session_whose_return_failed_keeps_what_it_came_with() -> None:
    resources: Any = SimpleNamespace(
        context=Card(),
        counters=[0] * 200,
        is_parked=False,
        is_in_place=False,
        check_lease=None,
        ledger=SimpleNamespace(fixed_bytes=0),
    )
    parking = SessionParking(resources, lambda: False, lambda: False, is_parkable=True)
    image: Any = SimpleNamespace(number=1, context=b"", moved_bytes=0)
    fd = sealed_memory("gpulease-park", 4096)
    made: list[str] = []
    parking.adopt(1, fd, 4096, image, lambda: made.append("graphs"))
    os.close(fd)
    parking.bring_back(ReturnOrder(1))
    assert isinstance(parking.outbox.pop(), ReturnFailedReport)
    # An image from here would lack the graphs and the variables, which are made with the return.
    with pytest.raises(CantLeave, match="must first return to its card"):
        parking.leave(LeaveOrder(1))
    assert not made
    parking.close()


@pytest.mark.parametrize("lent", [[], None])
def test_a_process_that_has_a_part_of_a_session_serves_none_of_it_once_the_lease_has_ended(
    lent: list[int] | None,
) -> None:
    """The lease ends during the return: while lent pages are copied, or while the host memory is."""
    card: Any = Card()
    card.is_over = True
    resources: Any = SimpleNamespace(
        context=card,
        counters=[0] * 200,
        is_parked=False,
        is_in_place=False,
        check_lease=None,
        ledger=SimpleNamespace(fixed_bytes=0),
    )
    parking = SessionParking(resources, lambda: False, lambda: False, is_parkable=True)
    image: Any = SimpleNamespace(number=1, context=b"", moved_bytes=0)
    fd = sealed_memory("gpulease-park", 4096)
    parking.adopt(1, fd, 4096, image, lambda: None, lent)
    os.close(fd)
    parking.bring_back(ReturnOrder(1))
    report = parking.outbox.pop()
    assert isinstance(report, ReturnFailedReport)
    assert (parking.is_misfit, report.is_mismatch) == (lent is not None,) * 2
    parking.close()


def test_a_region_that_opens_or_ends_keeps_the_session_for_the_moment() -> None:
    regions: Any = SimpleNamespace(is_busy=True)
    parts: Any = dict.fromkeys(SessionParts.__dataclass_fields__)
    parts |= {"regions": regions, "ended": SimpleNamespace(has_any=False), "graphs": SimpleNamespace(recorded=list)}
    parts |= {"resources": SimpleNamespace(context=SimpleNamespace(why_stays=str))}
    with pytest.raises(CantLeave, match="opened or ended") as refusal:
        SessionParts(**parts).check()
    assert not refusal.value.is_lasting
    # Its events, and the regions that it has had, may leave with it.
    regions.is_busy = False
    SessionParts(**parts).check()
