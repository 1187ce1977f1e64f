"""A fleet in virtual time: members, their brokers, a store, and a network that delays and loses.

A judge outside watches the true time: whether a name ever lives on two nodes, whether epochs rise, and whether every
grant follows an answer. A lease lives at its node from ClaimGiven until EndClaimed, its end, or its node's horizon by
the true time, whatever is paused or dead there.
"""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from enum import Enum
from functools import partial
from heapq import heappop, heappush
from itertools import count
from random import Random
from typing import Protocol

from gpulease.daemon.fleet.etcd.transactions import (
    CreateRevisionIs,
    Outcome,
    Put,
    Transaction,
    TransactionAnswer,
    Unknown,
)
from gpulease.daemon.fleet.records.fleet_records import (
    GENERATION,
    NAMES,
    ClaimRecord,
    held_key,
    name_key,
    name_of,
    node_key,
)
from gpulease.daemon.fleet.rules.fleet_events import (
    NO_IDENTITY,
    NO_MARK,
    Answered,
    ArmFleetTimer,
    Ask,
    ClaimEnded,
    ClaimGiven,
    ClaimRefused,
    ClaimWanted,
    DaemonMark,
    Effect,
    EndClaimed,
    Event,
    FleetIdentity,
    FleetTerms,
    FleetTimerFired,
    Joined,
    KeepMark,
    LiveClaims,
    MarkKept,
    MoveHorizon,
    Noted,
    Paused,
    Remembered,
    Started,
)
from gpulease.daemon.fleet.rules.member import Member
from helpers.readable import readable

from .model_etcd import ModelEtcd

S = 10**9
TERMS = FleetTerms(horizon_s=30.0, rho=0.01)
T = 30 * S
TIMEOUT = 2 * S
OWN_TERM = 600 * S
"""A lease's own deadline, which its tenant renews as it likes."""
STUCK = 3 * S
"""After an election an old leader, which was stuck, revokes leases that the new one has kept alive."""
TWIN = "twin"
MAX_LATE_S = 90
MAX_PROOF = S


class Design(Enum):
    """Designs of a fleet: the rules, and three that do not hold."""

    RULES = "rules"
    TRUST = "the node believes what was written under a key with a time to live"
    NOCAP = "the node claims, and does not cap deadlines by its horizon"
    LEASE = "claims lie under etcd's own leases, capped by the last keep-alive"


class Broken(AssertionError):
    """Raised for a state that must never occur."""


class Decider(Protocol):
    """Decides for a node: a member, or a broken design of one."""

    def handle(self, event: Event, now_ns: int) -> list[Effect]: ...


@dataclass
class Lease:
    """A claimed lease as the node's broker, page and zygote know it."""

    name: str
    epoch: int
    began: int
    ended: int | None = None
    is_proved: bool = False
    is_forgotten: bool = False
    """The journal was rolled back to before it: no daemon knows of it, and its page ends it at the horizon."""


@dataclass(frozen=True)
class Journal:
    incarnation: int = 0
    identity: FleetIdentity = NO_IDENTITY
    mark: DaemonMark = NO_MARK
    epochs: frozenset[int] = frozenset()
    """Those of its leases, in a copy."""


@dataclass
class Node:
    """A host: its clock, its fleet process, and what outlives that; `key` distinguishes it from its clone."""

    key: str
    node_id: str
    rate: float
    offset: int
    decider: Decider | None = None
    runs: int = 0
    is_cut: bool = False
    is_paused: bool = False
    stands_still: bool = False
    timer: int = 0
    horizon: int = 0
    journal: Journal = Journal()
    copy: Journal | None = None
    leases: list[Lease] = field(default_factory=list)
    inbox: list[tuple[int, Event]] = field(default_factory=list)
    is_ending: bool = False
    answers: dict[int, Effect] = field(default_factory=dict)
    notes: list[Noted] = field(default_factory=list)

    def clock(self, true: int) -> int:
        return self.offset + int(true * self.rate)

    def true(self, clock: int) -> int:
        return int((clock - self.offset) / self.rate) + 1

    def living(self) -> list[Lease]:
        return [lease for lease in self.leases if lease.ended is None]


class TrustingMember:
    """A broken design: a key with a time to live names the node, and the node goes by its own lease from then on."""

    def __init__(self, node_id: str) -> None:
        self.node_id = node_id
        self.numbers = count(1)
        self.asked: dict[int, ClaimWanted] = {}

    def handle(self, event: Event, now_ns: int) -> list[Effect]:
        if isinstance(event, ClaimWanted):
            number = next(self.numbers)
            self.asked[number] = event
            key = name_key(event.name)
            return [Ask(number, Transaction((CreateRevisionIs(key, 0),), (Put(key, self.node_id.encode()),)))]
        wanted = self.asked.pop(event.number, None) if isinstance(event, Answered) else None
        if (
            wanted
            and isinstance(event, Answered)
            and isinstance(event.outcome, TransactionAnswer)
            and event.outcome.succeeded
        ):
            return [ClaimGiven(wanted.request, wanted.name, event.outcome.revision)]
        return []


class Fleet:
    def __init__(self, seed: int, rates: list[float], design: Design = Design.RULES) -> None:
        self.random = Random(seed)
        self.design = design
        self.etcd = ModelEtcd()
        self.now = 0
        self.queue: list[tuple[int, int, Callable[[], None]]] = []
        self.order = count()
        self.requests = count(1)
        self.has_leader = True
        self.slowness_s = 0.0
        self.epochs: dict[str, int] = {}
        self.claimed = 0
        self.pauses = 0
        self.is_broken = False
        self.kept: dict[str, int] = {}
        """When etcd last had a beat of each node, for the design with leases."""
        keys = [f"n{number}" for number in range(len(rates) - 1)]
        # The last is a host with the id of another: a clone, or what that was before it lost its journal.
        self.nodes = {
            key: Node(key, node_id, rate, self.random.randrange(10**6) * S)
            for key, node_id, rate in zip([*keys, TWIN], [*keys, keys[0]], rates, strict=True)
        }
        self.forgot = False
        """Whether a node was started without its journal, or with another's, so that it waits before it joins."""
        self.backup: ModelEtcd | None = None
        self.generations = count()
        self.is_renewed = True
        for key in keys:
            self.start(self.nodes[key], remembers=False)
        self.forgot = False

    def broken(self, text: str) -> Broken:
        """Return an error to raise, and remember that there was one."""
        self.is_broken = True
        return Broken(text)

    # --- time ---

    def at(self, true: int, act: Callable[[], None]) -> None:
        heappush(self.queue, (max(true, self.now), next(self.order), act))

    def advance(self, seconds: float) -> None:
        end = self.now + int(seconds * S)
        while self.queue and self.queue[0][0] <= end:
            true, _, act = heappop(self.queue)
            self.now = true
            act()
        self.now = end

    # --- processes ---

    def start(self, node: Node, remembers: bool) -> None:
        """Start a node's daemon again; what it remembers is in its journal."""
        node.runs += 1
        self.forgot |= not remembers
        node.notes.clear()
        node.inbox.clear()
        node.is_ending = False
        instance = f"{node.key}.{node.runs}"
        if self.design is Design.TRUST:
            node.decider = TrustingMember(node.node_id)
        else:
            kept = node.journal if remembers else Journal()
            node.decider = Member(node.node_id, TERMS, kept.incarnation, kept.identity, kept.mark, instance=instance)
        self.expire(node)
        self.post(node, Started())
        left = [lease for lease in node.leases if not lease.is_proved and not lease.is_forgotten]
        # A broker reports ending leases like live ones: their memory is in use.
        self.post(node, LiveClaims({lease.name: lease.epoch for lease in left}))
        for lease in left:
            if lease.ended is not None:
                self.prove_later(node, lease)

    def kill(self, node: Node, is_reset: bool) -> None:
        """Kill the daemon. Sessions live on to their horizon, unless the host was reset."""
        self.expire(node)
        node.decider = None
        node.inbox.clear()
        if is_reset:
            for lease in node.leases:
                lease.ended = lease.ended if lease.ended is not None else self.now
                lease.is_proved = True

    def copy_journal(self, node: Node) -> None:
        node.copy = replace(node.journal, epochs=frozenset(lease.epoch for lease in node.leases))

    def roll_back(self, node: Node) -> None:
        """Give a host without a daemon an earlier copy of its journal. What it granted since then is unknown."""
        assert node.copy is not None
        node.journal = node.copy
        self.forgot = True
        for lease in node.leases:
            if lease.epoch not in node.copy.epochs and not lease.is_forgotten:
                lease.is_forgotten = True
                if lease.ended is None:
                    self.at(node.true(node.horizon), partial(self.end, node, lease))

    def clone(self) -> None:
        """Give the twin's host, which has no daemon, the journal of the first."""
        twin = self.nodes[TWIN]
        twin.journal = replace(self.nodes[twin.node_id].journal, epochs=frozenset())
        self.forgot = True

    def restore(self, is_raised: bool) -> None:
        """Restore the store from its backup, with a generation of its own before any node reaches it."""
        assert self.backup is not None
        store = self.backup.copy()
        if is_raised:
            store.revision = self.etcd.revision + 1_000
        self.etcd = store
        self.forgot = True
        self.renew()

    def restore_late(self, is_raised: bool) -> None:
        """Restore the store one membership deadline after it was lost, without a new generation yet."""
        self.has_leader = False
        backup = self.backup
        assert backup is not None

        def begin() -> None:
            store = backup.copy()
            if is_raised:
                store.revision = self.etcd.revision + 1_000
            # A node that was cut off since before the backup, or that has an equally old journal, can't know of higher
            # ones.
            self.epochs.clear()
            self.etcd, self.has_leader, self.is_renewed, self.forgot = store, True, False, True

        self.at(self.now + int(T * (1 + 3 * TERMS.rho)), begin)

    def renew(self) -> None:
        """Put a new text into the store's generation key."""
        text = f"generation {next(self.generations)}".encode()
        self.etcd.do(Transaction(writes=(Put(GENERATION, text),)))
        self.is_renewed = True

    def pause(self, node: Node) -> None:
        node.is_paused = True

    def resume(self, node: Node) -> None:
        node.is_paused = False
        waiting, node.inbox = node.inbox, []
        for runs, event in waiting:
            self.post(node, event, runs)

    def pause_machine(self, node: Node, seconds: float, *, is_seen: bool = True) -> None:
        """Pause the virtual machine, its clock too. Nothing of it runs; a reading shows that behind it, if `is_seen`.

        Between the end of the pause and that reading the machine can't know of it: the judge does not look then.
        """
        self.expire(node)
        node.stands_still = True
        self.pause(node)
        stood_ns = node.clock(self.now)
        self.advance(seconds)
        missed_ns = node.clock(self.now) - stood_ns
        node.offset -= missed_ns
        waiting, node.inbox, node.is_paused = node.inbox, [], False
        self.pauses += 1
        if is_seen:
            self.post(node, Paused(missed_ns, f"{node.key}.{node.runs}.{self.pauses}"))
        node.stands_still = False
        node.inbox = waiting
        self.resume(node)
        self.judge()

    def post(self, node: Node, event: Event, runs: int | None = None) -> None:
        """Give an event to a node's process, once it runs again."""
        runs = node.runs if runs is None else runs
        if node.decider is None or runs != node.runs:
            return
        if node.is_paused:
            node.inbox.append((runs, event))
            return
        self.expire(node)
        for effect in node.decider.handle(event, node.clock(self.now)):
            self.carry_out(node, effect, event)

    def carry_out(self, node: Node, effect: Effect, event: Event) -> None:
        match effect:
            case Ask(number, transaction):
                self.send(node, number, transaction)
            case ArmFleetTimer(due):
                node.timer = due
                runs = node.runs
                self.at(node.true(due), lambda: self.fire(node, due, runs))
            case Joined(identity, incarnation, mark):
                node.journal = Journal(incarnation, identity, mark)
            case Remembered(identity):
                node.journal = replace(node.journal, identity=identity)
            case KeepMark(mark):
                node.journal = replace(node.journal, mark=mark)
                runs = node.runs
                self.at(self.now, lambda: self.post(node, MarkKept(mark.beat), runs))
            case MoveHorizon(horizon):
                assert horizon >= node.horizon
                node.horizon = horizon
                self.judge()
            case EndClaimed():
                assert not node.is_ending, "a second EndClaimed before LiveClaims"
                node.is_ending = True
                node.journal = replace(node.journal, incarnation=0)
                for lease in node.living():
                    if not lease.is_forgotten:
                        self.end(node, lease)
                self.say_when_all_ended(node)
            case ClaimGiven(request, name, epoch):
                assert request not in node.answers
                node.answers[request] = effect
                self.grant(node, name, epoch, event)
            case ClaimRefused(request):
                assert request not in node.answers
                node.answers[request] = effect
            case Noted():
                node.notes.append(effect)

    def fire(self, node: Node, due: int, runs: int) -> None:
        if node.timer == due:
            self.post(node, FleetTimerFired(), runs)

    # --- leases ---

    def want(self, node: Node, name: str, wait_s: float) -> int:
        request = next(self.requests)
        wait_until = node.clock(self.now) + int(wait_s * S)
        self.post(node, ClaimWanted(request, name, f"{request:032x}", "tenant", wait_until))
        return request

    def grant(self, node: Node, name: str, epoch: int, event: Event) -> None:
        self.claimed += 1
        if not (isinstance(event, Answered) and isinstance(event.outcome, TransactionAnswer)):
            raise self.broken(f"{name} was granted at {node.node_id} without an answer")
        if epoch <= self.epochs.get(name, 0):
            raise self.broken(f"{name} got epoch {epoch} after {self.epochs[name]}")
        self.epochs[name] = epoch
        lease = Lease(name, epoch, self.now)
        if self.design in (Design.NOCAP, Design.TRUST):
            self.at(self.now + OWN_TERM, lambda: self.end(node, lease))
        node.leases.append(lease)
        self.judge()

    def ends(self, node: Node) -> int | float:
        """Until when, by the true time, the node's leases live if nothing else happens."""
        return float("inf") if self.design in (Design.NOCAP, Design.TRUST) else node.true(node.horizon)

    def judge(self) -> None:
        places: dict[str, str] = {}
        for node in self.nodes.values():
            if self.ends(node) <= self.now or node.stands_still:
                continue
            for lease in node.living():
                other = places.setdefault(lease.name, node.key)
                if other != node.key:
                    raise self.broken(f"{lease.name} lives on {other} and {node.key} at {self.now / S:.3f} s")

    def expire(self, node: Node) -> None:
        """End what the horizon has ended: the page and the zygote did it, not the daemon."""
        if self.ends(node) <= self.now and not node.stands_still:
            for lease in node.living():
                self.end(node, lease)

    def end(self, node: Node, lease: Lease) -> None:
        if lease.ended is None:
            lease.ended = self.now
            self.prove_later(node, lease)

    def prove_later(self, node: Node, lease: Lease) -> None:
        self.at(self.now + self.random.randrange(MAX_PROOF), lambda: self.prove(node, lease))

    def prove(self, node: Node, lease: Lease) -> None:
        """The memory is proved free, if the daemon is there to look; a later daemon looks again."""
        if lease.is_proved or node.decider is None:
            return
        if node.is_paused:
            self.prove_later(node, lease)
            return
        lease.is_proved = True
        if not lease.is_forgotten:
            self.post(node, ClaimEnded(lease.name, lease.epoch))
        self.say_when_all_ended(node)

    def say_when_all_ended(self, node: Node) -> None:
        if node.is_ending and all(lease.is_proved or lease.is_forgotten for lease in node.leases):
            node.is_ending = False
            # By the next event, as a message to the process takes its time.
            runs = node.runs
            self.at(self.now, lambda: self.post(node, LiveClaims(), runs))

    # --- the network and the store ---

    def send(self, node: Node, number: int, transaction: Transaction) -> None:
        """Send a transaction: done or not, now or late, answered or not."""
        runs, random = node.runs, self.random
        is_lost = node.is_cut or not self.has_leader
        delay = random.uniform(0.0005, 0.05) + random.random() * self.slowness_s
        if is_lost and random.random() < 0.5:
            self.answer_later(node, number, runs, Unknown("cut"), TIMEOUT)
            return
        if is_lost and random.random() < 0.5:
            delay = random.uniform(0, MAX_LATE_S)
        sent, store = self.now, self.etcd

        def do() -> None:
            if store is not self.etcd:
                return  # Its connections have ended with it.
            outcome: Outcome = store.do(transaction)
            self.keep(transaction)
            back = self.now + int(random.uniform(0.0005, 0.05 + self.slowness_s) * S)
            if not (is_lost or node.is_cut or not self.has_leader) and back < sent + TIMEOUT:
                self.answer_later(node, number, runs, outcome, back - self.now)

        self.at(self.now + int(delay * S), do)
        # Whichever is first counts: a member takes one answer to a question.
        self.answer_later(node, number, runs, Unknown("timeout"), TIMEOUT)

    def answer_later(self, node: Node, number: int, runs: int, outcome: Outcome, delay: int) -> None:
        self.at(self.now + delay, lambda: self.post(node, Answered(number, outcome), runs))

    def keep(self, transaction: Transaction) -> None:
        """Note a beat, and arm the end of its lease, for the designs that rest on times to live."""
        if self.design is Design.TRUST:
            for write in transaction.writes:
                self.at(self.now + T, partial(self.run_out, write.key, self.etcd.revision))
        elif self.design is Design.LEASE and transaction.compares:
            node_id = next((n for n in self.nodes if transaction.compares[0].key == node_key(n)), "")
            if node_id:
                kept = self.kept[node_id] = self.now
                self.at(self.now + T, partial(self.revoke, node_id, kept))

    def run_out(self, key: bytes, revision: int) -> None:
        if (found := self.etcd.keys.get(key)) and found.mod_revision == revision:
            self.etcd.delete(key)

    def revoke(self, node_id: str, kept: int | None = None) -> None:
        """Do what etcd does at the end of a lease: delete its keys, unless it was kept alive since then."""
        if kept not in (None, self.kept[node_id]):
            return
        owned = [name_of(key) for key in self.etcd.keys if self.owner(key) == node_id]
        names = [name for name in owned if isinstance(name, str)]
        held = [held_key(node_id, name) for name in names]
        self.etcd.delete(node_key(node_id), *map(name_key, names), *held)

    def owner(self, key: bytes) -> str:
        claim = ClaimRecord.read(self.etcd.keys[key].value) if key.startswith(NAMES) else None
        return claim.node_id if isinstance(claim, ClaimRecord) else ""

    def change_leader(self, seconds: float) -> None:
        """Lose the leader for a while. With leases, the old one that was stuck revokes live ones (etcd #15247)."""
        self.has_leader = False

        def elect() -> None:
            self.has_leader = True

        def revoke() -> None:
            for node_id in {self.owner(key) for key in self.etcd.keys} - {""}:
                self.revoke(node_id)

        self.at(self.now + int(seconds * S), elect)
        if self.design is Design.LEASE:
            self.at(self.now + int(seconds * S) + STUCK, revoke)

    # --- after the faults ---

    def heal(self) -> None:
        self.slowness_s = 0.0
        if not self.is_renewed:
            self.renew()
        for node in self.nodes.values():
            node.is_cut = False
        for node in self.nodes.values():
            if node.is_paused:
                self.resume(node)
            if node.decider is None and node.runs:
                self.start(node, remembers=self.random.random() < 0.5)

    def check_back(self) -> None:
        """Check that one daemon of every node id may grant."""
        for hosts in self.hosts().values():
            # A lost membership is over at once; leases that no node knows live until their deadline.
            back = [
                node.key
                for node in hosts
                if isinstance(node.decider, Member) and node.clock(self.now) < node.decider.horizon_ns
            ]
            if len(back) != 1:
                raise self.broken(f"of {[node.key for node in hosts]} are back: {back}")

    def hosts(self) -> dict[str, list[Node]]:
        """Return the hosts that ever ran, by node id."""
        started = [node for node in self.nodes.values() if node.runs]
        return {each.node_id: [node for node in started if node.node_id == each.node_id] for each in started}

    def check_healed(self) -> None:
        """Check that every node may grant, and that etcd has the claims of living leases alone."""
        self.check_back()
        claims = {
            name_of(key): (found.mod_revision + readable(ClaimRecord.read(found.value)).epoch_base, owner)
            for key, found in self.etcd.keys.items()
            if (owner := self.owner(key))
        }
        living = {lease.name: (lease.epoch, node.node_id) for node in self.nodes.values() for lease in node.living()}
        if claims != living:
            raise self.broken(f"etcd has the claims {claims}, and {living} live")
