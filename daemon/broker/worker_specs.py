"""What a worker is made for, from the effect of the lease table that orders it."""

from gpulease.daemon.contract.worker_spec import WorkerSpec
from gpulease.daemon.leases.events import RestartWorker, SpawnSubmit, SpawnWorker
from gpulease.protocol.lease_options import options_for_worker
from gpulease.protocol.opcodes import Exclusivity


def lease_worker_spec(effect: SpawnWorker | RestartWorker, allowance_bytes: int) -> WorkerSpec:
    """Return the specification with which the worker of a lease's session starts."""
    return WorkerSpec(
        effect.lease_id,
        effect.card_uuid,
        effect.terms.session_bytes,
        is_shared=effect.terms.exclusivity is Exclusivity.SHARED,
        allowance_bytes=allowance_bytes,
        is_parkable=effect.terms.is_parkable,
        **options_for_worker(effect.terms, is_submit=False),
    )


def submit_worker_spec(effect: SpawnSubmit, allowance_bytes: int) -> WorkerSpec:
    """Return the specification with which the worker of a submit starts."""
    return WorkerSpec(
        effect.submit_id,
        effect.card_uuid,
        effect.size_bytes,
        is_shared=False,
        allowance_bytes=allowance_bytes,
        submit_of=effect.lease_id,
        timeout_ms=effect.timeout_ms,
        **options_for_worker(effect.terms, is_submit=True),
    )
