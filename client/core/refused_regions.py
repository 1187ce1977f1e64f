"""Refuses launches and copies that name an ended region, before they are sent.

The broker writes the words of a session's regions to a page that the client maps (`protocol.session_words`). The page's
epoch is raised after every change, so a launch compares two numbers, and reads the words of its regions only if they
differ. The worker checks every launch itself: so a client that does not read the page, or has the page of an earlier
broker, gets the error from the worker.

The client refuses only the first operation after a wait. It sends later ones, because the worker may already have
refused an earlier launch, and skipped all after it, including those in other regions. In that case the client queries
the worker at once instead of at the next wait, and the worker's error names the first launch that it refused.
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
    """Checks a session's regions, using the session's words in shared memory."""

    def __init__(self, operations: RequestPipeline) -> None:
        self._operations = operations
        self._attachment = operations.attachment

    def check_set(self, regions: RegionSet, position: int, kernel: str, operation: str) -> bool:
        """Return whether all regions of a set are active. If not, send the launch and wait with `confirmed`.

        Args:
            regions: A set of this session.
            position: The number that the program passed with the launch, for the error.
            kernel: The kernel; "" for a graph of several.
            operation: The operation, for the error's text.

        Raises RegionFailed if one has ended or is cancelled, and nothing was sent since the last wait.
        """
        # Read the epoch first: if it changes later, the next launch compares all words.
        epoch = self._attachment.regions_epoch[0]
        if regions.epoch == epoch:
            return True
        # The words have changed since this set was last compared, or it was never compared.
        if self._check(regions.regions, kernel, position, operation):
            regions.epoch = epoch
            return True
        return False

    def check_copy(self, buffer: object, operation: str) -> None:
        """Raise RegionFailed for a copy if `buffer` is a region that has ended, unless the worker must report it."""
        # Other buffers end only with their lease.
        if isinstance(buffer, RegionView):
            self._check((buffer,), "", None, operation)

    def confirmed(self, launched: MaybePending[int], operation: str) -> Procedure[int]:
        """Wait until the worker has accepted or refused a launch that was sent; returns the launch's number."""
        number = launched if isinstance(launched, int) else (yield from launched)
        # A PING's reply comes after the launch was accepted or refused, and contains the refusal.
        ping = self._operations.ask(Opcode.PING, build_body(Ping(0)), operation=operation, own_requests=(number,))
        yield from self._operations.go_on(operation, ping)
        return number

    def _check(self, regions: Iterable[RegionView], kernel: str, position: int | None, operation: str) -> bool:
        attachment, operations = self._attachment, self._operations
        # Without the page, only the worker can check.
        if attachment.words is None:
            return True
        for view in regions:
            region = view._state
            refusing = attachment.words.refusing_word(region.slot, region.number)
            if refusing is not None:
                break
        else:
            return True
        # If an earlier request is not acknowledged yet, it may have failed. The worker must report the first failure,
        # so let it refuse this launch, too.
        if operations.acknowledged_id != attachment.connection.last_request_id:
            return False
        # Report the refusal to the worker, which notifies the region's subscribers. If the channel has no room for the
        # report, let the worker refuse the launch.
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
        # Record it as if the worker had refused, so that leaving the `with` block does not raise it a second time.
        attachment.last_raised = failure
        region.note_failure(failure)
        raise error_of(failure, operation)
