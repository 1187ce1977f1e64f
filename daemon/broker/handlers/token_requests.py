"""Tokens at the broker: the node's authority, and what each control connection has shown."""

import time
from collections import OrderedDict
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Final, TypeVar

from gpulease.daemon.broker.peer import Peer
from gpulease.daemon.broker.refusal import Refusal, failure_of
from gpulease.daemon.capabilities.authority import NonceStore
from gpulease.daemon.capabilities.claims import NONCE_BYTES, CapabilityDenied, CapabilityRequest, Claims, Demand
from gpulease.daemon.capabilities.keys import KeyFileBroken, KeyRing, load_or_make, save
from gpulease.daemon.contract.control_page import BrokerPage
from gpulease.daemon.contract.guests import Guest, mark_of
from gpulease.daemon.leases import Denial, LeaseSnapshot, LeaseTable
from gpulease.daemon.leases.denials import not_found
from gpulease.daemon.record.audit.recorder import Recorder
from gpulease.daemon.record.journal import Journal
from gpulease.protocol import messages
from gpulease.protocol.capabilities import (
    ALL_PERMISSIONS,
    NODE_LEASE,
    OPERATOR_PERMISSIONS,
    SESSION_PERMISSIONS,
    Permission,
)
from gpulease.protocol.failures import Failure
from gpulease.protocol.opcodes import Status

if TYPE_CHECKING:
    from gpulease.daemon.capabilities.authority import CapabilityAuthority, LeaseFacts

MAX_PRESENTED: Final = 64
"""Leases that one control connection can hold tokens for. Stops a peer that presents tokens in a loop."""

MAX_NAMES: Final = 4096
"""Tenants whose audience is known by name, for the audit log. More than a host has users."""

KEY_FILE_NAME: Final = "token.key"
"""In the state folder."""

NS_PER_MS: Final = 1_000_000

T = TypeVar("T")


class TokensUnavailable(Exception):
    """Tokens were asked for in the settings and can't be had; the message is a sentence for the operator."""


class TokenService:
    """The node's authority, made when it is first needed, and what needs a token here.

    Args:
        table: The leases that tokens are about.
        demands: What needs a token.
        key_file: Where the keys are, if the operator says so.
        state: The folder of what survives the daemon, where they are else.
        spent: Tokens that were used before the daemon was started: lease, nonce, and until when that is remembered.
        revoked: The same of those that were revoked.

    Raises:
        TokensUnavailable: `demands` or a key file were asked for, and there can be none; or the keys can't be read.
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
        self._nonces, self._revoked = NonceStore(), NonceStore()
        for store, tokens in ((self._nonces, spent), (self._revoked, revoked)):
            for lease_id, nonce, expires_ms in tokens:
                store.use(lease_id, nonce, expires_ms)
        # By lease and mark: tokens of guests that were handed over, until the worker says whether it let them in.
        self._handed_over: dict[tuple[int, int], Claims] = {}
        self._authority: CapabilityAuthority | None = None
        is_kept = self._key_file is not None and self._key_file.exists()
        if demands or key_file is not None or is_kept:
            self._open()

    def authority(self) -> "CapabilityAuthority":
        """The authority. Raises Refusal if this installation has none."""
        try:
            return self._authority or self._open()
        except TokensUnavailable as error:
            raise Refusal(Failure(Status.UNSUPPORTED, str(error), hint="Tell the operator.")) from None

    def lease(self, lease_id: int) -> LeaseSnapshot | None:
        """The lease, if it is active and its time is not over."""
        if self._table.denial_for(lease_id, time.monotonic_ns()) is not None:
            return None
        return self._table.get(lease_id)

    def audience_of(self, tenant: str) -> bytes:
        """What a tenant is called on this node, where it asks for that itself. Raises Refusal."""
        audience = self.authority().audience_of(tenant)
        self._names[audience] = tenant
        self._names.move_to_end(audience)
        if len(self._names) > MAX_NAMES:
            self._names.popitem(last=False)
        return audience

    def name_of(self, audience: bytes, peer: str) -> str | None:
        """Which tenant that is, if it is the peer, or has lately asked what it is called."""
        return peer if audience == self.authority().audience_of(peer) else self._names.get(audience)

    def denial(self, lease_id: int, peer: Peer) -> Denial:
        """Why a peer can't issue tokens for a lease: how its own ended, and of others' nothing."""
        known = self._table.get(lease_id)
        is_shown = known is None or known.tenant == peer.tenant or peer.is_operator
        denial = self._table.denial_for(lease_id, time.monotonic_ns()) if is_shown else None
        return denial or not_found(lease_id)

    def handed_over(self, claims: Claims) -> None:
        """A guest's connection is on its way to the worker, which says what became of it."""
        now_ms = time.monotonic_ns() // NS_PER_MS
        # A worker that ended has said nothing.
        self._handed_over = {key: one for key, one in self._handed_over.items() if one.expires_ms > now_ms}
        self._handed_over[claims.lease_id, mark_of(claims.nonce)] = claims

    def guest_answered(self, journal: Journal, lease_id: int, mark: int, is_in: bool) -> None:
        """The worker let a guest in, or did not: then the token may be used again."""
        claims = self._handed_over.pop((lease_id, mark), None)
        if claims is not None and not is_in:
            self.give_back(claims, journal)

    def give_back(self, claims: Claims, journal: Journal) -> None:
        """A token opened nothing: it is not used, for the next daemon neither."""
        self.authority().give_back(claims)
        journal.unspend(claims.lease_id, claims.nonce)

    def _open(self) -> "CapabilityAuthority":
        try:
            from gpulease.daemon.capabilities.authority import CapabilityAuthority
        except ImportError as error:
            raise TokensUnavailable(
                f"there are no tokens, because {error.name} is not installed: "
                "pip install '.[daemon]' in gpulease's repository"
            ) from None
        now_ns = time.monotonic_ns()
        try:
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
        if lease is None or lease.deadline_ns is None:
            return None
        return LeaseFacts(lease.tenant, lease.generation, lease.deadline_ns)


class TokenHandler:
    """The tokens of one control connection: those it asks for, and those it has shown."""

    def __init__(self, office: TokenService, peer: Peer) -> None:
        self._office = office
        self._peer = peer
        self._held: dict[int, Claims] = {}
        self._to_use: Claims | None = None

    # --- operations ---

    def issue(self, body: messages.CapabilityIssue, recorder: Recorder) -> messages.CapabilityGrant:
        """CAPABILITY_ISSUE. Raises Refusal."""
        permissions = self._check_wish(body)
        authority = self._office.authority()
        request = CapabilityRequest(
            body.lease_id,
            permissions,
            body.audience or authority.audience_of(self._peer.tenant),
            body.ttl_ms / 1000,
            body.nonce.to_bytes(NONCE_BYTES, "big") if body.nonce else b"",
        )
        grant = _checked(lambda: authority.issue(request))
        claims = grant.claims
        peer = self._peer.tenant
        lease = self._office.lease(body.lease_id)
        recorder.issued(
            peer if lease is None else lease.tenant, peer, claims, self._office.name_of(request.audience, peer)
        )
        return messages.CapabilityGrant(
            grant.token, grant.public_key, claims.generation, _left_ms(claims), _unix_s(claims)
        )

    def present(self, body: messages.CapabilityPresent) -> messages.CapabilityHeld:
        """CAPABILITY_PRESENT. Raises Refusal."""
        claims = self._validate(body.token, ALL_PERMISSIONS)
        if claims.lease_id not in self._held and len(self._held) >= MAX_PRESENTED:
            self._held = {lease_id: held for lease_id, held in self._held.items() if self._holds(held)}
            if len(self._held) >= MAX_PRESENTED:
                raise Refusal(
                    Failure(Status.BUSY, f"this connection holds tokens for {MAX_PRESENTED} leases, the most it can")
                )
        self._held[claims.lease_id] = claims
        return messages.CapabilityHeld(
            claims.lease_id, int(claims.permissions), claims.generation, _left_ms(claims), _unix_s(claims)
        )

    def audience(self) -> messages.Audience:
        """CAPABILITY_AUDIENCE. Raises Refusal."""
        return messages.Audience(self._office.audience_of(self._peer.tenant))

    def to_revoke(self, body: messages.CapabilityRevoke) -> tuple[int, bytes]:
        """The lease and nonce that CAPABILITY_REVOKE is about, if the peer may end that token. Raises Refusal."""
        if not body.token and not body.nonce:
            raise Refusal(Failure(Status.INVALID_REQUEST, "neither a token nor a nonce says which token is to end"))
        lease_id, nonce = body.lease_id, body.nonce.to_bytes(NONCE_BYTES, "big")
        if body.token:
            authority = self._office.authority()
            lease_id, nonce = _checked(lambda: authority.name(body.token))
        lease = self._office.lease(lease_id)
        is_own = lease is not None and lease.tenant == self._peer.tenant
        if not is_own and not (self._peer.is_operator and (lease is not None or lease_id == NODE_LEASE)):
            raise Refusal(failure_of(self._office.denial(lease_id, self._peer)))
        return lease_id, nonce

    def revoke(
        self,
        lease_id: int,
        nonce: bytes,
        pages: Iterable[BrokerPage | None],
        journal: Journal,
        on_done: Callable[[bool], None],
    ) -> None:
        """End what `to_revoke` named, on these pages of the lease's; told is whether a restart will know that too.

        Raises Refusal.
        """
        until_ms = self._office.authority().revoke(lease_id, nonce)
        now_ms = time.monotonic_ns() // NS_PER_MS
        if until_ms is None or not all(
            page is None or page.revoke_token(mark_of(nonce), until_ms, now_ms) for page in pages
        ):
            why = "too many tokens of this lease were revoked in the last minutes"
            raise Refusal(Failure(Status.BUSY, why, hint="Renew the lease: that ends all of its tokens."))
        journal.revoke_token(lease_id, nonce, until_ms, on_done)

    # --- what is permitted ---

    def acting_tenant(self, lease_id: int, permission: Permission) -> str:
        """In whose name this peer asks something of a lease: its own, or that of whoever gave it a token for that."""
        held = self._held.get(lease_id)
        if held is not None and held.permissions & permission and self._holds(held):
            return held.tenant
        return self._peer.tenant

    def may_revoke(self, lease_id: int) -> bool:
        """Whether the peer, who is no operator, may revoke that lease."""
        held = self._held.get(lease_id)
        return held is not None and bool(held.permissions & Permission.REVOKE) and self._holds(held)

    def check_demand(self, demand: Demand, lease_id: int, permission: Permission) -> None:
        """Raises Refusal if this daemon demands a token for that and this connection has shown none."""
        if demand not in self._office.demands or self._peer.is_operator:
            return
        held = self._held.get(lease_id)
        if held is None or not held.permissions & permission or not self._holds(held):
            raise Refusal(
                Failure(
                    Status.DENIED,
                    f"this daemon demands a token for that, one with {permission.name} (setting require_token)",
                    hint="Ask the operator for a token, and present it on this connection.",
                )
            )

    def check_attach_demand(self) -> None:
        """Raises Refusal if this daemon demands a token of whoever attaches."""
        if Demand.ATTACH in self._office.demands and not self._peer.is_operator:
            raise Refusal(
                Failure(
                    Status.DENIED,
                    "this daemon demands a token for attaching (setting require_token)",
                    hint="Issue one for yourself and attach with it.",
                )
            )

    def guest(self, lease_id: int, token: bytes, needed: Permission = SESSION_PERMISSIONS) -> Guest:
        """To what a connection is bound that attaches to a lease with a token, for any of `needed`. Raises Refusal.

        Nothing is used up yet: see `spend`.
        """
        claims = self._validate(token, needed)
        if claims.lease_id != lease_id:
            raise Refusal(failure_of(not_found(lease_id)))
        self._to_use = claims
        return Guest(claims.permissions, claims.expires_ns, claims.generation, mark_of(claims.nonce))

    def spend(self, journal: Journal, on_done: Callable[[bool], None]) -> None:
        """Use up the token that `guest` looked at, if there was one; told is whether a restart will know that too.

        `attached` or `not_attached` follows.
        """
        if self._to_use is None:
            on_done(True)
            return
        claims, until_ms = self._to_use, self._office.authority().use(self._to_use)
        journal.spend(claims.lease_id, claims.nonce, until_ms, on_done)

    def attached(self, *, is_submit: bool) -> None:
        """The connection was handed over: its token opens no other, unless the session's worker refuses this one."""
        claims, self._to_use = self._to_use, None
        if claims is not None and not is_submit:
            self._office.handed_over(claims)

    def not_attached(self, journal: Journal) -> None:
        """The connection could not be handed over: its token may be tried again."""
        claims, self._to_use = self._to_use, None
        if claims is not None:
            self._office.give_back(claims, journal)

    def _check_wish(self, body: messages.CapabilityIssue) -> Permission:
        if body.permissions & ~int(ALL_PERMISSIONS):
            raise Refusal(
                Failure(Status.INVALID_REQUEST, f"permissions {body.permissions:#x} have bits that are not known here")
            )
        permissions = Permission(body.permissions)
        by_operators = OPERATOR_PERMISSIONS
        if Demand.RENEW in self._office.demands:
            by_operators |= Permission.LEASE_RENEW
        if permissions & by_operators and not self._peer.is_operator:
            raise Refusal(Failure(Status.DENIED, f"{(permissions & by_operators)!s} can be given by operators only"))
        if (body.lease_id == NODE_LEASE) != (permissions == Permission.LEASE_ALLOC) and permissions:
            raise Refusal(
                Failure(
                    Status.INVALID_REQUEST,
                    "LEASE_ALLOC is about the node, lease 0, and every other permission about a lease",
                    hint="Ask for two tokens.",
                )
            )
        if body.lease_id != NODE_LEASE:
            self._check_owner(body.lease_id, permissions)
        return permissions

    def _check_owner(self, lease_id: int, permissions: Permission) -> None:
        """Operators may give what they may do themselves; what is in a session is its tenant's alone to share."""
        lease = self._office.lease(lease_id)
        is_own = lease is not None and lease.tenant == self._peer.tenant
        if not is_own and not (lease is not None and self._peer.is_operator and not permissions & SESSION_PERMISSIONS):
            raise Refusal(failure_of(self._office.denial(lease_id, self._peer)))

    def _validate(self, token: bytes, permission: Permission) -> Claims:
        authority = self._office.authority()
        audience = authority.audience_of(self._peer.tenant)
        return _checked(lambda: authority.validate(token, audience, permission))

    def _holds(self, claims: Claims) -> bool:
        return self._office.authority().holds(claims)


def _checked(ask: Callable[[], T]) -> T:
    try:
        return ask()
    except CapabilityDenied as denied:
        raise Refusal(Failure(Status.DENIED, f"{denied} (token: {denied.check.value})", hint=denied.hint)) from None
    except KeyFileBroken as error:
        raise Refusal(Failure(Status.INTERNAL, str(error), hint="Tell the operator.")) from None


def _left_ms(claims: Claims) -> int:
    return max(0, claims.expires_ms - time.monotonic_ns() // NS_PER_MS)


def _unix_s(claims: Claims) -> int:
    return int(time.time() + _left_ms(claims) / 1000)
