"""Refusals in the client: one memory load refuses a launch or copy that names an ended region, before it is sent.

The broker writes the words of a session's regions to a page that the client maps (`protocol.session_words`). The page's
epoch is raised after every change, so a launch compares two numbers; only when they differ are the words of its regions
read. The worker checks every launch by itself: a client that does not read the page, or that has an earlier
broker's page, learns of an end from the worker.

The client refuses only the first operation after a wait. Later ones are sent, because the worker may already have
refused an earlier launch, and skipped all after it, also in other regions. Then the worker is asked at once instead of
at the next wait, and its error names the first launch that did not begin.
"""

from collections.abc import Iterable

from gpulease.client.core.operations import RequestPipeline
from gpulease.client.core.region_sets import RegionSet
from gpulease.client.core.regions import RegionView
from gpulease.client.core.waits import MaybePending, Procedure
from gpulease.client.errors import error_of
from gpulease.protocol import Opcode
from gpulease.protocol.codec import build_body
from gpulease.protocol.failures import region_refusal
from gpulease.protocol.fastpath import region_refused_frame
from gpulease.protocol.messages import Ping


class RefusedRegions:
    """Checks one session's regions by the session's words."""

    def __init__(self, operations: RequestPipeline) -> None:
        self._operations = operations
        self._attachment = operations.attachment

    def check_set(self, regions: RegionSet, position: int, kernel: str, operation: str) -> bool:
        """Return whether all regions of a set are active; if not, the launch is to be `confirmed` by the worker.

        Args:
            regions: A set of this session.
            position: The position that the launch states, for the error.
            kernel: The kernel; "" for a graph of several.
            operation: The operation, for the error's text.

        Raises RegionFailed if one has ended or is cancelled, and nothing was sent since the last wait.
        """
        # The epoch is read first: a change after that makes the next launch compare all words.
        epoch = self._attachment.regions_epoch[0]
        if regions.epoch == epoch:
            return True
        # The words have changed since this set was last compared, or it was never compared.
        if self._check(regions.regions, kernel, position, operation):
            regions.epoch = epoch
            return True
        return False

    def check_copy(self, buffer: object, operation: str) -> None:
        """Raise RegionFailed for a copy if `buffer` is a region that has ended, or leave that to the worker."""
        # Other buffers end only with their lease.
        if isinstance(buffer, RegionView):
            self._check((buffer,), "", None, operation)

    def confirmed(self, launched: MaybePending[int], operation: str) -> Procedure[int]:
        """Wait until the worker has taken or refused a launch that was sent; returns the launch's number."""
        number = launched if isinstance(launched, int) else (yield from launched)
        # A PING's reply comes after the launch was taken or refused, and carries the refusal.
        ping = self._operations.ask(Opcode.PING, build_body(Ping(0)), operation=operation, own_requests=(number,))
        yield from self._operations.go_on(operation, ping)
        return number

    def _check(self, regions: Iterable[RegionView], kernel: str, position: int | None, operation: str) -> bool:
        attachment, operations = self._attachment, self._operations
        # Without the page every launch is the worker's to check.
        if attachment.words is None:
            return True
        for view in regions:
            region = view._state
            refusing = attachment.words.refusing_word(region.slot, region.number)
            if refusing is not None:
                break
        else:
            return True
        # Something that was sent is not settled yet, and may have failed before this: the worker must report the first
        # failure, so it gets this launch too.
        if operations.acknowledged_id != attachment.connection.last_request_id:
            return False
        # The worker notifies whoever watches the region. Without room for this, the launch goes to the worker.
        request_id, session_id = attachment.connection.next_request_id(), attachment.session_id
        report = region_refused_frame(
            region.slot, region.number, kernel, position or 0, request_id=request_id, session_id=session_id
        )
        if not operations.put(report):
            return False
        failure = region_refusal(
            region.grant.lease_id,
            *refusing,
            is_repeat=region.is_end_raised,
            kernel=kernel,
            site=0,
            position=position,
        )
        # As if the worker had refused: leaving the block must not raise this failure a second time.
        attachment.last_raised = failure
        region.note_failure(failure)
        raise error_of(failure, operation)
