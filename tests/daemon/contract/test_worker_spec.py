"""A worker's spec, as the zygote and a warm worker receive it."""

import pytest

from gpulease.daemon.contract.worker_spec import WorkerSpec
from gpulease.daemon.host.ipc import channel_pair, receive_message, send_message
from gpulease.daemon.leases.model import FIRST_SUBMIT_ID, FIRST_WARM_ID
from gpulease.protocol import Waiting


@pytest.mark.parametrize(
    ("spec", "lease_id"),
    [
        (WorkerSpec(7, "GPU-a", 1, is_shared=False), 7),
        (WorkerSpec(FIRST_SUBMIT_ID, "GPU-a", 1, is_shared=False, submit_of=7), 7),
        (WorkerSpec(FIRST_WARM_ID, "GPU-a", 0, is_shared=False), 0),
    ],
)
def test_whose_lease_it_is_there_for(spec: WorkerSpec, lease_id: int) -> None:
    assert spec.of_lease == lease_id


@pytest.mark.parametrize("waiting", [None, *Waiting])
def test_a_worker_hears_all_that_was_said(waiting: Waiting | None) -> None:
    spec = WorkerSpec((1 << 128) - 1, "GPU-a", 1 << 36, True, 1 << 20, max_kernel_ms=2500, waiting=waiting)
    ours, theirs = channel_pair()
    with ours, theirs:
        send_message(ours, spec.to_map())
        message, _ = receive_message(theirs)
    assert WorkerSpec.from_map(message) == spec
