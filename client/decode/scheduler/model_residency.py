"""Decides which of a decode server's models are on the card, and which requests wait. No I/O.

Events and the time go in, effects come out. The pool (`model_pool`) executes the effects and reports their results.

    unloaded --Load--> loading --> loaded --Park--> parking --> parked --Return--> returning --> loaded
        ^                 |          |                            |
        |               failed       +-----------Unload-----------+
        +------------- unloading <--------------------------------+

The rules:

1. Models that are loaded, or on their way to or from the card, have at most `card_bytes` together. Models that are
   parked, or on their way to or from the host's memory, have at most `parked_bytes`.
2. A model that a request uses is never parked or unloaded.
3. Models get room in the order in which their first waiting requests came.
4. To make room, the model that was used least recently leaves. A model stays on the card for at least `min_stay_s`. If
   all models that may leave are in use, the one that has been on the card for the longest time yields: its new requests
   wait until it has left. So no model waits longer than another model's minimum stay plus that model's longest request.
5. After a failed load, only a request that comes after `retry_at` loads the model again.
"""

from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from itertools import islice
from typing import Final

from gpulease.client.decode.decode_errors import ModelRefusal
from gpulease.protocol.back_off import back_off_s

FIRST_RETRY_S: Final = 1.0
LONGEST_RETRY_S: Final = 60.0
"""Maximum back-off after failed loads in seconds. Each failure doubles the back-off. Without one, every request for a
model with broken files would read the files again, and evict other models.
"""


class ModelState(StrEnum):
    """Where a model's memory is. The values appear in replies and metrics."""

    UNLOADED = "unloaded"
    LOADING = "loading"
    LOADED = "loaded"
    PARKING = "parking"
    PARKED = "parked"
    RETURNING = "returning"
    UNLOADING = "unloading"
    FAILED = "failed"


_ON_CARD: Final = frozenset({ModelState.LOADING, ModelState.LOADED, ModelState.PARKING, ModelState.RETURNING})
_IN_HOST: Final = frozenset({ModelState.PARKING, ModelState.PARKED, ModelState.RETURNING})


@dataclass(frozen=True, slots=True)
class ModelTerms:
    """The properties of a model on which the decisions depend.

    Attributes:
        size_bytes: Bytes of its lease.
        is_parkable: Whether its lease can be parked.
        is_preloaded: Whether it is loaded without a request.
        version: A value that differs if any other setting of the model differs. Then a reload loads the model again.
    """

    size_bytes: int
    is_parkable: bool = True
    is_preloaded: bool = False
    version: object = None

    def is_same_engine(self, other: "ModelTerms") -> bool:
        """Return whether a model that was loaded under `other` can serve under these terms."""
        own = self.size_bytes, self.is_parkable, self.version
        return own == (other.size_bytes, other.is_parkable, other.version)


@dataclass(frozen=True, slots=True)
class ResidencyLimits:
    """Limits of the pool.

    Attributes:
        card_bytes: Maximum memory of models on the card.
        parked_bytes: Maximum host memory of parked models in bytes; 0 to unload models instead of parking them.
        min_stay_s: Minimum seconds for which a model stays on the card after its load or return.
        idle_s: Seconds after its last request until an unused model is parked; None to park only if room is needed.
        max_waiting: Maximum number of requests that wait for one model.
    """

    card_bytes: int
    parked_bytes: int = 0
    min_stay_s: float = 5.0
    idle_s: float | None = None
    max_waiting: int = 256


# --- effects ---


@dataclass(frozen=True, slots=True)
class Load:
    """Acquire a lease and load the model. Answer with `loaded` or `load_failed`."""

    model: str


@dataclass(frozen=True, slots=True)
class Return:
    """Bring a parked model's memory back to the card. Answer with `returned` or `return_failed`."""

    model: str


@dataclass(frozen=True, slots=True)
class Park:
    """Park the model's lease. Answer with `parked` or `park_failed`."""

    model: str


@dataclass(frozen=True, slots=True)
class Unload:
    """Close the model and free its lease. Answer with `unloaded`."""

    model: str


@dataclass(frozen=True, slots=True)
class Admit:
    """The request may use its model until `release`."""

    ticket: int


@dataclass(frozen=True, slots=True)
class Refuse:
    """The request gets no model.

    Attributes:
        ticket: The request.
        reason: Why.
        detail: Why the model's load failed; "" for other reasons.
        retry_after_s: Seconds after which the request may be sent again; None if unknown.
    """

    ticket: int
    reason: ModelRefusal
    detail: str = ""
    retry_after_s: float | None = None


Effect = Load | Return | Park | Unload | Admit | Refuse


@dataclass(slots=True)
class _Waiting:
    ticket: int
    order: int
    deadline_s: float


@dataclass(slots=True)
class ResidentModel:
    """A model's state. Only `ModelResidency` changes it.

    Attributes:
        name: Its name.
        terms: Its terms.
        state: The state of its memory.
        waiting: Requests that wait for it, in the order in which they came.
        in_use: Requests that use it.
        is_wanted: Whether it is loaded without a request, because it is preloaded or because a request has waited too
            long for it.
        yields: Whether its new requests wait until it has left the card.
        since: Time at which it came onto the card, in monotonic seconds.
        used_at: Time at which it was used last, in monotonic seconds.
        order: Its place in the order in which models get room, if it `is_wanted`.
        failures: Failed loads in a row.
        retry_at: When a request may load it again, in monotonic seconds.
        reason: Why it failed; "" if it did not fail.
        can_park: Whether it may be parked. False after a failed park, until its next load.
        leaves_card: In state UNLOADING, whether its memory was on the card.
        awaits_room: Whether its load failed for lack of room, and a parked model is being unloaded for it.
        next_terms: Terms from a reload, which apply when it is unloaded; None without a reload.
        is_removed: Whether a reload removed it. It is then unloaded after its last request.
        is_ended: Whether it is being unloaded because of a fault, after which its state is FAILED.
    """

    name: str
    terms: ModelTerms
    state: ModelState = ModelState.UNLOADED
    waiting: deque[_Waiting] = field(default_factory=deque)
    in_use: set[int] = field(default_factory=set)
    is_wanted: bool = False
    yields: bool = False
    since: float = 0.0
    used_at: float = 0.0
    order: int = 0
    failures: int = 0
    retry_at: float = 0.0
    reason: str = ""
    can_park: bool = True
    leaves_card: bool = True
    awaits_room: bool = False
    next_terms: ModelTerms | None = None
    is_removed: bool = False
    is_ended: bool = False

    @property
    def card_bytes(self) -> int:
        """Its bytes on the card or on their way to or from the card."""
        is_leaving = self.state is ModelState.UNLOADING and self.leaves_card
        return self.terms.size_bytes if self.state in _ON_CARD or is_leaving else 0

    @property
    def host_bytes(self) -> int:
        """Its bytes that are parked, or on their way to or from the host's memory."""
        is_leaving = self.state is ModelState.UNLOADING and not self.leaves_card
        return self.terms.size_bytes if self.state in _IN_HOST or is_leaving else 0

    @property
    def is_going(self) -> bool:
        """Whether a reload requires it to be unloaded."""
        return self.is_removed or self.next_terms is not None

    @property
    def is_open(self) -> bool:
        """Whether requests are admitted at once: it is loaded and does not yield."""
        return self.state is ModelState.LOADED and not self.yields and not self.is_going


class ModelResidency:
    """The state of all models. Each method is an event, and returns the effects to execute, in order.

    Attributes:
        models: The models by name. Only this class changes them.
    """

    def __init__(self, limits: ResidencyLimits, models: Mapping[str, ModelTerms]) -> None:
        """Begin with all models unloaded; see `start`. Raises ValueError for a model that is larger than the card."""
        self._limits = limits
        self.models: dict[str, ResidentModel] = {}
        self._parks = limits.parked_bytes > 0
        self._is_stopping = False
        self._order = 0
        self._tickets: dict[int, str] = {}
        self._check(models)
        self._add(models)

    @property
    def card_bytes(self) -> int:
        """Bytes of models on the card or on their way to or from the card."""
        return sum(model.card_bytes for model in self.models.values())

    @property
    def host_bytes(self) -> int:
        """Bytes of models that are parked, or on their way to or from the host's memory."""
        return sum(model.host_bytes for model in self.models.values())

    # --- requests ---

    def request(self, ticket: int, model: str, now: float, deadline_s: float) -> list[Effect]:
        """Process a new request. An effect admits or refuses it, now or later.

        Args:
            ticket: Its number, used once.
            model: The model's name.
            now: Monotonic seconds.
            deadline_s: When it is refused if it still waits, by the clock of `now`.
        """
        resident = self.models.get(model)
        if resident is None or resident.is_removed:
            return [Refuse(ticket, ModelRefusal.UNKNOWN)]
        if self._is_stopping:
            return [Refuse(ticket, ModelRefusal.STOPPING)]
        # A failed model is loaded again only by a request that comes after the back-off.
        if resident.state is ModelState.FAILED:
            if now < resident.retry_at:
                return [Refuse(ticket, ModelRefusal.LOAD_FAILED, resident.reason, resident.retry_at - now)]
            resident.state = ModelState.UNLOADED
        if not resident.is_open and len(resident.waiting) >= self._limits.max_waiting:
            return [Refuse(ticket, ModelRefusal.QUEUE_FULL)]
        self._order += 1
        resident.waiting.append(_Waiting(ticket, self._order, deadline_s))
        self._tickets[ticket] = model
        return self._advance(now)

    def release(self, ticket: int, now: float) -> list[Effect]:
        """Process the end of a request that uses its model or waits. Does nothing for a refused request."""
        resident = self.models.get(self._tickets.pop(ticket, ""))
        if resident is None:
            return []
        if ticket in resident.in_use:
            resident.in_use.remove(ticket)
            resident.used_at = now
        else:
            resident.waiting = deque(waiter for waiter in resident.waiting if waiter.ticket != ticket)
        return self._advance(now)

    # --- how effects ended ---

    def loaded(self, model: str, now: float) -> list[Effect]:
        """Process the end of a load: admit the requests that waited for the model."""
        resident = self.models[model]
        resident.failures, resident.reason, resident.can_park = 0, "", True
        self._arrive(resident, now)
        return self._advance(now)

    def load_failed(self, model: str, reason: str, now: float, *, is_for_room: bool = False) -> list[Effect]:
        """Process a failed load, which has left nothing on the card.

        Args:
            model: The model.
            reason: Why, for callers.
            now: Monotonic seconds.
            is_for_room: Whether the daemon had no room. Then a parked model is unloaded, and the load is tried again.
        """
        resident = self.models[model]
        resident.state = ModelState.UNLOADED
        # Depending on its `overcommit`, the daemon counts parked leases against the card.
        parked = self._parked()
        if is_for_room and parked and self._is_demanded(resident):
            resident.awaits_room = True
            # Apply a reload that came during the load, because a model with a pending reload is not loaded.
            self._apply_next_terms(resident)
            return [self._unload(parked[0]), *self._advance(now)]
        return [*self._fail(resident, reason, now), *self._advance(now)]

    def returned(self, model: str, now: float) -> list[Effect]:
        """Process a return: a parked model's memory is back on the card."""
        if (resident := self._in(model, ModelState.RETURNING)) is not None:
            self._arrive(resident, now)
        return self._advance(now)

    def return_failed(self, model: str, now: float) -> list[Effect]:
        """Process a failed return: unload the model, and load it again if requests wait for it."""
        if (resident := self._in(model, ModelState.RETURNING)) is None:
            return []
        return [self._unload(resident, leaves_card=True), *self._advance(now)]

    def parked(self, model: str, now: float) -> list[Effect]:
        """Process a park: a model's memory has left the card, so another model can have the room."""
        if (resident := self._in(model, ModelState.PARKING)) is not None:
            resident.state = ModelState.PARKED
        return self._advance(now)

    def park_failed(self, model: str, now: float, *, is_for_good: bool) -> list[Effect]:
        """Process a failed park, after which the model's memory is still on the card.

        Args:
            model: The model.
            now: Monotonic seconds.
            is_for_good: Whether the node can't park leases at all. From then on models are unloaded instead.
        """
        if (resident := self._in(model, ModelState.PARKING)) is not None:
            resident.state, resident.can_park = ModelState.LOADED, False
        if is_for_good:
            self._parks = False
        return self._advance(now)

    def unloaded(self, model: str, now: float) -> list[Effect]:
        """Process an unload: a model is closed and its lease is freed."""
        resident = self.models[model]
        resident.state = ModelState.UNLOADED
        if resident.is_ended:
            resident.is_ended = False
            return [*self._fail(resident, resident.reason, now), *self._advance(now)]
        if resident.is_removed:
            del self.models[model]
        else:
            self._apply_next_terms(resident)
        return self._advance(now)

    def ended(self, model: str, reason: str, now: float) -> list[Effect]:
        """Process a fault that ended a loaded model. The model is closed, as after a failed load."""
        resident = self.models[model]
        if not resident.card_bytes + resident.host_bytes or resident.state in (
            ModelState.LOADING,
            ModelState.UNLOADING,
        ):
            return []
        for ticket in resident.in_use:
            self._tickets.pop(ticket, None)
        resident.in_use.clear()
        resident.is_ended, resident.reason = True, reason
        return [self._unload(resident, leaves_card=resident.state is not ModelState.PARKED), *self._advance(now)]

    def engine_reopened(self, model: str, now: float) -> list[Effect]:
        """Process a parked model that is back on the card because its decoder has opened another lease.

        The model is unloaded. Until then, models may have more than `card_bytes` on the card.
        """
        if (resident := self._in(model, ModelState.PARKED)) is None:
            return []
        return [self._unload(resident, leaves_card=True), *self._advance(now)]

    # --- the operator ---

    def start(self, now: float) -> list[Effect]:
        """Begin to load the models that are preloaded."""
        return self._advance(now)

    def change(self, models: Mapping[str, ModelTerms], now: float) -> list[Effect]:
        """Serve these models from now on.

        New models are added. Models that are not in `models` are unloaded when no request uses them, and their waiting
        requests are refused. Models with other terms are loaded again, and their requests wait for the load. Raises
        ValueError, and changes nothing, if a model is larger than the card.
        """
        self._check(models)
        effects: list[Effect] = []
        for name, resident in list(self.models.items()):
            terms = models.get(name)
            if terms is None:
                resident.is_removed, resident.is_wanted, resident.next_terms = True, False, None
                effects += self._refuse_all(resident, ModelRefusal.UNKNOWN)
                if resident.state in (ModelState.UNLOADED, ModelState.FAILED):
                    del self.models[name]
                continue
            resident.is_removed = False
            resident.next_terms = None if terms.is_same_engine(resident.terms) else terms
            if resident.state in (ModelState.UNLOADED, ModelState.FAILED):
                if resident.next_terms is not None:
                    # The new settings may have corrected the fault, so the next request may load the model at once.
                    resident.state, resident.reason, resident.failures = ModelState.UNLOADED, "", 0
                resident.terms, resident.next_terms = terms, None
        self._add({name: terms for name, terms in models.items() if name not in self.models})
        return [*effects, *self._advance(now)]

    def drain(self, now: float) -> list[Effect]:
        """Refuse the waiting requests and all later ones. Requests that use a model continue."""
        self._is_stopping = True
        effects: list[Effect] = []
        for resident in self.models.values():
            resident.is_wanted = False
            effects += self._refuse_all(resident, ModelRefusal.STOPPING)
        return [*effects, *self._advance(now)]

    # --- the time ---

    def tick(self, now: float) -> list[Effect]:
        """Refuse requests that have waited too long, park idle models, and evict models after their minimum stay."""
        return self._advance(now)

    def next_deadline_s(self, now: float) -> float | None:
        """Return when to call `tick`, in monotonic seconds; None if only another event can change anything."""
        times = [waiter.deadline_s for model in self.models.values() for waiter in model.waiting]
        is_blocked = self._head() is not None
        for model in self.models.values():
            if model.state is not ModelState.LOADED:
                continue
            stays_until = model.since + self._limits.min_stay_s
            if is_blocked and stays_until > now:
                times.append(stays_until)
            if self._limits.idle_s is not None and self._may_park_idle(model):
                times.append(max(model.used_at, model.since) + self._limits.idle_s)
        return min(times, default=None)

    # --- decisions ---

    def _advance(self, now: float) -> list[Effect]:
        effects: list[Effect] = list(self._expire(now))
        for model in self.models.values():
            model.yields = False
            # Unload models that a reload removed or changed as soon as no request uses them.
            if model.is_going and not model.in_use and model.state in (ModelState.LOADED, ModelState.PARKED):
                effects.append(self._unload(model))
        # Make room for the waiting models in order, until one has to wait.
        while (head := self._head()) is not None and self._make_room(head, now, effects):
            pass
        for model in self.models.values():
            if model.is_open:
                model.is_wanted = False
            while model.is_open and model.waiting:
                ticket = model.waiting.popleft().ticket
                model.in_use.add(ticket)
                model.used_at = now
                effects.append(Admit(ticket))
        effects += self._park_idle(now)
        return effects

    def _make_room(self, head: ResidentModel, now: float, effects: list[Effect]) -> bool:
        """Bring a model onto the card, or make room for it. Returns whether it is on its way."""
        size, free = head.terms.size_bytes, self._limits.card_bytes - self.card_bytes
        if head.awaits_room:
            # A parked model is already being unloaded for this.
            if any(model.state is ModelState.UNLOADING for model in self.models.values()):
                return False
            head.awaits_room = False
        if free >= size:
            is_parked = head.state is ModelState.PARKED
            head.state = ModelState.RETURNING if is_parked else ModelState.LOADING
            effects.append(Return(head.name) if is_parked else Load(head.name))
            return True
        leaving = (ModelState.PARKING, ModelState.UNLOADING)
        coming = free + sum(model.card_bytes for model in self.models.values() if model.state in leaving)
        loaded = [
            model
            for model in self.models.values()
            if model.state is ModelState.LOADED and model.since + self._limits.min_stay_s <= now
        ]
        # First evict models that no request uses, the least recently used first.
        for model in sorted(loaded, key=lambda model: model.used_at):
            # Loaded models with waiting requests are not evicted.
            if coming >= size:
                break
            if not model.in_use and not model.waiting:
                coming += model.terms.size_bytes
                self._evict(model, effects)
        # If that is not enough, make models in use yield, those that have been on the card for the longest time first.
        for model in sorted(loaded, key=lambda model: model.since):
            if coming >= size:
                break
            if model.state is not ModelState.LOADED or not (model.in_use or model.waiting):
                continue
            coming += model.terms.size_bytes
            model.yields = True
            if not model.in_use:
                # No request uses it any more. Those that came while it yielded wait.
                self._evict(model, effects)
        return False

    def _evict(self, model: ResidentModel, effects: list[Effect]) -> None:
        """Park an unused model, or unload it if it can't be parked. May first unload parked models."""
        size = model.terms.size_bytes
        if self._may_park(model):
            free = self._limits.parked_bytes - self.host_bytes
            if free >= size:
                model.state = ModelState.PARKING
                effects.append(Park(model.name))
                return
            free += sum(other.host_bytes for other in self.models.values() if other.state is ModelState.UNLOADING)
            # Unload parked models that were used less recently. This model is parked when they have left.
            older = deque(other for other in self._parked() if other.used_at <= model.used_at)
            if free + sum(other.terms.size_bytes for other in older) >= size:
                while free < size:
                    free += older[0].terms.size_bytes
                    effects.append(self._unload(older.popleft()))
                return
        effects.append(self._unload(model))

    def _park_idle(self, now: float) -> Iterator[Effect]:
        if self._limits.idle_s is None:
            return
        for model in self.models.values():
            if self._may_park_idle(model) and now >= max(model.used_at, model.since) + self._limits.idle_s:
                model.state = ModelState.PARKING
                yield Park(model.name)

    def _may_park_idle(self, model: ResidentModel) -> bool:
        # While the pool is stopping, it closes the models, so none is parked.
        is_idle = model.is_open and not model.in_use and not model.waiting and not self._is_stopping
        # An idle model does not displace a parked one, because no model needs its room on the card.
        has_room = self._limits.parked_bytes - self.host_bytes >= model.terms.size_bytes
        return is_idle and has_room and self._may_park(model)

    def _may_park(self, model: ResidentModel) -> bool:
        fits = model.terms.size_bytes <= self._limits.parked_bytes
        return self._parks and model.can_park and model.terms.is_parkable and fits and not model.is_going

    def _parked(self) -> list[ResidentModel]:
        """Return the parked models that are not about to return, the least recently used first."""
        parked = (model for model in self.models.values() if model.state is ModelState.PARKED)
        return sorted(
            (resident for resident in parked if not self._is_demanded(resident)), key=lambda model: model.used_at
        )

    def _head(self) -> ResidentModel | None:
        """Return the model that gets room next; None if none waits."""
        absent = (ModelState.UNLOADED, ModelState.PARKED)
        candidates = [
            model
            for model in self.models.values()
            if model.state in absent and self._is_demanded(model) and not model.is_going
        ]
        return min(candidates, key=_order_of, default=None)

    def _in(self, model: str, state: ModelState) -> ResidentModel | None:
        """Return a model if it is in this state. Returns None for a report that came too late."""
        resident = self.models.get(model)
        return resident if resident is not None and resident.state is state else None

    @staticmethod
    def _is_demanded(model: ResidentModel) -> bool:
        return bool(model.waiting) or model.is_wanted

    def _arrive(self, model: ResidentModel, now: float) -> None:
        model.state, model.since, model.is_wanted = ModelState.LOADED, now, False

    def _unload(self, model: ResidentModel, *, leaves_card: bool | None = None) -> Effect:
        model.leaves_card = model.state is not ModelState.PARKED if leaves_card is None else leaves_card
        model.state = ModelState.UNLOADING
        return Unload(model.name)

    def _fail(self, model: ResidentModel, reason: str, now: float) -> list[Effect]:
        wait_s = back_off_s(model.failures, FIRST_RETRY_S, LONGEST_RETRY_S)
        model.state, model.is_wanted, model.awaits_room = ModelState.FAILED, False, False
        model.failures, model.reason, model.retry_at = model.failures + 1, reason, now + wait_s
        effects = self._refuse_all(model, ModelRefusal.LOAD_FAILED, reason, wait_s)
        self._apply_next_terms(model)
        if model.is_removed:
            del self.models[model.name]
        return effects

    @staticmethod
    def _apply_next_terms(model: ResidentModel) -> None:
        if model.next_terms is not None:
            model.terms, model.next_terms = model.next_terms, None

    def _refuse_all(
        self, model: ResidentModel, reason: ModelRefusal, detail: str = "", retry_after_s: float | None = None
    ) -> list[Effect]:
        refused, model.waiting = model.waiting, deque()
        for waiter in refused:
            self._tickets.pop(waiter.ticket, None)
        return [Refuse(waiter.ticket, reason, detail, retry_after_s) for waiter in refused]

    def _expire(self, now: float) -> Iterator[Effect]:
        for model in self.models.values():
            late = [waiter for waiter in model.waiting if waiter.deadline_s <= now]
            # A late request of a loaded model is admitted.
            if not late or model.is_open:
                continue
            # The model keeps its place in the order. Otherwise a model with short deadlines of requests would never be
            # loaded.
            model.order = min(late[0].order, model.order) if model.is_wanted else late[0].order
            model.is_wanted = not self._is_stopping
            model.waiting = deque(waiter for waiter in model.waiting if waiter.deadline_s > now)
            for waiter in late:
                self._tickets.pop(waiter.ticket, None)
                yield Refuse(waiter.ticket, ModelRefusal.WAITED_TOO_LONG)

    def _check(self, models: Mapping[str, ModelTerms]) -> None:
        for name, terms in models.items():
            if terms.size_bytes > self._limits.card_bytes:
                text = (
                    f"model {name} takes {terms.size_bytes:,} bytes, more than the models' {self._limits.card_bytes:,}"
                )
                raise ValueError(text)

    def _add(self, models: Mapping[str, ModelTerms]) -> None:
        for name, terms in models.items():
            self._order += 1
            is_wanted = terms.is_preloaded and not self._is_stopping
            self.models[name] = ResidentModel(name, terms, is_wanted=is_wanted, order=self._order)


def _order_of(model: ResidentModel) -> int:
    orders = [waiter.order for waiter in islice(model.waiting, 1)]
    return min([*orders, *([model.order] if model.is_wanted else [])])
