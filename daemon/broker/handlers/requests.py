"""The dispatch table of control requests: which handler serves which operation."""

from collections.abc import Callable, Mapping
from typing import Any, Final, TypeVar

from gpulease.daemon.broker.caller import Caller, ClientConnection
from gpulease.daemon.broker.handlers.admin_requests import AdminHandler
from gpulease.daemon.broker.handlers.attach_requests import AttachHandler
from gpulease.daemon.broker.handlers.lease_requests import LeaseHandler
from gpulease.daemon.broker.handlers.query_requests import NodeHandler, QueryHandler
from gpulease.daemon.broker.handlers.region_requests import RegionHandler
from gpulease.daemon.broker.handlers.token_requests import TokenHandler
from gpulease.daemon.broker.runtime import Runtime
from gpulease.daemon.broker.token_service import ConnectionTokens
from gpulease.protocol.connection import Request
from gpulease.protocol.failures import Failure, Refused
from gpulease.protocol.opcodes import Opcode
from gpulease.protocol.operations import HANDING_OVER

NEEDS_MEMORY: Final = frozenset({Opcode.LEASE_SUBSCRIBE, Opcode.REGION_OPEN, Opcode.REGION_WATCH})
"""Operations that the broker refuses when it is out of memory: it would have to store something for them, and they can
wait. LEASE_ALLOC also belongs to them, but its handler first checks whether the lease exists already."""

H = TypeVar("H")

Serve = Callable[[Any, Request, Any], None]
"""A method of a handler. It serves a request with its parsed body: answers now, or when the lease table has an outcome.
May raise Refused."""

HANDLERS: Final[Mapping[Opcode, tuple[Callable[[Caller], Any], Serve]]] = {
    # Tenants: their leases and sessions.
    Opcode.LEASE_ALLOC: (LeaseHandler, LeaseHandler.lease_alloc),
    Opcode.LEASE_RENEW: (LeaseHandler, LeaseHandler.lease_renew),
    Opcode.LEASE_FREE: (LeaseHandler, LeaseHandler.lease_free),
    Opcode.LEASE_NOTE: (LeaseHandler, LeaseHandler.lease_note),
    Opcode.ATTACH: (AttachHandler, AttachHandler.attach),
    Opcode.GPU_SUBMIT: (AttachHandler, AttachHandler.gpu_submit),
    # Every peer: cards, reports and subscriptions.
    Opcode.PING: (QueryHandler, QueryHandler.ping),
    Opcode.GET_INVENTORY: (QueryHandler, QueryHandler.get_inventory),
    Opcode.LEASE_QUERY: (QueryHandler, QueryHandler.lease_query),
    Opcode.LEASE_LIST_ACTIVE: (QueryHandler, QueryHandler.lease_list_active),
    Opcode.LEASE_SUBSCRIBE: (QueryHandler, QueryHandler.lease_subscribe),
    Opcode.LEASE_UNSUBSCRIBE: (QueryHandler, QueryHandler.lease_unsubscribe),
    Opcode.REGION_OPEN: (RegionHandler, RegionHandler.region_open),
    Opcode.REGION_CANCEL: (RegionHandler, RegionHandler.region_cancel),
    Opcode.REGION_WATCH: (QueryHandler, QueryHandler.region_watch),
    Opcode.LEASE_RESIZE: (RegionHandler, RegionHandler.lease_resize),
    Opcode.LEASE_PARK: (LeaseHandler, LeaseHandler.lease_park),
    Opcode.LEASE_MOVE: (LeaseHandler, LeaseHandler.lease_move),
    Opcode.METRICS: (NodeHandler, NodeHandler.metrics),
    Opcode.HEALTH: (NodeHandler, NodeHandler.health),
    Opcode.PLACE: (NodeHandler, NodeHandler.refuse_as_node),
    Opcode.FLEET_LIST: (NodeHandler, NodeHandler.refuse_as_node),
    # Operators, and bearers of their tokens.
    Opcode.LEASE_REVOKE: (AdminHandler, AdminHandler.lease_revoke),
    Opcode.FENCE_CLEAR: (AdminHandler, AdminHandler.fence_clear),
    Opcode.DRAIN: (AdminHandler, AdminHandler.drain),
    Opcode.DRAIN_CANCEL: (AdminHandler, AdminHandler.drain_cancel),
    Opcode.CARD_DRAIN: (AdminHandler, AdminHandler.card_drain),
    Opcode.CAPABILITY_ISSUE: (TokenHandler, TokenHandler.capability_issue),
    Opcode.CAPABILITY_PRESENT: (TokenHandler, TokenHandler.capability_present),
    Opcode.CAPABILITY_REVOKE: (TokenHandler, TokenHandler.capability_revoke),
    Opcode.CAPABILITY_AUDIENCE: (TokenHandler, TokenHandler.capability_audience),
}
"""The handler of each operation: its class, and its method."""


class RequestDispatcher:
    """Passes each control request of one connection to its handler.

    A handler is made for the first request of its kind, because most connections send only one or two kinds of
    requests, and making a handler takes time in the broker's thread.
    """

    def __init__(self, runtime: Runtime, connection: ClientConnection, driver: str) -> None:
        self._runtime = runtime
        self._connection = connection
        # One caller for all handlers: the peer, its tokens, and the leases that it holds.
        tokens = ConnectionTokens(runtime.tokens, connection.peer)
        self._caller = Caller(runtime, connection, tokens, driver)
        self._handlers: dict[Callable[[Caller], Any], Any] = {}

    def handler(self, kind: Callable[[Caller], H]) -> H:
        """Return the connection's handler of a kind."""
        existing: H | None = self._handlers.get(kind)
        if existing is None:
            existing = self._handlers[kind] = kind(self._caller)
        return existing

    def dispatch(self, request: Request) -> None:
        """Serve one request. A refusal is answered, logged and counted."""
        kind, serve = HANDLERS[request.op]
        if request.op in HANDING_OVER:
            # Their handler checks and refuses them itself, because a check must be repeated after a wait.
            serve(self.handler(kind), request, request.body)
            return
        try:
            self._caller.check_peer(request.op)
            if request.op in NEEDS_MEMORY:
                self._caller.need_memory()
            serve(self.handler(kind), request, request.body)
        # The table has not seen this request, so log it and count it here.
        except Refused as refused:
            lease_id = getattr(request.body, "lease_id", 0)
            peer, failure = self._caller.peer, refused.failure
            self._runtime.note_refusal(request.op.name, peer.tenant, lease_id, failure)
            self._connection.answer(request, failure)

    def give_up(self, failure: Failure) -> None:
        """Answer every request that waits with `failure`, and abandon it."""
        for kind in (LeaseHandler, AttachHandler):
            if (existing := self._handlers.get(kind)) is not None:
                existing.give_up(failure)
        self.leave()

    def leave(self) -> None:
        """Abandon the requests and subscriptions of a client that has disconnected."""
        for kind in (LeaseHandler, AttachHandler, QueryHandler):
            if (existing := self._handlers.get(kind)) is not None:
                existing.leave()

    def close(self) -> None:
        """Abandon everything, and stop counting the connection for any lease. No request may follow."""
        self.leave()
        self._runtime.connections.leave(self._connection)
        # Handlers refer to the connection and its read buffer. Without this, only Python's collector would free both,
        # perhaps thousands of connections later.
        self._handlers.clear()
