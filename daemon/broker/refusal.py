"""A request that never gets to the lease table."""

from gpulease.protocol.failures import Failure


class Refusal(Exception):
    """Why a request is refused on the spot.

    Attributes:
        failure: What to answer.
    """

    def __init__(self, failure: Failure) -> None:
        super().__init__(failure.message)
        self.failure = failure
