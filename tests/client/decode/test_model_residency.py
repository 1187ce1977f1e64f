"""Which models are on the card: the rules at single events, and in any order of events."""

import itertools
from collections import Counter

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from gpulease.client.decode.decode_errors import ModelRefusal
from gpulease.client.decode.scheduler.model_residency import (
    Admit,
    Effect,
    Load,
    ModelResidency,
    ModelState,
    ModelTerms,
    Park,
    Refuse,
    ResidencyLimits,
    Return,
    Unload,
)

LATE = 1e9


def pool(*sizes: int, **limits: object) -> ModelResidency:
    """Models a, b, c and so on, of these sizes, on a card of 2 with host memory for 2 unless `limits` differ."""
    given = {"card_bytes": 2, "parked_bytes": 2, "min_stay_s": 5.0, **limits}
    models = {name: ModelTerms(size) for name, size in zip("abcdefgh", sizes, strict=False)}
    return ModelResidency(ResidencyLimits(**given), models)  # type: ignore[arg-type]


def load(models: ModelResidency, name: str, ticket: int, now: float) -> None:
    """Have a model loaded by a request, which ends at once."""
    assert models.request(ticket, name, now, LATE) == [Load(name)]
    assert models.loaded(name, now) == [Admit(ticket)]
    assert models.release(ticket, now) == []


def test_a_model_is_loaded_by_its_first_request_and_admits_others_at_once() -> None:
    models = pool(1)
    assert models.start(0.0) == []
    assert models.request(1, "a", 0.0, LATE) == [Load("a")]
    assert models.request(2, "a", 0.0, LATE) == []
    assert models.loaded("a", 1.0) == [Admit(1), Admit(2)]
    assert models.request(3, "a", 2.0, LATE) == [Admit(3)]


def test_preloaded_models_are_loaded_at_the_start() -> None:
    limits = ResidencyLimits(4)
    models = ModelResidency(limits, {"a": ModelTerms(1), "b": ModelTerms(2, is_preloaded=True)})
    assert models.start(0.0) == [Load("b")]
    assert models.loaded("b", 1.0) == []


def test_a_name_that_is_unknown_is_refused() -> None:
    assert pool(1).request(1, "z", 0.0, LATE) == [Refuse(1, ModelRefusal.UNKNOWN)]


def test_the_model_used_least_recently_makes_room_and_comes_back_from_the_host() -> None:
    models = pool(1, 1, 1)
    load(models, "a", 1, 0.0)
    load(models, "b", 2, 1.0)
    models.request(3, "a", 2.0, LATE)
    models.release(3, 2.0)
    assert models.request(4, "c", 10.0, LATE) == [Park("b")]
    assert models.parked("b", 10.0) == [Load("c")]
    assert models.loaded("c", 11.0) == [Admit(4)]
    # c has just been loaded, and a is in use: b waits for the end of c's stay or of a's use, whichever comes first.
    assert models.request(5, "a", 11.0, LATE) == [Admit(5)]
    assert models.request(6, "b", 12.0, LATE) == []
    assert models.release(5, 13.0) == [Park("a")]
    assert models.parked("a", 13.0) == [Return("b")]
    assert models.returned("b", 13.5) == [Admit(6)]


def test_a_model_in_use_is_not_evicted_but_yields_to_the_one_that_waits() -> None:
    models = pool(2, 2, parked_bytes=4)
    models.request(1, "a", 0.0, LATE)
    models.loaded("a", 0.0)
    assert models.request(2, "b", 6.0, LATE) == []
    # A stream of requests for a would otherwise keep b out for ever.
    assert models.request(3, "a", 6.5, LATE) == []
    assert models.release(1, 7.0) == [Park("a")]
    assert models.parked("a", 7.0) == [Load("b")]
    assert models.loaded("b", 8.0) == [Admit(2)]
    assert models.release(2, 8.0) == []
    # a's turn comes with the end of b's stay.
    assert models.next_deadline_s(8.0) == pytest.approx(13.0)
    assert models.tick(13.0) == [Park("b")]
    assert models.parked("b", 13.0) == [Return("a")]
    assert models.returned("a", 13.0) == [Admit(3)]


def test_a_model_that_yielded_for_nothing_admits_its_requests() -> None:
    models = pool(2, 2)
    models.request(1, "a", 0.0, LATE)
    models.loaded("a", 0.0)
    assert models.request(2, "b", 6.0, LATE) == []
    assert models.request(3, "a", 6.5, LATE) == []
    assert models.release(2, 7.0) == [Admit(3)]


def test_nothing_overtakes_the_first_model_that_waits() -> None:
    models = pool(1, 2, 1)
    models.request(1, "a", 0.0, LATE)
    models.loaded("a", 0.0)
    assert models.request(2, "b", 1.0, LATE) == []
    # c would fit next to a, and so would every small model after it.
    assert models.request(3, "c", 1.0, LATE) == []
    assert models.tick(5.0) == []
    assert models.release(1, 6.0) == [Park("a")]
    assert models.parked("a", 6.0) == [Load("b")]


def test_without_memory_of_the_host_models_are_unloaded() -> None:
    models = pool(2, 2, parked_bytes=0, idle_s=1.0)
    load(models, "a", 1, 0.0)
    assert models.tick(4.0) == []
    assert models.request(2, "b", 6.0, LATE) == [Unload("a")]
    assert models.unloaded("a", 7.0) == [Load("b")]


def test_the_parked_model_used_least_recently_gives_way_to_the_next_one() -> None:
    models = pool(2, 2, 2)
    load(models, "a", 1, 0.0)
    models.request(2, "b", 6.0, LATE)
    models.parked("a", 6.0)
    models.loaded("b", 6.0)
    models.release(2, 7.0)
    assert models.request(3, "c", 20.0, LATE) == [Unload("a")]
    assert models.unloaded("a", 20.0) == [Park("b")]
    assert models.parked("b", 20.0) == [Load("c")]


def test_an_idle_model_is_parked_in_time() -> None:
    models = pool(1, idle_s=30.0)
    load(models, "a", 1, 0.0)
    assert models.next_deadline_s(0.0) == pytest.approx(30.0)
    assert models.tick(29.0) == []
    assert models.tick(30.0) == [Park("a")]
    assert models.parked("a", 30.0) == []
    assert models.request(2, "a", 31.0, LATE) == [Return("a")]


def test_a_node_that_parks_nothing_has_its_models_unloaded() -> None:
    models = pool(2, 2)
    load(models, "a", 1, 0.0)
    assert models.request(2, "b", 6.0, LATE) == [Park("a")]
    assert models.park_failed("a", 6.0, is_for_good=True) == [Unload("a")]
    assert models.unloaded("a", 6.0) == [Load("b")]
    models.loaded("b", 6.0)
    models.release(2, 6.0)
    assert models.request(3, "a", 20.0, LATE) == [Unload("b")]


def test_a_failed_load_is_tried_again_by_a_request_after_a_longer_pause_each_time() -> None:
    models = pool(1)
    models.request(1, "a", 0.0, LATE)
    assert models.load_failed("a", "broken", 1.0) == [Refuse(1, ModelRefusal.LOAD_FAILED, "broken", 1.0)]
    assert models.request(2, "a", 1.5, LATE) == [Refuse(2, ModelRefusal.LOAD_FAILED, "broken", 0.5)]
    assert models.tick(100.0) == []
    assert models.models["a"].state is ModelState.FAILED
    assert models.request(3, "a", 100.0, LATE) == [Load("a")]
    assert models.load_failed("a", "broken", 100.0) == [Refuse(3, ModelRefusal.LOAD_FAILED, "broken", 2.0)]
    assert models.request(4, "a", 102.0, LATE) == [Load("a")]
    assert models.loaded("a", 103.0) == [Admit(4)]


def test_a_load_that_the_daemon_has_no_room_for_takes_a_parked_model_s_place() -> None:
    models = pool(2, 2)
    load(models, "a", 1, 0.0)
    models.request(2, "b", 6.0, LATE)
    models.parked("a", 6.0)
    assert models.load_failed("b", "full", 7.0, is_for_room=True) == [Unload("a")]
    assert models.unloaded("a", 7.0) == [Load("b")]
    assert models.load_failed("b", "full", 8.0, is_for_room=True) == [Refuse(2, ModelRefusal.LOAD_FAILED, "full", 1.0)]


def test_a_load_without_room_that_a_reload_meets_is_tried_again_with_the_new_settings() -> None:
    models = pool(2, 2)
    load(models, "a", 1, 0.0)
    models.request(2, "b", 6.0, LATE)
    models.parked("a", 6.0)
    assert models.change({"a": ModelTerms(2), "b": ModelTerms(2, version=2)}, 7.0) == []
    assert models.load_failed("b", "full", 8.0, is_for_room=True) == [Unload("a")]
    assert models.unloaded("a", 8.0) == [Load("b")]
    assert models.loaded("b", 9.0) == [Admit(2)]


def test_a_parked_model_that_can_t_return_is_loaded_again() -> None:
    models = pool(2, 2, idle_s=1.0)
    load(models, "a", 1, 0.0)
    models.tick(1.0)
    models.parked("a", 1.0)
    assert models.request(2, "a", 2.0, LATE) == [Return("a")]
    assert models.return_failed("a", 3.0) == [Unload("a")]
    assert models.unloaded("a", 3.0) == [Load("a")]
    assert models.loaded("a", 4.0) == [Admit(2)]


def test_a_full_queue_and_a_long_wait_are_refused() -> None:
    models = pool(1, max_waiting=2)
    models.request(1, "a", 0.0, 3.0)
    models.request(2, "a", 0.0, LATE)
    assert models.request(3, "a", 0.0, LATE) == [Refuse(3, ModelRefusal.QUEUE_FULL)]
    assert models.next_deadline_s(0.0) == pytest.approx(3.0)
    assert models.tick(3.0) == [Refuse(1, ModelRefusal.WAITED_TOO_LONG)]
    assert models.loaded("a", 4.0) == [Admit(2)]


def test_a_model_whose_requests_all_waited_too_long_comes_nevertheless() -> None:
    models = pool(2, 2, 2)
    models.request(1, "a", 0.0, LATE)
    models.loaded("a", 0.0)
    # Their callers retry again and again, and each time would be last in the queue.
    assert models.request(2, "b", 1.0, 1.0) == [Refuse(2, ModelRefusal.WAITED_TOO_LONG)]
    assert models.request(3, "c", 1.0, LATE) == []
    assert models.release(1, 6.0) == [Park("a")]
    assert models.parked("a", 6.0) == [Load("b")]
    assert models.loaded("b", 6.0) == []
    assert models.request(4, "b", 7.0, 7.0) == [Admit(4)]


def test_a_model_that_ended_by_a_fault_counts_as_failed() -> None:
    models = pool(1)
    load(models, "a", 1, 0.0)
    models.request(2, "a", 1.0, LATE)
    assert models.ended("a", "fault", 2.0) == [Unload("a")]
    assert models.request(3, "a", 2.0, LATE) == []
    assert models.unloaded("a", 2.0) == [Refuse(3, ModelRefusal.LOAD_FAILED, "fault", 1.0)]
    assert models.release(2, 3.0) == []
    assert models.request(4, "a", 3.0, LATE) == [Load("a")]


def test_a_parked_model_that_came_back_by_itself_is_unloaded() -> None:
    models = pool(1, idle_s=1.0)
    load(models, "a", 1, 0.0)
    models.tick(1.0)
    models.parked("a", 1.0)
    assert models.engine_reopened("a", 2.0) == [Unload("a")]
    assert models.models["a"].card_bytes == 1


def test_a_reload_adds_removes_and_changes_models_while_they_serve() -> None:
    models = pool(1, 1)
    models.request(1, "a", 0.0, LATE)
    models.loaded("a", 0.0)
    load(models, "b", 2, 0.0)
    # a goes after its last request; b is loaded again, because its settings differ; c is new.
    assert models.change({"b": ModelTerms(1, version=2), "c": ModelTerms(1)}, 1.0) == [Unload("b")]
    assert models.request(3, "a", 1.0, LATE) == [Refuse(3, ModelRefusal.UNKNOWN)]
    assert models.request(4, "b", 1.0, LATE) == []
    assert models.unloaded("b", 2.0) == [Load("b")]
    assert models.loaded("b", 2.0) == [Admit(4)]
    assert models.release(1, 3.0) == [Unload("a")]
    assert models.unloaded("a", 3.0) == []
    assert sorted(models.models) == ["b", "c"]
    with pytest.raises(ValueError, match="more than the models' 2"):
        models.change({"b": ModelTerms(3)}, 4.0)
    # Whether it is preloaded does not change a model that is there.
    assert models.change({"b": ModelTerms(1, version=2, is_preloaded=True)}, 5.0) == []


def test_a_drain_refuses_what_waits_and_lets_the_rest_end() -> None:
    models = pool(2, 2)
    models.request(1, "a", 0.0, LATE)
    models.loaded("a", 0.0)
    models.request(2, "b", 1.0, LATE)
    assert models.drain(2.0) == [Refuse(2, ModelRefusal.STOPPING)]
    assert models.request(3, "a", 2.0, LATE) == [Refuse(3, ModelRefusal.STOPPING)]
    # A reload no longer loads anything.
    assert models.change({"a": ModelTerms(2), "c": ModelTerms(0, is_preloaded=True)}, 2.0) == []
    assert models.release(1, 9.0) == []


def test_a_model_that_is_idle_while_the_pool_stops_is_not_parked() -> None:
    models = pool(1, idle_s=1.0)
    load(models, "a", 1, 0.0)
    assert models.drain(0.5) == []
    assert models.next_deadline_s(0.5) is None
    assert models.tick(2.0) == []


@pytest.mark.parametrize("models", [2, 4])
def test_no_model_starves_while_others_are_always_in_use(models: int) -> None:
    """Each model has a request in progress whenever it is loaded; a load takes 1 s, a request 3 s, a stay 5 s."""
    residency = pool(*[2] * models)
    names, now, ticket = "abcd"[:models], 0.0, 0
    due: list[tuple[float, str, object]] = []
    admitted: dict[str, list[float]] = {name: [] for name in names}
    wants: dict[int, str] = {}

    def apply(effects: list[Effect]) -> None:
        for effect in effects:
            match effect:
                case Admit(number):
                    admitted[wants[number]].append(now)
                    due.append((now + 3.0, "release", number))
                case Refuse():
                    raise AssertionError(effect)
                case Load(name) | Return(name) | Park(name) | Unload(name):
                    due.append((now + 1.0, type(effect).__name__, name))

    def ask(name: str) -> None:
        nonlocal ticket
        ticket += 1
        wants[ticket] = name
        apply(residency.request(ticket, name, now, LATE))

    for name in names * 2:
        ask(name)
    while now < 300.0:
        times = [at for at, _, _ in due]
        if (deadline := residency.next_deadline_s(now)) is not None:
            times.append(deadline)
        now = min(times)
        apply(residency.tick(now))
        for one in sorted((one for one in due if one[0] <= now), key=lambda one: one[0]):
            due.remove(one)
            _, kind, what = one
            if kind == "release":
                assert isinstance(what, int)
                apply(residency.release(what, now))
                ask(wants[what])
                continue
            answer = {
                "Load": residency.loaded,
                "Return": residency.returned,
                "Park": residency.parked,
                "Unload": residency.unloaded,
            }[kind]
            apply(answer(str(what), now))
    for times in admitted.values():
        gaps = [after - before for before, after in itertools.pairwise(times)]
        # Another model's turn: its load, its stay, the longest request that was admitted in it, its departure.
        assert max(gaps) <= models * (1 + 5 + 3 + 1 + 1)


class AnyOrder(RuleBasedStateMachine):
    """State machine that draws the next event; the effects under way end in any order, and any way they can."""

    def __init__(self) -> None:
        super().__init__()
        self.now, self.ticket = 0.0, 0
        self.limits = ResidencyLimits(10, 6, min_stay_s=5.0, idle_s=20.0, max_waiting=3)
        sizes = {"a": 2, "b": 3, "c": 4, "d": 6, "e": 10}
        self.terms = {name: ModelTerms(size, is_parkable=name != "b") for name, size in sizes.items()}
        self.models = ModelResidency(self.limits, self.terms)
        self.under_way: list[Load | Return | Park | Unload] = []
        self.wants: dict[int, str] = {}
        self.in_use: dict[int, str] = {}
        self.versions = Counter[str]()
        self.apply(self.models.start(0.0))

    def apply(self, effects: list[Effect]) -> None:
        for effect in effects:
            match effect:
                case Admit(ticket):
                    # Once, while it waits, and only a loaded model.
                    name = self.in_use[ticket] = self.wants.pop(ticket)
                    assert self.models.models[name].state is ModelState.LOADED
                case Refuse(ticket):
                    del self.wants[ticket]
                case Park(name) | Unload(name):
                    assert name not in self.in_use.values()
                    self.under_way.append(effect)
                case Load() | Return():
                    self.under_way.append(effect)
        # One thing at a time happens to a model.
        names = [effect.model for effect in self.under_way]
        assert len(set(names)) == len(names)

    @rule(name=st.sampled_from("abcdez"), wait_s=st.sampled_from([2.0, 100.0, LATE]))
    def request(self, name: str, wait_s: float) -> None:
        self.ticket += 1
        self.wants[self.ticket] = name
        self.apply(self.models.request(self.ticket, name, self.now, self.now + wait_s))

    @precondition(lambda self: self.in_use)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        ticket = data.draw(st.sampled_from(sorted(self.in_use)))
        del self.in_use[ticket]
        self.apply(self.models.release(ticket, self.now))

    @precondition(lambda self: self.wants)
    @rule(data=st.data())
    def withdraw(self, data: st.DataObject) -> None:
        ticket = data.draw(st.sampled_from(sorted(self.wants)))
        del self.wants[ticket]
        self.apply(self.models.release(ticket, self.now))

    @precondition(lambda self: self.under_way)
    @rule(data=st.data(), outcome=st.sampled_from(["", "", "", "fails", "no room"]))
    def finish(self, data: st.DataObject, outcome: str) -> None:
        effect = data.draw(st.sampled_from(self.under_way))
        self.under_way.remove(effect)
        self._finish(effect, outcome)

    def _finish(self, effect: Load | Return | Park | Unload, outcome: str = "") -> None:
        models, now, name = self.models, self.now, effect.model
        match effect:
            case Load():
                if outcome:
                    self.apply(models.load_failed(name, outcome, now, is_for_room=outcome == "no room"))
                else:
                    self.apply(models.loaded(name, now))
            case Return():
                self.apply(models.return_failed(name, now) if outcome else models.returned(name, now))
            case Park():
                failed = outcome and models.park_failed(name, now, is_for_good=False)
                self.apply(failed or models.parked(name, now))
            case Unload():
                self.apply(models.unloaded(name, now))

    @rule(passed_s=st.sampled_from([0.0, 1.0, 6.0, 25.0]))
    def tick(self, passed_s: float) -> None:
        self.now += passed_s
        self.apply(self.models.tick(self.now))

    @rule(name=st.sampled_from("abcde"), change=st.sampled_from(["remove", "add", "version"]))
    def reload(self, name: str, change: str) -> None:
        if change == "remove":
            self.terms.pop(name, None)
        elif name in self.terms:
            self.versions[name] += 1
            self.terms[name] = ModelTerms(self.terms[name].size_bytes, version=self.versions[name])
        else:
            self.terms[name] = ModelTerms(2 + self.versions[name] % 3)
        self.apply(self.models.change(self.terms, self.now))

    @precondition(lambda self: self.in_use)
    @rule(data=st.data())
    def end_by_a_fault(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(set(self.in_use.values()))))
        # The error was the answer to its requests.
        self.in_use = {ticket: model for ticket, model in self.in_use.items() if model != name}
        self.apply(self.models.ended(name, "fault", self.now))

    @invariant()
    def memory_is_bounded(self) -> None:
        assert self.models.card_bytes <= self.limits.card_bytes
        assert self.models.host_bytes <= self.limits.parked_bytes

    @invariant()
    def no_request_is_forgotten(self) -> None:
        waiting = {one.ticket for model in self.models.models.values() for one in model.waiting}
        assert waiting == set(self.wants)
        assert {ticket for model in self.models.models.values() for ticket in model.in_use} == set(self.in_use)
        assert all(len(model.waiting) <= self.limits.max_waiting for model in self.models.models.values())

    @invariant()
    def the_clock_is_not_asked_for_the_past(self) -> None:
        deadline = self.models.next_deadline_s(self.now)
        if deadline is not None and deadline <= self.now:
            effects = self.models.tick(self.now)
            assert effects
            self.apply(effects)

    def teardown(self) -> None:
        """Whatever came before: if requests end and effects succeed, every waiting request is served."""
        for _ in range(200):
            if not self.wants:
                return
            for ticket in list(self.in_use):
                del self.in_use[ticket]
                self.apply(self.models.release(ticket, self.now))
            for effect in list(self.under_way):
                self.under_way.remove(effect)
                self._finish(effect)
            self.now += 5.0
            self.apply(self.models.tick(self.now))
        raise AssertionError(f"{self.wants} still wait")


TestAnyOrder = AnyOrder.TestCase
