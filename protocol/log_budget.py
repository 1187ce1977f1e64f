"""Limits the log lines that others can cause: allows a burst, then a rate per second, and counts the omitted lines."""


class LogBudget:
    """A token bucket, which starts full. A token is a line, a record or a byte.

    Args:
        at_once: Number of tokens of a full bucket.
        token_ns: Nanoseconds after which one token returns.

    Attributes:
        omitted: Number of refusals since `spend` last allowed one, or since the caller reset this number.
    """

    __slots__ = ("_at_ns", "_full_ns", "_left_ns", "_token_ns", "omitted")

    def __init__(self, at_once: int, token_ns: int) -> None:
        self._token_ns = token_ns
        # Store tokens as the time in which they return, so that all sums are exact.
        self._left_ns = self._full_ns = at_once * token_ns
        self._at_ns = 0
        self.omitted = 0

    def spend(self, now_ns: int, tokens: int = 1) -> int | None:
        """Spend tokens at a monotonic time.

        Returns how many calls were refused since the last that was allowed; None if this one is refused, too.
        """
        # Add the time that has passed, up to a full bucket.
        self._left_ns = min(self._full_ns, self._left_ns + now_ns - self._at_ns)
        self._at_ns = now_ns
        # If there are too few tokens, count the refusal, and keep the tokens for the next call.
        if self._left_ns < tokens * self._token_ns:
            self.omitted += 1
            return None
        # Otherwise return the number of refusals, so that the log line can say how many lines are missing.
        self._left_ns -= tokens * self._token_ns
        omitted, self.omitted = self.omitted, 0
        return omitted
