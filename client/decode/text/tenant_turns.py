"""A queue of many tenants' jobs, from which tenants take turns. Pure: no I/O, no clock."""

from collections import Counter, deque
from typing import Generic, TypeVar

Job = TypeVar("Job")


class TenantTurns(Generic[Job]):
    """Queues of jobs, one for each tenant. Tenants take turns, one job each; a tenant's jobs keep their order.

    The number of a tenant's jobs in progress is limited. A tenant at its limit is skipped.
    """

    def __init__(self, max_concurrent: int) -> None:
        """Begin without jobs. `max_concurrent` limits the number of one tenant's jobs in progress."""
        self._max_concurrent = max_concurrent
        self._queues: dict[str, deque[Job]] = {}
        self._under_way: Counter[str] = Counter()

    def add(self, tenant_id: str, job: Job, *, is_first: bool = False) -> None:
        """Add a job to the end of its tenant's queue, or to its front if `is_first`."""
        queue = self._queues.setdefault(tenant_id, deque())
        queue.appendleft(job) if is_first else queue.append(job)

    def drop(self, tenant_id: str, job: Job) -> None:
        """Remove a waiting job. Does nothing if the job does not wait."""
        queue = self._queues.get(tenant_id, deque())
        if job in queue:
            queue.remove(job)
            if not queue:
                del self._queues[tenant_id]

    def take(self) -> Job | None:
        """Remove and return the next job, which is then in progress; None if no waiting job may begin."""
        # The first tenant below its limit is next.
        for tenant_id, queue in self._queues.items():
            if self._under_way[tenant_id] < self._max_concurrent:
                job = queue.popleft()
                # Move the tenant to the end. A dict keeps its keys in the order of insertion.
                del self._queues[tenant_id]
                if queue:
                    self._queues[tenant_id] = queue
                self._under_way[tenant_id] += 1
                return job
        return None

    def done(self, tenant_id: str) -> None:
        """Record that a job of the tenant has ended."""
        self._under_way[tenant_id] -= 1
        if not self._under_way[tenant_id]:
            del self._under_way[tenant_id]

    def drain(self) -> list[Job]:
        """Remove and return all jobs that wait, tenant by tenant."""
        jobs = [job for queue in self._queues.values() for job in queue]
        self._queues.clear()
        return jobs
