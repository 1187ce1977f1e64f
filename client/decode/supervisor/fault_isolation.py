"""Finds a request that ends engines: suspects are computed in groups, which are halved with each further loss.

After a fault of the context, the requests with rows in the steps in flight are suspects. They are computed again in
halves: a half that ends an engine is halved again, and a request that ends an engine alone is given up. If a worker was
killed from outside, the only suspects are requests that were at about the same position at the previous kill.
"""

from collections import deque
from collections.abc import Callable, Iterable, Mapping


class FaultIsolation:
    """The suspects, in groups that are computed one after another. Requests have their callers' ids.

    Attributes:
        current: The group that is being computed without other requests; empty if there is none.
    """

    def __init__(self) -> None:
        self.current: tuple[str, ...] = ()
        self._groups: deque[tuple[str, ...]] = deque()
        self._killed_at: Mapping[str, int] = {}

    def __bool__(self) -> bool:
        return bool(self.current or self._groups)

    @property
    def count(self) -> int:
        return len(self.current) + sum(map(len, self._groups))

    def fault(self, under_way: Iterable[str]) -> str:
        """Record a loss that one of the requests with rows in progress may have caused.

        Returns the request to give up: the one that was computed alone. Returns "" if none was.
        """
        current, self.current = self.current, ()
        blamed = list(under_way)
        if current:
            # The guilty request is in this group. Members without rows in the lost steps stay suspects, in a separate
            # group, because they may not have reached the computation that failed.
            innocent = tuple(name for name in current if name not in blamed)
            blamed = [name for name in current if name in blamed]
            if innocent:
                self._groups.append(innocent)
            if len(blamed) == len(current) == 1:
                return blamed[0]
        else:
            # All requests were computed, so all requests with rows are suspects. Earlier suspects stay in their groups.
            suspected = {name for group in self._groups for name in group}
            blamed = [name for name in blamed if name not in suspected]
        # Halve the group. Both halves come before other groups, so that one guilty request is found in log2(n) losses.
        middle = -(-len(blamed) // 2)
        self._groups.extendleft(filter(None, (tuple(blamed[middle:]), tuple(blamed[:middle]))))
        return ""

    def killed(self, tokens: Mapping[str, int], max_tokens: int) -> list[str]:
        """Record a kill from outside, with the tokens emitted so far by each request with rows in progress.

        Returns the requests that were also in progress at the previous kill and have emitted fewer than `max_tokens`
        tokens since. They may be why the host ran out of memory.
        """
        # A request counts as a suspect only if it was near the same position at two kills in a row.
        before, self._killed_at = self._killed_at, dict(tokens)
        return [name for name, count in tokens.items() if name in before and count < before[name] + max_tokens]

    def defer(self, names: Iterable[str]) -> None:
        """Move members of the current group into a separate group behind all other groups."""
        if waiting := tuple(names):
            self.current = tuple(name for name in self.current if name not in waiting)
            self._groups.append(waiting)

    def has_next(self, is_ready: Callable[[str], bool]) -> bool:
        """Return whether any group has a suspect that `is_ready` accepts."""
        return any(is_ready(name) for group in self._groups for name in group)

    def next(self, is_ready: Callable[[str], bool] = bool) -> tuple[str, ...]:
        """Find the first group with ready members, and make these the current group. Returns them, or () for none.

        The group's other members keep its place.
        """
        self.current = ()
        for place, group in enumerate(self._groups):
            if ready := tuple(filter(is_ready, group)):
                del self._groups[place]
                if not_ready := tuple(name for name in group if name not in ready):
                    self._groups.insert(place, not_ready)
                self.current = ready
                break
        return self.current
