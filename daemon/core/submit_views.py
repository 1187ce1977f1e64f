"""What can be asked of submits without changing anything."""

from gpulease.daemon.core.book import Book
from gpulease.daemon.core.leases import Lease
from gpulease.daemon.core.submit import SubmitSnapshot, SubmitState


class SubmitViews:
    """Reads the book."""

    def __init__(self, book: Book) -> None:
        self._book = book

    def snapshots(self) -> tuple[SubmitSnapshot, ...]:
        """Every submit that is not proved gone, oldest first."""
        return tuple(submit.snapshot() for submit in self._book.submits.values())

    def of(self, lease_id: int) -> SubmitSnapshot | None:
        """A live lease's submit, None if it has none."""
        lease = self._book.live.get(lease_id)
        submit = None if lease is None else self._book.submits.get(lease.submit_id)
        return None if submit is None else submit.snapshot()

    def in_place_of_session(self, lease_id: int) -> SubmitSnapshot | None:
        """The submit that runs in place of a live lease's session, and is not proved gone; None if there is none."""
        lease = self._book.live.get(lease_id)
        return None if lease is None or not lease.own_submit_bytes else self.of(lease_id)

    def last_of(self, lease_id: int) -> SubmitSnapshot | None:
        """The last submit of a live lease that is proved gone; None if it had none yet."""
        lease = self._book.live.get(lease_id)
        return None if lease is None else lease.last_submit

    def lease_of(self, submit_id: int) -> int:
        """The lease of a submit that is not proved gone; 0 if there is no such submit."""
        submit = self._book.submits.get(submit_id)
        return 0 if submit is None else submit.lease_id

    def may_hold(self, number: int) -> tuple[str, int] | None:
        """On which card an active lease's session, or another process (`Book.card_of`), may hold how much; else None.

        One that starts is not shown with a context yet, and one that ends may be gone already.
        """
        card_uuid = self._book.card_of(number)
        return None if card_uuid is None else (card_uuid, self._book.charge_bytes(number))

    def is_stuck(self, lease: Lease) -> bool:
        """Whether a lease has a submit that can't be proved gone."""
        submit = self._book.submits.get(lease.submit_id)
        return submit is not None and submit.state is SubmitState.FENCED
