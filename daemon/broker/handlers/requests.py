"""The dispatch table of control requests: which handler serves which operation."""

from collections.abc import Callable
from typing import Any, Final

from gpulease.daemon.broker.caller import Caller
from gpulease.daemon.broker.handlers.admin_requests import AdminHandler
from gpulease.daemon.broker.handlers.attach_requests import AttachHandler, AttachingConnection
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
"""Operations that the broker refuses when it is out of memory: they make it keep something, and they can wait.
LEASE_ALLOC is another; its handler first checks whether the lease exists already."""

Handle = Callable[[Request, Any], None]
"""Serves a request with its parsed body: answers now, or when the lease table has an outcome. May raise Refused."""


class RequestDispatcher:
    """Passes each control request of one connection to its handler.

    Attributes:
        attaching: The handler of ATTACH and GPU_SUBMIT.
    """

    def __init__(self, runtime: Runtime, connection: AttachingConnection, driver: str) -> None:
        self._runtime = runtime
        self._connection = connection
        # One caller for all handlers: the peer, its tokens, and the leases that it holds.
        tokens = ConnectionTokens(runtime.tokens, connection.peer)
        self._caller = caller = Caller(runtime, connection, tokens, runtime.connections)
        self.attaching = AttachHandler(caller, connection)
        self._leases = leases = LeaseHandler(caller)
        self._queries = queries = QueryHandler(caller, driver)
        node = NodeHandler(caller, runtime.metrics, runtime.health)
        admin = AdminHandler(caller)
        token = TokenHandler(caller)
        regions = RegionHandler(caller)
        self._handlers: dict[Opcode, Handle] = {
            # Tenants: their leases and sessions.
            Opcode.LEASE_ALLOC: leases.lease_alloc,
            Opcode.LEASE_RENEW: leases.lease_renew,
            Opcode.LEASE_FREE: leases.lease_free,
            Opcode.LEASE_NOTE: leases.lease_note,
            Opcode.ATTACH: self.attaching.attach,
            Opcode.GPU_SUBMIT: self.attaching.gpu_submit,
            # Every peer: cards, reports and subscriptions.
            Opcode.PING: queries.ping,
            Opcode.GET_INVENTORY: queries.get_inventory,
            Opcode.LEASE_QUERY: queries.lease_query,
            Opcode.LEASE_LIST_ACTIVE: queries.lease_list_active,
            Opcode.LEASE_SUBSCRIBE: queries.lease_subscribe,
            Opcode.LEASE_UNSUBSCRIBE: queries.lease_unsubscribe,
            Opcode.REGION_OPEN: regions.region_open,
            Opcode.REGION_CANCEL: regions.region_cancel,
            Opcode.REGION_WATCH: queries.region_watch,
            Opcode.LEASE_RESIZE: regions.lease_resize,
            Opcode.LEASE_PARK: leases.lease_park,
            Opcode.LEASE_MOVE: leases.lease_move,
            Opcode.METRICS: node.metrics,
            Opcode.HEALTH: node.health,
            Opcode.PLACE: node.refuse_as_node,
            Opcode.FLEET_LIST: node.refuse_as_node,
            # Operators, and bearers of their tokens.
            Opcode.LEASE_REVOKE: admin.lease_revoke,
            Opcode.FENCE_CLEAR: admin.fence_clear,
            Opcode.DRAIN: admin.drain,
            Opcode.DRAIN_CANCEL: admin.drain_cancel,
            Opcode.CAPABILITY_ISSUE: token.capability_issue,
            Opcode.CAPABILITY_PRESENT: token.capability_present,
            Opcode.CAPABILITY_REVOKE: token.capability_revoke,
            Opcode.CAPABILITY_AUDIENCE: token.capability_audience,
        }

    def dispatch(self, request: Request) -> None:
        """Serve one request. A refusal is answered, logged and counted."""
        handle = self._handlers[request.op]
        if request.op in HANDING_OVER:
            # Their handler checks and refuses them itself, because a check must be repeated after a wait.
            handle(request, request.body)
            return
        try:
            self._caller.check_peer(request.op)
            if request.op in NEEDS_MEMORY:
                self._caller.need_memory()
            handle(request, request.body)
        # Refused before the table saw it, so the log, the audit log and the metrics learn of it here.
        except Refused as refused:
            lease_id = getattr(request.body, "lease_id", 0)
            peer, failure = self._caller.peer, refused.failure
            self._runtime.recorder.refused(request.op.name, peer.tenant, lease_id, failure.message)
            self._runtime.metrics.refused(request.op.name, failure.status)
            self._connection.answer(request, failure)

    def give_up(self, failure: Failure) -> None:
        """Answer every request that waits with `failure`, and abandon it."""
        self._leases.give_up(failure)
        self.attaching.give_up(failure)
        self.leave()

    def leave(self) -> None:
        """Abandon what the client waits for and subscribes to, because it has disconnected."""
        self._leases.leave()
        self.attaching.leave()
        self._queries.leave()

    def close(self) -> None:
        """Leave, and stop counting the connection for any lease. No request may follow."""
        self.leave()
        self._runtime.connections.leave(self._connection)
        # Handlers refer to the connection and its read buffer. Without this, only Python's collector would free both,
        # perhaps thousands of connections later.
        self._handlers.clear()
