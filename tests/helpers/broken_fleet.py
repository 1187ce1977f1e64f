"""`python -P -m helpers.broken_fleet CHANNEL_FD PARENT_PID SANDBOX DESIGN`: a fleet process with a broken design.

It is the daemon's own fleet process, in its sandbox, with one broken rule, which the checker of a fleet's history must
detect.
"""

import sys
from enum import Enum
from importlib import import_module
from typing import Any, Final

from gpulease.daemon.broker.fleet_frontend import ETCD_PART
from gpulease.daemon.fleet.etcd.client import EtcdClient
from gpulease.daemon.fleet.etcd.etcd_messages import messages_of
from gpulease.daemon.fleet.etcd.transactions import Transaction, TransactionAnswer
from gpulease.daemon.fleet.records.fleet_records import HELD, NAMES, NODES
from gpulease.daemon.fleet.rules.fleet_events import Effect, EndClaimed, Event, LiveClaims, MoveHorizon
from gpulease.daemon.fleet.rules.member import Member
from gpulease.daemon.sandbox.measures import SandboxSettings

LEASES: Final = messages_of(
    "leases",
    {
        "PutRequest": "int64 lease = 3",
        "LeaseGrantRequest": "int64 ttl = 1",
        "LeaseGrantResponse": "int64 id = 2, int64 ttl = 3",
        "LeaseKeepAliveRequest": "int64 id = 1",
        "LeaseKeepAliveResponse": "int64 id = 2, int64 ttl = 3",
    },
)
"""Messages of etcd's own leases, which the daemon's client does not use (etcd, api/etcdserverpb/rpc.proto)."""

FOREVER_NS: Final = 1 << 60
"""A horizon so far ahead that it ends no lease."""


class Design(Enum):
    """Designs of a fleet: the daemon's own (RULES), and three that are unsafe."""

    RULES = "rules"
    TRUST = "trust"
    """A node claims a name with a key that expires, and continues to serve the name after the key has expired."""
    NOCAP = "nocap"
    """The node claims names and can be fenced, but its leases end only at their own deadlines."""
    LEASE = "lease"
    """Claims are keys of an etcd lease, and the node's leases end when that lease's last keep-alive has expired."""

    @property
    def is_capped(self) -> bool:
        """Whether leases end at their node's horizon."""
        return self in (Design.RULES, Design.LEASE)


class UncappedMember(Member):
    """A member with a membership deadline that never comes, so that its leases don't end when it is cut off."""

    def handle(self, event: Event, now_ns: int) -> list[Effect]:
        effects = super().handle(event, now_ns)
        return [
            MoveHorizon(now_ns + FOREVER_NS, effect.incarnation) if isinstance(effect, MoveHorizon) else effect
            for effect in effects
        ]


class TrustingMember(UncappedMember):
    """A member that continues to serve its old claims when it is cut off, and joins again as if it had none."""

    def handle(self, event: Event, now_ns: int) -> list[Effect]:
        effects = super().handle(event, now_ns)
        kept: list[Effect] = [effect for effect in effects if not isinstance(effect, EndClaimed)]
        return kept if len(kept) == len(effects) else kept + self.handle(LiveClaims(), now_ns)


class LeasingClient(EtcdClient):
    """A client that keeps an etcd lease alive with each write. When the lease ends, etcd deletes the node's keys."""

    _lease_id = 0

    async def _ask(self, member: Any, transaction: Transaction, request: Any, limit_s: float) -> TransactionAnswer:
        if transaction.writes:
            await self._keep_alive(member, limit_s)
        for operation in request.success:
            if operation.request_put.key.startswith((NODES, NAMES, HELD)):
                # Set a field that the client's own messages do not declare.
                operation.request_put.MergeFromString(LEASES["PutRequest"](lease=self._lease_id).SerializeToString())
        return await super()._ask(member, transaction, request, limit_s)

    async def _keep_alive(self, member: Any, limit_s: float) -> None:
        """Renew the client's etcd lease, or take a new one if etcd reports that it has expired. Raises AioRpcError."""
        if self._lease_id:
            call = member.channel.stream_stream(
                "/etcdserverpb.Lease/LeaseKeepAlive",
                request_serializer=LEASES["LeaseKeepAliveRequest"].SerializeToString,
                response_deserializer=LEASES["LeaseKeepAliveResponse"].FromString,
            )(timeout=limit_s)
            await call.write(LEASES["LeaseKeepAliveRequest"](id=self._lease_id))
            reply = await call.read()
            call.cancel()
            if reply.ttl > 0:
                return
        ttl_s = round(self._settings.timeout_s * ETCD_PART)
        grant = member.channel.unary_unary(
            "/etcdserverpb.Lease/LeaseGrant",
            request_serializer=LEASES["LeaseGrantRequest"].SerializeToString,
            response_deserializer=LEASES["LeaseGrantResponse"].FromString,
        )
        self._lease_id = (await grant(LEASES["LeaseGrantRequest"](ttl=ttl_s), timeout=limit_s)).id


MEMBERS: Final = {Design.TRUST: TrustingMember, Design.NOCAP: UncappedMember}


def main(channel_fd: str, parent_pid: str, sandbox: str, design: str) -> int:
    """Run the daemon's fleet process with that design in place of its rules."""
    process: Any = import_module("gpulease.daemon.fleet.__main__")
    process.Member = MEMBERS.get(Design(design), Member)
    if Design(design) in (Design.TRUST, Design.LEASE):
        process.EtcdClient = LeasingClient
    return int(process.main(int(channel_fd), int(parent_pid), SandboxSettings.from_text(sandbox)))


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
