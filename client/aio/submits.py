"""Submits of the asyncio face: `await lease.submit("infer", image).grid([4]).arg(data).out(4096).launch()`."""

import asyncio
from collections.abc import Callable

from gpulease.client.aio.driver import drive
from gpulease.client.core.lease_request import address_of
from gpulease.client.core.submits import Image, SubmissionBase
from gpulease.client.core.tokens import Grant, token_of
from gpulease.client.core.waits import Procedure


class Submission(SubmissionBase):
    """A kernel to run beside a lease's session, like `gpulease.client.Submission`."""

    def __init__(self, kernel: str, image: Image, run: "Callable[[SubmissionBase], Procedure[list[bytes]]]") -> None:
        super().__init__(kernel, image)
        self._run = run

    async def launch(self) -> list[bytes]:
        """Run it, and wait for its outputs, like `gpulease.client.Submission.launch`.

        Cancelling this ends the submit.
        """
        return await drive(self._run(self))


def submit_by(token: bytes | str | Grant, kernel: str, image: Image, address: str | None = None) -> Submission:
    """Describe a submit on another tenant's lease, by a token of theirs, like `gpulease.client.submit_by`."""
    where, shown = address_of(address), token_of(token)
    return Submission(kernel, image, lambda submission: submission._run_by(where, shown, asyncio.Lock()))
