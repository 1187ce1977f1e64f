"""One-shot jobs of asyncio: `await lease.submit("infer", image).grid([4]).arg(data).out(4096).launch()`."""

from collections.abc import Callable

from gpulease.client.aio.driver import LoopLock, drive
from gpulease.client.core.lease_request import address_of
from gpulease.client.core.submits import Image, SubmissionBase
from gpulease.client.core.tokens import Grant, token_of
from gpulease.client.core.waits import Procedure


class Submission(SubmissionBase):
    """A one-shot job: a kernel to run outside any session; made by `GpuLease.submit` or `submit_by`."""

    def __init__(self, kernel: str, image: Image, run: "Callable[[SubmissionBase], Procedure[list[bytes]]]") -> None:
        super().__init__(kernel, image)
        self._run = run

    async def launch(self) -> list[bytes]:
        """Run the job and wait for its outputs. The job can be run again.

        Returns:
            The bytes of each `out` and `inout` argument, in order.

        Raises:
            Busy: Another job of the lease is running.
            InvalidRequest: The lease's session was opened, and the lease reserves no memory for jobs alongside it:
                `GpuBuilder().submits(bytes)`.
            LoadFailed: The image did not compile.
            LaunchFailed: The kernel could not be started.
            AllocFailed: The memory that the lease reserves for jobs is too small for the arguments.
            SyncFailed: The kernel failed while it ran; the lease and its session continue.
            TimedOut: It took longer than `timeout_secs`.
            Disconnected: The job was not run, or it is unknown whether it was; the hint says which.

        Cancelling the call ends the job.
        """
        # Do not use `undisturbed`: cancelling closes the job's connection, which ends the job.
        return await drive(self._run(self))


def submit_by(token: bytes | str | Grant, kernel: str, image: Image, address: str | None = None) -> Submission:
    """Describe a job, for one `launch`, on another tenant's lease. The token must permit TASKLET_SUBMIT.

    The job can't access the lease's session.

    Args:
        token: The token.
        kernel: The name of the kernel.
        image: PTX text or a cubin.
        address: The node's address; GPULEASE_ADDRESS or the default socket if None.

    Raises Denied at the launch, naming the check that the token failed.
    """
    server, token_bytes = address_of(address), token_of(token)
    return Submission(kernel, image, lambda submission: submission._run_by(server, token_bytes, LoopLock()))
