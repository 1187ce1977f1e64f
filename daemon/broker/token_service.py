"""Capability tokens in the broker: the node's authority, and the tokens that each control connection has presented."""

import time
from collections import OrderedDict
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Final, TypeVar

from gpulease.daemon.broker.peer import Peer
from gpulease.daemon.capabilities.authority import NonceStore
from gpulease.daemon.capabilities.claims import CapabilityDenied, Claims, Demand
from gpulease.daemon.capabilities.keys import KeyFileBroken, KeyRing, load_or_make, save
from gpulease.daemon.contract.guests import Guest, mark_of
from gpulease.daemon.host.cannot_start import Misconfigured
from gpulease.daemon.leases.denials import Denial, not_found
from gpulease.daemon.leases.model import LeaseSnapshot
from gpulease.daemon.leases.table import LeaseTable
from gpulease.daemon.record.journal import Journal
from gpulease.protocol.capabilities import SESSION_PERMISSIONS, Permission
from gpulease.protocol.failures import Failure, Refused
from gpulease.protocol.opcodes import Opcode, Status
from gpulease.protocol.operations import SPECS
from gpulease.protocol.time_units import NS_PER_MS

if TYPE_CHECKING:
    from gpulease.daemon.capabilities.authority import CapabilityAuthority, LeaseFacts

MAX_PRESENTED: Final = 64
"""Maximum number of leases for which one control connection can hold tokens. Stops a peer that presents tokens in a
loop."""

MAX_NAMES: Final = 4096
"""Maximum number of tenants whose names are kept with their audiences, for the audit log. It is larger than the number
of a host's users."""

KEY_FILE_NAME: Final = "token.key"

T = TypeVar("T")


class TokensUnavailable(Misconfigured):
    """The settings require tokens, and this installation has none. The message is a sentence for the operator."""


class TokenService:
    """The node's token authority, made when it is first needed, and the operations that require a token here.

    Args:
        table: The leases that tokens are about.
        demands: The operations that require a token.
        key_file: The file with the keys, if the operator names one.
        state: The state folder, which holds the keys if the operator names no file.
        spent: Tokens used under an earlier daemon: the lease, the nonce, and the time (monotonic ms) until which the
            record is kept.
        revoked: Tokens revoked under an earlier daemon, in the same form.

    Raises:
        TokensUnavailable: The settings require tokens or name a key file, and tokens are not available or the keys
          can't be read.
    """

    def __init__(
        self,
        table: LeaseTable,
        demands: frozenset[Demand],
        key_file: Path | None,
        state: Path | None = None,
        spent: Iterable[tuple[int, bytes, int]] = (),
        revoked: Iterable[tuple[int, bytes, int]] = (),
    ) -> None:
        self.demands = demands
        self._table = table
        self._key_file = key_file or (None if state is None else state / KEY_FILE_NAME)
        self._names: OrderedDict[bytes, str] = OrderedDict()
        # Keep the tokens that were used or revoked under an earlier daemon: a restart must not make a token usable
        # twice.
        self._nonces, self._revoked = NonceStore(), NonceStore()
        for store, tokens in ((self._nonces, spent), (self._revoked, revoked)):
            for lease_id, nonce, expires_ms in tokens:
                store.use(lease_id, nonce, expires_ms)
        # By lease and mark: the tokens of guests that were handed over, until the worker reports whether it admitted
        # them.
        self._handed_over: dict[tuple[int, int], Claims] = {}
        self._authority: CapabilityAuthority | None = None
        # Open the authority now if anything may depend on it. Otherwise the first request about tokens opens it,
        # because the library takes time to import.
        has_keys = self._key_file is not None and self._key_file.exists()
        if demands or key_file is not None or has_keys:
            self._open()

    def authority(self) -> "CapabilityAuthority":
        """Return the authority. Raises Refused if this installation has none."""
        try:
            return self._authority or self._open()
        except TokensUnavailable as error:
            raise Refused(Failure(Status.UNSUPPORTED, str(error), hint="Report it to the operator.")) from None

    def lease(self, lease_id: int) -> LeaseSnapshot | None:
        """Return the lease if it is active and has not expired."""
        if self._table.denial_for(lease_id, time.monotonic_ns()) is not None:
            return None
        return self._table.get(lease_id)

    def audience_of(self, tenant: str) -> bytes:
        """Return the tenant's audience on this node, and record the tenant's name for it. Raises Refused."""
        audience = self.authority().audience_of(tenant)
        self._names[audience] = tenant
        self._names.move_to_end(audience)
        # Forget the tenant that asked least recently; the audit log then has its audience without a name.
        if len(self._names) > MAX_NAMES:
            self._names.popitem(last=False)
        return audience

    def name_of(self, audience: bytes, peer: str) -> str | None:
        """Return the tenant of an audience, if it is `peer` or a tenant that has recently asked for its audience."""
        return peer if audience == self.authority().audience_of(peer) else self._names.get(audience)

    def denial(self, lease_id: int, peer: Peer) -> Denial:
        """Return why a peer can't issue tokens for a lease. Only owners and operators are shown how the lease ended."""
        lease = self._table.get(lease_id)
        is_shown = lease is None or lease.tenant == peer.tenant or peer.is_operator
        denial = self._table.denial_for(lease_id, time.monotonic_ns()) if is_shown else None
        return denial or not_found(lease_id)

    def add_handed_over(self, claims: Claims) -> None:
        """Keep a guest's token while its connection is passed to the worker."""
        now_ms = time.monotonic_ns() // NS_PER_MS
        # A worker that has ended never answers, so drop expired tokens.
        self._handed_over = {key: token for key, token in self._handed_over.items() if token.expires_ms > now_ms}
        self._handed_over[claims.lease_id, mark_of(claims.nonce)] = claims

    def on_guest_answered(self, journal: Journal, lease_id: int, mark: int, is_let_in: bool) -> None:
        """Allow the token to be used again if the worker did not admit its guest."""
        # The guest's connection did nothing, so the token counts as unused.
        claims = self._handed_over.pop((lease_id, mark), None)
        if claims is not None and not is_let_in:
            self.give_back(claims, journal)

    def give_back(self, claims: Claims, journal: Journal) -> None:
        """Count a token that opened nothing as unused, even for the next daemon."""
        self.authority().give_back(claims)
        journal.unspend(claims.lease_id, claims.nonce)

    def _open(self) -> "CapabilityAuthority":
        try:
            from gpulease.daemon.capabilities.authority import CapabilityAuthority
        except ImportError as error:
            raise TokensUnavailable(
                f"tokens are not available, because {error.name} is not installed: "
                "pip install '.[daemon]' in gpulease's repository"
            ) from None
        now_ns = time.monotonic_ns()
        try:
            # Without a file the keys exist only in memory, so every token becomes invalid when this daemon ends.
            ring = KeyRing.fresh(now_ns) if self._key_file is None else load_or_make(self._key_file, now_ns)
        except KeyFileBroken as error:
            raise TokensUnavailable(str(error)) from None
        self._authority = CapabilityAuthority(
            ring, self._facts, save=self._save, nonces=self._nonces, revoked=self._revoked
        )
        return self._authority

    def _save(self, ring: KeyRing) -> None:
        if self._key_file is not None:
            save(self._key_file, ring, time.monotonic_ns())

    def _facts(self, lease_id: int) -> "LeaseFacts | None":
        from gpulease.daemon.capabilities.authority import LeaseFacts

        lease = self.lease(lease_id)
        # A lease that is not granted yet has no deadline, and no tokens.
        if lease is None or lease.deadline_ns is None:
            return None
        return LeaseFacts(lease.tenant, lease.generation, lease.deadline_ns)


class ConnectionTokens:
    """The tokens that one control connection has presented, and their permissions."""

    def __init__(self, service: TokenService, peer: Peer) -> None:
        self._service = service
        self._peer = peer
        self._presented: dict[int, Claims] = {}
        # The tokens of the ATTACH or GPU_SUBMIT in progress.
        self._attaching: list[Claims] = []

    def present(self, token: bytes, permissions: Permission) -> Claims:
        """Validate a token and keep it for the connection. Raises Refused."""
        claims = self.validate(token, permissions)
        # Drop tokens that have expired or been revoked before refusing for lack of room.
        if claims.lease_id not in self._presented and len(self._presented) >= MAX_PRESENTED:
            self._presented = {
                lease_id: presented for lease_id, presented in self._presented.items() if self._is_valid(presented)
            }
            if len(self._presented) >= MAX_PRESENTED:
                raise Refused(
                    Failure(Status.BUSY, f"this connection holds tokens for {MAX_PRESENTED} leases, the maximum")
                )
        self._presented[claims.lease_id] = claims
        return claims

    def validate(self, token: bytes, permissions: Permission) -> Claims:
        """Return the claims of a token that gives this peer any of `permissions`. Raises Refused."""
        authority = self._service.authority()
        audience = authority.audience_of(self._peer.tenant)
        return refusing(lambda: authority.validate(token, audience, permissions))

    # --- permissions ---

    def acting_tenant(self, lease_id: int, permission: Permission) -> str:
        """Return the tenant for which the peer acts on a lease: the peer, or the issuer of its token for the lease."""
        claims = self._permitting(lease_id, permission)
        return self._peer.tenant if claims is None else claims.tenant

    def may_revoke(self, lease_id: int) -> bool:
        """Return whether a token lets the peer, which is not an operator, revoke that lease."""
        return self.permits(lease_id, SPECS[Opcode.LEASE_REVOKE].needs.permissions)

    def permits(self, lease_id: int, permission: Permission) -> bool:
        """Return whether a token that the peer has presented permits one of these operations on a lease."""
        return self._permitting(lease_id, permission) is not None

    def check_demand(self, demand: Demand, lease_id: int, permission: Permission) -> None:
        """Raise Refused if this daemon requires a token for the operation and the connection has presented none."""
        # Operators need no token: they could issue one to themselves.
        if demand not in self._service.demands or self._peer.is_operator:
            return
        if self._permitting(lease_id, permission) is None:
            raise Refused(
                Failure(
                    Status.DENIED,
                    f"this daemon requires a token with {permission.name} for this request (setting require_token)",
                    hint="Ask the operator for a token, and present it on this connection.",
                )
            )

    def check_attach_demand(self) -> None:
        """Raise Refused if this daemon requires a token for attaching and the peer has presented none."""
        if Demand.ATTACH in self._service.demands and not self._peer.is_operator:
            raise Refused(
                Failure(
                    Status.DENIED,
                    "this daemon requires a token for attaching (setting require_token)",
                    hint="Issue a token for yourself, and attach with it.",
                )
            )

    def _permitting(self, lease_id: int, permission: Permission) -> Claims | None:
        claims = self._presented.get(lease_id)
        # Check this at each use: since the token was presented, the lease may have been renewed, or the token revoked.
        if claims is not None and claims.permissions & permission and self._is_valid(claims):
            return claims
        return None

    def _is_valid(self, claims: Claims) -> bool:
        return self._service.authority().holds(claims)

    # --- attaching ---

    def guests(self, lease_id: int, tokens: Iterable[bytes], needed: Permission = SESSION_PERMISSIONS) -> list[Guest]:
        """Return the bounds of a connection that attaches to a lease with tokens, each for any of `needed`.

        The tokens are not used up yet; `spend` does that. Raises Refused.
        """
        all_claims = [self.validate(token, needed) for token in tokens]
        # A token of another lease is answered like an unknown lease.
        if any(claims.lease_id != lease_id for claims in all_claims):
            raise Refused(not_found(lease_id).failure)
        # Narrowed copies share the nonce, and only one of them may be used.
        if len({claims.nonce for claims in all_claims}) < len(all_claims):
            raise Refused(Failure(Status.DENIED, "the request's two tokens must not be copies of the same token"))
        # Keep the tokens here; `spend` uses them up. Between the two, the peer may still have replies to read.
        self._attaching = all_claims
        return [
            Guest(claims.permissions, claims.expires_ns, claims.generation, mark_of(claims.nonce))
            for claims in all_claims
        ]

    def spend(self, journal: Journal, on_done: Callable[[bool], None]) -> None:
        """Use up the tokens that `guests` accepted, if any. `attached` or `not_attached` follows.

        Args:
            journal: Where the use is recorded.
            on_done: Called with True if the use is durable, so that a restarted daemon will have a record of it.
        """
        # The lease's own tenant may attach without a token, so nothing is used up.
        if not self._attaching:
            on_done(True)
            return
        outcomes: list[bool] = []
        expected = len(self._attaching)

        def on_one_done(is_durable: bool) -> None:
            outcomes.append(is_durable)
            if len(outcomes) == expected:
                on_done(all(outcomes))

        for claims in list(self._attaching):
            until_ms = self._service.authority().use(claims)
            journal.spend(claims.lease_id, claims.nonce, until_ms, on_one_done)

    def attached(self, *, is_submit: bool) -> None:
        """Keep the tokens used, because their connection was handed over.

        A session's worker may still refuse the guest.
        """
        all_claims, self._attaching = self._attaching, []
        for claims in () if is_submit else all_claims:
            self._service.add_handed_over(claims)

    def not_attached(self, journal: Journal) -> None:
        """Allow the tokens to be used again, because their connection could not be handed over."""
        all_claims, self._attaching = self._attaching, []
        for claims in all_claims:
            self._service.give_back(claims, journal)


def refusing(operation: Callable[[], T]) -> T:
    """Call the authority, and turn its exceptions into Refused."""
    try:
        return operation()
    except CapabilityDenied as denied:
        raise Refused(Failure(Status.DENIED, f"{denied} (token: {denied.check.value})", hint=denied.hint)) from None
    except KeyFileBroken as error:
        raise Refused(Failure(Status.INTERNAL, str(error), hint="Report it to the operator.")) from None
