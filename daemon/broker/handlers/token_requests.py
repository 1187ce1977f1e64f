"""CAPABILITY_ISSUE, CAPABILITY_PRESENT, CAPABILITY_REVOKE and CAPABILITY_AUDIENCE."""

import time

from gpulease.daemon.broker.caller import Caller, unix_s_after
from gpulease.daemon.broker.token_service import refusing
from gpulease.daemon.capabilities.claims import NONCE_BYTES, CapabilityRequest, Claims, Demand
from gpulease.daemon.contract.guests import mark_of
from gpulease.protocol import messages
from gpulease.protocol.capabilities import (
    ALL_PERMISSIONS,
    NODE_LEASE,
    OPERATOR_PERMISSIONS,
    SESSION_PERMISSIONS,
    Permission,
)
from gpulease.protocol.connection import Request
from gpulease.protocol.failures import Failure, Refused
from gpulease.protocol.opcodes import Status
from gpulease.protocol.time_units import NS_PER_MS


class TokenHandler:
    """Serves one caller's requests about tokens. Every method may raise Refused."""

    def __init__(self, caller: Caller) -> None:
        self._caller = caller
        self._runtime = caller.runtime
        self._peer = caller.peer
        self._tokens = caller.tokens
        self._service = caller.runtime.tokens

    def capability_issue(self, request: Request, body: messages.CapabilityIssue) -> None:
        # Check which permissions the peer may pass on before the authority signs anything.
        permissions = self._issuable_permissions(body)
        authority, peer = self._service.authority(), self._peer.tenant
        capability_request = CapabilityRequest(
            body.lease_id,
            permissions,
            # Without an audience the token is for the peer itself.
            body.audience or authority.audience_of(peer),
            body.ttl_ms / 1000,
            body.nonce.to_bytes(NONCE_BYTES, "big") if body.nonce else b"",
        )
        grant = refusing(lambda: authority.issue(capability_request))
        claims, lease = grant.claims, self._service.lease(body.lease_id)
        self._runtime.recorder.issued(
            peer if lease is None else lease.tenant,
            peer,
            claims,
            self._service.name_of(capability_request.audience, peer),
        )
        left_ms = _left_ms(claims)
        issued = messages.CapabilityGrant(
            grant.token, grant.public_key, claims.generation, left_ms, unix_s_after(left_ms)
        )
        self._caller.answer(request, issued)

    def capability_present(self, request: Request, body: messages.CapabilityPresent) -> None:
        claims = self._tokens.present(body.token, ALL_PERMISSIONS)
        left_ms = _left_ms(claims)
        reply = messages.CapabilityHeld(
            claims.lease_id, int(claims.permissions), claims.generation, left_ms, unix_s_after(left_ms)
        )
        self._caller.answer(request, reply)

    def capability_audience(self, request: Request, body: messages.Empty) -> None:
        self._caller.answer(request, messages.Audience(self._service.audience_of(self._peer.tenant)))

    def capability_revoke(self, request: Request, body: messages.CapabilityRevoke) -> None:
        """Serve CAPABILITY_REVOKE. The reply says whether the revocation is recorded for a restarted daemon."""

        def on_done(is_durable: bool) -> None:
            reason = (
                "the token is revoked, but that can't be recorded now: after a restart the daemon may accept it again"
            )
            failure = Failure(Status.BUSY, reason, hint="Ask again, or renew the lease, which ends all of its tokens.")
            self._caller.answer(request, messages.Empty() if is_durable else failure)

        lease_id, nonce = self._revocable_token(body)
        lease = self._runtime.table.get(lease_id)
        # Step 1: the authority refuses the token. Step 2: so do the workers, which may have connections that it opened.
        # Step 3: the journal records it, so that a restarted daemon refuses it, too.
        until_ms = self._service.authority().revoke(lease_id, nonce)
        if until_ms is None or not self._revoke_on_pages(lease_id, nonce, until_ms):
            reason = "too many tokens of this lease were revoked in the last minutes"
            raise Refused(Failure(Status.BUSY, reason, hint="Renew the lease: that ends all of its tokens."))
        self._runtime.journal.revoke_token(lease_id, nonce, until_ms, on_done)
        tenant = self._peer.tenant if lease is None else lease.tenant
        self._runtime.recorder.token_revoked(tenant, self._peer.tenant, lease_id, nonce)

    def _revoke_on_pages(self, lease_id: int, nonce: bytes, until_ms: int) -> bool:
        """Write the revocation to the pages of the session's and the submit's workers; False if one has no room."""
        submit, now_ms = self._runtime.table.submits.of(lease_id), time.monotonic_ns() // NS_PER_MS
        numbers = (lease_id,) if submit is None else (lease_id, submit.submit_id)
        pages = [self._runtime.workers.page(number) for number in numbers]
        return all(page is None or page.revoke_token(mark_of(nonce), until_ms, now_ms) for page in pages)

    def _revocable_token(self, body: messages.CapabilityRevoke) -> tuple[int, bytes]:
        """Return the lease and nonce of the token, if the peer may revoke it."""
        if not body.token and not body.nonce:
            raise Refused(Failure(Status.INVALID_REQUEST, "give a token or a nonce to identify the token to revoke"))
        # A token names its lease and nonce itself; with the nonce alone, the caller must give the lease.
        lease_id, nonce = body.lease_id, body.nonce.to_bytes(NONCE_BYTES, "big")
        if body.token:
            authority = self._service.authority()
            lease_id, nonce = refusing(lambda: authority.name(body.token))
        lease = self._service.lease(lease_id)
        # Operators may revoke any token, but must not find out in this way whether a lease exists.
        is_own = lease is not None and lease.tenant == self._peer.tenant
        if not is_own and not (self._peer.is_operator and (lease is not None or lease_id == NODE_LEASE)):
            raise Refused(self._service.denial(lease_id, self._peer).failure)
        return lease_id, nonce

    def _issuable_permissions(self, body: messages.CapabilityIssue) -> Permission:
        """Return the requested permissions, if the peer may grant them."""
        if body.permissions & ~int(ALL_PERMISSIONS):
            raise Refused(
                Failure(
                    Status.INVALID_REQUEST,
                    f"permissions {body.permissions:#x} have bits that this daemon does not support",
                )
            )
        permissions = Permission(body.permissions)
        # If the operator requires a token for renewals, a tenant must not issue one to itself.
        by_operators = OPERATOR_PERMISSIONS
        if Demand.RENEW in self._service.demands:
            by_operators |= Permission.LEASE_RENEW
        if permissions & by_operators and not self._peer.is_operator:
            raise Refused(Failure(Status.DENIED, f"only operators can give {permissions & by_operators!s}"))
        # A token is either for the node or for one lease.
        if (body.lease_id == NODE_LEASE) != (permissions == Permission.LEASE_ALLOC) and permissions:
            raise Refused(
                Failure(
                    Status.INVALID_REQUEST,
                    "LEASE_ALLOC applies to the node (lease 0), and every other permission to a lease; "
                    "one token can't have both",
                    hint="Request two tokens.",
                )
            )
        if body.lease_id != NODE_LEASE:
            self._check_issuer(body.lease_id, permissions)
        return permissions

    def _check_issuer(self, lease_id: int, permissions: Permission) -> None:
        """Let operators grant their own permissions. Only the tenant may share what is in its session."""
        lease = self._service.lease(lease_id)
        is_own = lease is not None and lease.tenant == self._peer.tenant
        if not is_own and not (lease is not None and self._peer.is_operator and not permissions & SESSION_PERMISSIONS):
            raise Refused(self._service.denial(lease_id, self._peer).failure)


def _left_ms(claims: Claims) -> int:
    return max(0, claims.expires_ms - time.monotonic_ns() // NS_PER_MS)
