"""Bounds the log lines that others can cause: allows a burst, then a rate per second, and counts the omitted lines."""


class LogBudget:
    """A token bucket, which starts full. A token is a line, a record or a byte.

    Args:
        at_once: Tokens of a full bucket.
        token_ns: Nanoseconds in which one token returns.

    Attributes:
        omitted: Refusals since the last admitted spending, or since the caller reset it.
    """

    __slots__ = ("_at_ns", "_full_ns", "_left_ns", "_token_ns", "omitted")

    def __init__(self, at_once: int, token_ns: int) -> None:
        self._token_ns = token_ns
        # Tokens are stored as the time in which they return, so that all sums are exact.
        self._left_ns = self._full_ns = at_once * token_ns
        self._at_ns = 0
        self.omitted = 0

    def spend(self, now_ns: int, tokens: int = 1) -> int | None:
        """Spend tokens at a monotonic time.

        Returns how many spendings were refused since the last admitted one, or None if this one is refused as well.
        """
        # Add the time that has passed, up to a full bucket.
        self._left_ns = min(self._full_ns, self._left_ns + now_ns - self._at_ns)
        self._at_ns = now_ns
        # There are too few tokens: count the refusal, and keep them for the next spending.
        if self._left_ns < tokens * self._token_ns:
            self.omitted += 1
            return None
        # Admit the spending, and return the count of refusals, so that the line can say how many are missing.
        self._left_ns -= tokens * self._token_ns
        omitted, self.omitted = self.omitted, 0
        return omitted
