"""Jobs of many tenants, taken in turns. Pure."""

from collections import Counter, deque
from typing import Generic, TypeVar

Job = TypeVar("Job")


class TenantTurns(Generic[Job]):
    """Queues of jobs, one for each tenant. Tenants with jobs have one each in turn, those of one in their order.

    The number of jobs that a tenant has under way is limited; meanwhile others get its turns.
    """

    def __init__(self, most_at_once: int) -> None:
        """Args: most_at_once: Most jobs of a tenant that are under way at a time."""
        self._most_at_once = most_at_once
        self._queues: dict[str, deque[Job]] = {}
        self._under_way: Counter[str] = Counter()

    def add(self, tenant_id: str, job: Job, *, is_first: bool = False) -> None:
        """Add a job as its tenant's last, or first."""
        queue = self._queues.setdefault(tenant_id, deque())
        queue.appendleft(job) if is_first else queue.append(job)

    def drop(self, tenant_id: str, job: Job) -> None:
        """Take a job out that waits; one that does not wait changes nothing."""
        queue = self._queues.get(tenant_id, deque())
        if job in queue:
            queue.remove(job)
            if not queue:
                del self._queues[tenant_id]

    def take(self) -> Job | None:
        """Return the job that is next, which is under way from now on; None if none may be."""
        for tenant_id, queue in self._queues.items():
            if self._under_way[tenant_id] < self._most_at_once:
                job = queue.popleft()
                # Behind the others, if it has another.
                del self._queues[tenant_id]
                if queue:
                    self._queues[tenant_id] = queue
                self._under_way[tenant_id] += 1
                return job
        return None

    def done(self, tenant_id: str) -> None:
        """Note that a job of the tenant's that was under way is not any more."""
        self._under_way[tenant_id] -= 1
        if not self._under_way[tenant_id]:
            del self._under_way[tenant_id]

    def drain(self) -> list[Job]:
        """Take all jobs out that wait, and return them."""
        jobs = [job for queue in self._queues.values() for job in queue]
        self._queues.clear()
        return jobs
