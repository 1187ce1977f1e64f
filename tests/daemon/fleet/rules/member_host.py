"""A member with a clock and a store, which a test runs step by step."""

from typing import Any, TypeVar

from gpulease.daemon.fleet.etcd.transactions import Unknown
from gpulease.daemon.fleet.records.fleet_records import ClaimRecord, name_key
from gpulease.daemon.fleet.rules.fleet_events import (
    Answered,
    ArmFleetTimer,
    Ask,
    ClaimWanted,
    DaemonMark,
    Effect,
    Event,
    FleetTerms,
    FleetTimerFired,
    Joined,
    KeepMark,
    LiveClaims,
    MarkKept,
    Remembered,
    Started,
)
from gpulease.daemon.fleet.rules.member import Member

from .model_etcd import ModelEtcd

S = 10**9
T = 30 * S
TERMS = FleetTerms(30.0, 0.01)
BEAT = T // 6
LEASE = "ab" * 16

E = TypeVar("E")

MOST_ASKS = 1_000
"""Maximum number of transactions of one node at one moment. A node that sends more would flood etcd."""


class Host:
    """A member, its clock, and a store that replies when the test lets it."""

    def __init__(self, etcd: ModelEtcd, node_id: str = "a", now: int = 1_000 * S, run: int = 1, **kept: Any) -> None:
        self.etcd = etcd
        self.now = now
        self.node_id = node_id
        self.member = Member(node_id, TERMS, instance=f"{node_id}.{run}", **kept)
        self.asked: list[Ask] = []
        self.effects: list[Effect] = []
        self.kept: list[DaemonMark] = []
        """The marks that the journal was told to store."""
        self.keeps = True
        """Whether the journal answers that it has them."""
        self.due: int | None = None
        self.is_cut = False

    def begin(self, epochs: dict[str, int] | None = None, quotas: dict[str, str] | None = None) -> "Host":
        self.send(Started())
        self.send(LiveClaims(epochs or {}, quotas or {}))
        self.settle()
        return self

    def left(self) -> dict[str, Any]:
        """Return what the node's next process would receive now."""
        joined = self.take(Joined)[-1]
        remembered = self.take(Remembered)
        identity = remembered[-1].identity if remembered else joined.identity
        return {"incarnation": joined.incarnation, "identity": identity, "mark": self.kept[-1]}

    def send(self, event: Event) -> None:
        for effect in self.member.handle(event, self.now):
            if isinstance(effect, Ask):
                self.asked.append(effect)
            elif isinstance(effect, ArmFleetTimer):
                self.due = effect.due_ns
            elif isinstance(effect, KeepMark):
                self.kept.append(effect.mark)
                if self.keeps:
                    self.send(MarkKept(effect.mark.beat))
            else:
                self.effects.append(effect)

    def settle(self) -> None:
        """Reply to all transactions at once; while the host is cut off, lose them."""
        for _ in range(MOST_ASKS):
            if not self.asked:
                return
            ask = self.asked.pop(0)
            self.send(Answered(ask.number, Unknown("cut") if self.is_cut else self.etcd.do(ask.transaction)))
        raise AssertionError(f"{self.node_id} asks etcd again and again while no time passes: {self.asked}")

    def run(self, seconds: float) -> None:
        """Let time pass. Every timer fires at its time."""
        end = self.now + int(seconds * S)
        while self.due is not None and self.due <= end:
            self.now, self.due = max(self.now, self.due), None
            self.send(FleetTimerFired())
            self.settle()
        self.now = end

    def want(self, name: str = "m", wait_s: float = 0, request: int = 1) -> None:
        self.send(ClaimWanted(request, name, LEASE, "t", self.now + int(wait_s * S)))

    def ask_for(self, name: str = "m", wait_s: float = 0, request: int = 1) -> None:
        self.want(name, wait_s, request)
        self.settle()

    def take(self, kind: type[E]) -> list[E]:
        found: list[E] = [effect for effect in self.effects if isinstance(effect, kind)]
        self.effects = [effect for effect in self.effects if not isinstance(effect, kind)]
        return found

    def claims(self, name: str = "m") -> str:
        found = self.etcd.keys.get(name_key(name))
        claim = ClaimRecord.read(found.value) if found else None
        return claim.node_id if isinstance(claim, ClaimRecord) else ""


def together(seconds: float, *hosts: Host) -> None:
    """Let time pass at several hosts, in small steps."""
    for _ in range(int(seconds * 10)):
        for host in hosts:
            host.run(0.1)
