"""Submits of the blocking face: `lease.submit("infer", image).grid([4]).arg(data).out(4096).launch()`."""

import threading
from collections.abc import Callable

from gpulease.client.core.lease_request import address_of
from gpulease.client.core.submits import Image, SubmissionBase
from gpulease.client.core.tokens import Grant, token_of
from gpulease.client.core.waits import Procedure
from gpulease.client.sync.driver import drive


class Submission(SubmissionBase):
    """A kernel to run beside a lease's session; made by GpuLease.submit or `submit_by`."""

    def __init__(self, kernel: str, image: Image, run: "Callable[[SubmissionBase], Procedure[list[bytes]]]") -> None:
        super().__init__(kernel, image)
        self._run = run

    def launch(self) -> list[bytes]:
        """Run it, and wait for its outputs. It can be run again.

        Returns:
            The bytes of each `out` and `inout` argument, in their order.

        Raises:
            Busy: Another submit of the lease is under way.
            InvalidRequest: The lease's session was opened, and it keeps no memory for submits beside that:
                `GpuBuilder().submits(bytes)`.
            LoadFailed: The image did not compile.
            LaunchFailed: The kernel could not be started.
            AllocFailed: What the lease keeps for submits is too small for its arguments.
            SyncFailed: The kernel failed while it ran; its lease and the lease's session go on.
            TimedOut: It took longer than `timeout_secs`.
            Disconnected: It is not known whether it ran, or nothing was run, as the hint says.
        """
        return drive(self._run(self))


def submit_by(token: bytes | str | Grant, kernel: str, image: Image, address: str | None = None) -> Submission:
    """Describe a submit on another tenant's lease, by a token of theirs that permits TASKLET_SUBMIT, for one `launch`.

    The submit sees nothing of the lease's session. Raises Denied, at the launch, with the check that the token failed.
    """
    where, shown = address_of(address), token_of(token)
    return Submission(kernel, image, lambda submission: submission._run_by(where, shown, threading.RLock()))
