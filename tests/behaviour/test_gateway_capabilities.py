"""The grant with which the gateway submits a request has exactly two permissions, and is checked before any work."""

import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from gpulease.client import (
    Denied,
    GpuExclusivityClass,
    GpuLease,
    GpuLeaseError,
    GpuSession,
    Permission,
    inspect_token,
    my_audience,
)
from gpulease.client.core.tokens import Grant
from gpulease.client.narrowing import attenuate
from gpulease.client.serve.gateway import (
    SUBMISSION,
    CapabilityRefused,
    DaemonEffects,
    NodeAuthority,
    SqliteStore,
    serve_inference_request,
)
from helpers.daemon import Daemon
from helpers.gateway_rig import Gateway
from helpers.gateway_steps import AFFINE, KERNEL, OUTPUT, request


@pytest.fixture
def store(tmp_path: Path) -> Iterator[SqliteStore]:
    store = SqliteStore(tmp_path / "store")
    yield store
    store.close()


@pytest.fixture
def gateway(daemon: Daemon, store: SqliteStore) -> Gateway:
    return Gateway(daemon, store)


class Bad(NodeAuthority):
    """Issues a grant that differs from what was requested."""

    def __init__(self, change: Callable[[GpuLease, Grant], Grant]) -> None:
        self._change = change

    def issue(self, lease: GpuLease, audience: bytes | None, ttl_s: float, nonce: int) -> Grant:
        return self._change(lease, super().issue(lease, audience, ttl_s, nonce))


def with_token(grant: Grant, token: bytes) -> Grant:
    return Grant(token, grant.public_key, grant.lease_id, grant.permissions, grant.ttl_s, grant.expires_at_unix_secs)


def expired(lease: GpuLease, _: Grant) -> Grant:
    grant = lease.issue(SUBMISSION, ttl_secs=0.05)
    time.sleep(0.1)
    return grant


def attenuated(to: Permission) -> Callable[[GpuLease, Grant], Grant]:
    return lambda _, grant: with_token(grant, attenuate(grant.token, grant.public_key, permissions=to))


def of_a_renewed_lease(lease: GpuLease, grant: Grant) -> Grant:
    lease.renew(20)
    return grant


REFUSED: dict[str, tuple[Callable[[GpuLease, Grant], Grant], str]] = {
    "garbage": (lambda _, grant: with_token(grant, b"no token"), "malformed"),
    "changed": (lambda _, grant: with_token(grant, grant.token[:-1] + bytes([grant.token[-1] ^ 1])), "malformed|key"),
    "expired": (expired, "expired"),
    "nothing but queries": (attenuated(Permission.LEASE_QUERY), "permits LEASE_QUERY; it must"),
    "submission alone": (attenuated(Permission.TASKLET_SUBMIT), "permits TASKLET_SUBMIT; it must"),
    "too much": (lambda lease, _: lease.issue(SUBMISSION | Permission.MEM_READ), "LEASE_QUERY, TASKLET_SUBMIT, MEM_R"),
    "an earlier generation": (of_a_renewed_lease, "stale generation"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_capability_that_will_not_do_is_refused_before_any_work(gateway: Gateway, name: str) -> None:
    change, said = REFUSED[name]
    for _ in range(2):
        with pytest.raises(CapabilityRefused, match=said):
            gateway.serve(request("refused"), Bad(change))
    assert not {"open", "attach"} & set(gateway.steps)
    # Nothing was executed, so the request may be repeated.
    assert gateway.serve(request("refused")).output == OUTPUT


def test_a_capability_for_another_tenant(gateway: Gateway) -> None:
    theirs = my_audience(gateway.daemon.tcp_address)
    with pytest.raises(CapabilityRefused, match="foreign audience"):
        gateway.serve(request("foreign", audience=theirs))
    assert "open" not in gateway.steps
    mine = my_audience(gateway.daemon.address)
    assert gateway.serve(request("foreign", audience=mine)).output == OUTPUT


def test_a_capability_of_another_lease(gateway: Gateway) -> None:
    with gateway.daemon.builder().acquire() as other:
        bad = Bad(lambda _lease, _grant: other.issue(SUBMISSION))
        with pytest.raises(CapabilityRefused, match="is of lease"):
            gateway.serve(request("other's"), bad)
    assert "open" not in gateway.steps


def test_a_capability_that_is_over_by_the_callers_date(gateway: Gateway) -> None:
    with pytest.raises(CapabilityRefused, match="the request's date"):
        gateway.serve(request("late", now_secs=time.time() + 3600))
    assert "open" not in gateway.steps


def test_the_worker_itself_refuses_what_the_grant_does_not_permit(daemon: Daemon) -> None:
    with daemon.builder().acquire() as lease:
        grant = lease.issue(SUBMISSION)
        assert inspect_token(grant, daemon.address).permissions == SUBMISSION
        with GpuSession.attach(grant, daemon.address) as guest:
            for forbidden in (
                lambda: guest.mem_alloc(4),
                lambda: guest.mem_read(guest.buffer(1 << 32, 4), 0, 4),
            ):
                with pytest.raises(GpuLeaseError, match="MEM_"):
                    forbidden()


@pytest.mark.exhaustive
def test_a_daemon_that_demands_tokens_of_whoever_attaches(
    start_daemon: Callable[..., Daemon], store: SqliteStore
) -> None:
    """The owner's sessions need a token as well. Each token opens one session, and permits no launches."""
    daemon = start_daemon(tcp=True, config='require_token = ["attach"]\n')
    image, authority = AFFINE.read_bytes(), NodeAuthority()
    plain = DaemonEffects(store, daemon.tcp_address)
    with pytest.raises(Denied, match="requires a token for attaching"):
        serve_inference_request(plain, authority, request("once"), image, KERNEL)
    effects = DaemonEffects(store, daemon.tcp_address, by_token=True)
    assert serve_inference_request(effects, authority, request("once"), image, KERNEL).output == OUTPUT
    # An input so large that it is copied in pieces.
    many = np.ones(2 << 20, np.float32)
    large = request("large", input=many.tobytes(), output_len=many.nbytes, min_vram=32 << 20)
    served = serve_inference_request(effects, authority, large, image, KERNEL)
    assert served.output == (2 * many + 1).tobytes()
    assert daemon.query(served.lease_id)["cause"] == "freed"
    with (
        effects.acquire(1 << 20, 20) as lease,
        effects.open(lease) as owner,
        pytest.raises(Denied, match="only MEM_READ, MEM_WRITE"),
    ):
        owner.module_load(image)


def test_the_owners_session_is_refused_what_the_grant_does_not_permit_while_it_uses_it(
    daemon: Daemon, store: SqliteStore
) -> None:
    effects = DaemonEffects(store, daemon.address)
    with effects.acquire(1 << 20, 20) as lease, effects.open(lease, lease.issue(SUBMISSION)) as owner:
        buffer, other = owner.mem_alloc(4), owner.mem_alloc(4)
        owner.mem_write(buffer, 0, b"here")
        guest = effects.use_grant(owner)
        assert guest is not None
        for forbidden in (lambda: guest.mem_alloc(4), lambda: guest.mem_read(buffer, 0, 4)):
            with pytest.raises(Denied, match="MEM_"):
                forbidden()
        # A buffer that is dropped now is freed later, because the grant does not permit that either.
        del other
        guest.module_load(AFFINE.read_bytes())
        guest.sync()
        effects.use_own(owner)
        assert owner.mem_read(buffer, 0, 4) == b"here"


class EarlierDaemon(DaemonEffects):
    """What an earlier daemon does: it ignores a session's second token."""

    def open(self, lease: GpuLease, grant: Grant | None = None) -> GpuSession:
        return super().open(lease)


@pytest.mark.parametrize("by_token", [False, True])
def test_an_earlier_daemon_gets_a_connection_for_each_step(daemon: Daemon, store: SqliteStore, by_token: bool) -> None:
    effects = EarlierDaemon(store, daemon.address, by_token=by_token)
    served = serve_inference_request(effects, NodeAuthority(), request("one"), AFFINE.read_bytes(), KERNEL)
    assert served.output == OUTPUT
    assert daemon.query(served.lease_id)["cause"] == "freed"


# --- memory of another connection ---


def test_a_kept_buffer_outlives_its_connection_and_can_be_borrowed(daemon: Daemon) -> None:
    with daemon.builder().exclusivity(GpuExclusivityClass.SHARED).acquire() as lease:
        with GpuSession(lease) as first:
            kept = first.mem_alloc(5)
            first.mem_write(kept, 0, b"still")
            handle = kept.handle
            first.keep(kept, "it")
        with GpuSession(lease) as second:
            assert second.mem_read(second.buffer(handle, 5), 0, 5) == b"still"
            # The last reference to the borrowed buffer was dropped, but the memory is still there.
            borrowed = second.buffer(handle, 5)
            assert second.mem_read(borrowed, 0, 5) == b"still"
            second.mem_free(borrowed)
            with pytest.raises(GpuLeaseError, match="freed"):
                second.mem_read(borrowed, 0, 5)
            with pytest.raises(GpuLeaseError):
                second.mem_read(second.buffer(handle, 5), 0, 5)
