"""The page of a decode server: its state, the key that it requires, and its button; in a browser at three widths."""

import asyncio
import hashlib
import json
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any, cast

import httpx
import pytest
import uvicorn
from starlette.applications import Starlette
from starlette.testclient import TestClient

from gpulease.client.decode.decode_errors import AdmissionReason, CompletionReason
from gpulease.client.decode.decode_reports import (
    EngineRebuilt,
    FinishedRequest,
    ForwardRevoked,
    PrefixChange,
    PrefixChanged,
    PromptRefused,
    RebindReport,
    StepReport,
)
from gpulease.client.decode.decode_requests import PromptRequest, SamplingParameters, StepTokens, TenantConfig
from gpulease.client.decode.openai.api_keys import ApiKeys, distinct_keys, key_digest
from gpulease.client.decode.openai.decode_metrics import DecodeMetrics
from gpulease.client.decode.page import decode_page, page_events
from gpulease.client.decode.page.decode_page import (
    FILES,
    MAX_HISTORIES,
    MAX_STREAMS,
    MAX_TENANT_STREAMS,
    SNAPSHOT_S,
    DecodePage,
    PageFeed,
)
from gpulease.client.decode.page.demo_traffic import TAIL_CHARACTERS, DemoText, DemoTraffic
from gpulease.client.decode.page.page_events import MAX_EVENTS, MERGED_S, EventKind, PageEvents
from gpulease.client.decode.page.page_history import PageHistory, TimeCounts
from gpulease.client.decode.sample_models import TINY_MODEL
from gpulease.client.decode.scheduler.scheduler import ContinuousBatchScheduler, SchedulerSettings
from gpulease.client.decode.supervisor.decoder import Decoder, DecoderSettings
from gpulease.client.decode.supervisor.engine_supervisor import PrefixState
from gpulease.client.errors import InvalidRequest
from helpers.browser import Browser, lacks_browser
from helpers.daemon import Daemon
from helpers.screens import CONTRAST, CUT, look_at
from helpers.waiting import wait_until

KEY = "an-operator's-key-of-a-test"
DIGEST = hashlib.sha256(KEY.encode()).digest()
BEARER = {"Authorization": f"Bearer {KEY}"}
KEYS = distinct_keys({tenant: key_digest(f"key of {tenant}") for tenant in ("ann", "bob")})
HOSTILE = "<img src=x onerror=\"document.title='taken'\"><script>document.title='taken'</script>\n" + "x" * 300
LONG = "a-tenant-with-a-name-as-long-as-names-may-be-" + "x" * 18


PREFIXES = [PrefixState("helper", 64, 2 << 20, 3, 192), PrefixState(HOSTILE, 32, 0, 0, 0)]
"""Two tenants: one with a shared prefix, and one with a region that has ended."""


class Pool:
    """A region that records who ends it."""

    def __init__(self, scene: "Scene", tenant: str) -> None:
        self._scene, self._tenant = scene, tenant
        self.region = self
        self.lease_id = 0xA1

    async def revoke(self, reason: str) -> None:
        if self._tenant == "dora":
            raise InvalidRequest("It is ended already")
        self._scene.revoked.append((self._tenant, reason))
        self._scene.decoder.scheduler.revoked(self._tenant, CompletionReason.REVOKED, 1.0)
        del self._scene.decoder.regions.pools[self._tenant]


class Scene:
    """What the page reads from a decoder and a demonstration, without either of them."""

    def __init__(self) -> None:
        tenants = [TenantConfig(name, 2, 12) for name in ("ann", "bob", LONG, "dora")]
        scheduler = ContinuousBatchScheduler(SchedulerSettings(8, 16, 8, 160, 512), tenants)
        self.revoked: list[tuple[str, str]] = []
        pools = {tenant.id: Pool(self, tenant.id) for tenant in tenants}
        regions = SimpleNamespace(pools=pools)
        self.decoder = SimpleNamespace(scheduler=scheduler, regions=regions, is_serving=True, prefixes=PREFIXES)
        self.demo = SimpleNamespace(texts={"ann": DemoText(HOSTILE), "bob": DemoText("It goes on.")})
        decoder, demo = lambda: cast(Decoder, self.decoder), lambda: cast(DemoTraffic, self.demo)
        self.page = DecodePage(decoder, DIGEST, "tiny", KEYS, demo)

    def client(self, tenant: str = "") -> TestClient:
        """A client with the operator's key, or a tenant's."""
        key = {"Authorization": f"Bearer key of {tenant}"} if tenant else BEARER
        return TestClient(Starlette(routes=self.page.routes()), headers=key)


@pytest.fixture
def scene() -> Scene:
    return Scene()


def request(tenant: str, name: str = "one") -> PromptRequest:
    return PromptRequest(tenant, name, (1, 2, 3), SamplingParameters(), 40)


def finished(
    tenant: str, reason: CompletionReason | AdmissionReason, first_token_at: float | None = None, detail: str = ""
) -> FinishedRequest:
    """Return a request that arrived at 1.0."""
    return FinishedRequest(
        tenant, "r", (1,), (), SamplingParameters(), reason, detail, 1.0, first_token_at, 9.5, 0, 0, 0, None
    )


def step(tenant: str, tokens: int) -> StepReport:
    requests = [request(tenant, str(row)) for row in range(tokens)]
    told = StepTokens(requests, [9] * tokens, [3] * tokens, range(tokens))
    return StepReport(tokens, tokens, told, 0.001)


# --- the state ---


def test_rates_are_means_of_the_last_seconds(scene: Scene) -> None:
    now = [0.0]
    feed = PageFeed(lambda: cast(Decoder, scene.decoder), "tiny", clock=lambda: now[0])
    feed.on_step(step("ann", 1000))
    feed.state()
    rates = []
    for _ in range(12):
        now[0] += 0.5
        feed.on_step(step("ann", 10))
        rates.append(feed.state()["tenants"][0]["tokens_s"])
    assert rates == [20.0] * 12, "what came before somebody watched is in no rate"
    now[0] += 60
    assert feed.state()["tokens_s"] == 0


def test_a_state_tells_blocks_queues_and_losses(scene: Scene) -> None:
    feed, scheduler = scene.page.observer, scene.decoder.scheduler
    scheduler.submit(request("ann"), 0.0)
    scheduler.submit(request("bob", "of bob"), 0.0)
    scheduler.plan(0.0)
    for name in ("two", "three"):
        scheduler.submit(PromptRequest("bob", name, (1,), SamplingParameters(), 150, 60.0), 0.0)
    feed.on_rebind(RebindReport("ann", "one", "one~1", 4, CompletionReason.REVOKED, False, 0.0312))
    state = feed.state()
    ann, bob = state["tenants"][:2]
    assert (ann["live"], ann["blocks"], ann["blocks_used"], ann["blocks_at_most"]) == (1, 12, 1, 12)
    assert (ann["rebinds"], ann["rebind_ms"], bob["rebind_ms"]) == (1, 31.2, None)
    assert (bob["live"], bob["waiting"], state["waiting"], state["live"]) == (2, 1, 1, 3)
    latest = state["events"][0]["text"]
    assert latest == "A request continues, 31 ms after the loss of its region. Tokens computed again: 4."
    assert (state["model"], state["host"]) == ("tiny", socket.gethostname())
    assert state["serving"]
    scene.decoder.is_serving = False
    assert not feed.state()["serving"], "its engine is lost"


def test_a_state_tells_times_to_the_first_token_and_refusals(scene: Scene) -> None:
    feed = scene.page.observer
    for first_token_at in (1.1, 1.3, 9.0):
        feed.on_finished(finished("ann", CompletionReason.MAX_TOKENS_REACHED, first_token_at))
    feed.on_finished(finished("ann", CompletionReason.CANCELLED))
    feed.on_finished(finished("bob", AdmissionReason.QUOTA_EXCEEDED, detail="QuotaExceeded: 64 wait already"))
    feed.on_finished(finished("bob", CompletionReason.DEADLINE_EXCEEDED, detail="PoolExhausted: no room"))
    feed.on_prompt_refused(PromptRefused("bob", "TextNotRead", "the text of bob's prompt"))
    metrics = DecodeMetrics(["ann"], clock=iter((5.0, 5.02, 5.04)).__next__, on_gap=feed.on_gap)
    for _ in range(3):
        metrics.on_step(step("ann", 2))
    state = feed.state()
    ann, bob = state["tenants"][:2]
    assert ann["first_token_ms"] == pytest.approx((300.0, 8000.0), rel=0.01)
    assert ann["gap_ms"] == pytest.approx((20.0, 20.0), rel=0.01)
    assert (bob["first_token_ms"], bob["gap_ms"]) == ((None, None), (None, None))
    refused = {"QuotaExceeded": 1, "DeadlineExceeded": 1, "TextNotRead": 1}
    assert (ann["refused"], bob["refused"], state["refused"]) == ({}, refused, 3)
    # The text of a request is not shown.
    assert [event["text"] for event in state["events"]] == ["3 requests were refused, the last one: TextNotRead"]


def test_a_state_shows_the_shared_prefixes_and_their_ends(scene: Scene) -> None:
    feed = scene.page.observer
    for change in PrefixChange:
        feed.on_prefix_changed(PrefixChanged("helper", change, "Revoked: by the operator."))
    state = feed.state()
    helper, ended = state["prefixes"]
    assert helper == {
        "model": "tiny",
        "name": "helper",
        "tokens": 64,
        "region_bytes": 2 << 20,
        "requests": 3,
        "reused_tokens": 192,
    }
    assert ended["region_bytes"] == 0
    assert [(event["tenant"], event["text"]) for event in state["events"]] == [
        (
            "helper",
            "This prefix is not shared until another engine is opened. Why its region ended: Revoked: by the operator.",
        ),
        ("helper", "This shared prefix was computed again, for another engine."),
    ]


# --- events and history ---


def test_like_events_of_some_seconds_are_one() -> None:
    events = PageEvents()
    events.add(0.0, "ann", EventKind.REPLAYED, seconds=0.02, tokens=4, detail="its region")
    for at in range(MAX_EVENTS * 2):
        events.add(1.0 + at / 100, "bob", EventKind.REFUSED, detail="full")
    events.add(2.0, "ann", EventKind.REPLAYED, seconds=0.01, tokens=5, detail="the engine")
    assert [event["text"] for event in events.shown(2.0)] == [
        "2 requests continue, 20 ms after the loss of the engine at most. Tokens computed again: 9.",
        f"{2 * MAX_EVENTS} requests were refused, the last one: full",
    ]
    events.add(2.0 + MERGED_S, "ann", EventKind.REPLAYED)
    assert len(events.shown(20.0)) == 3
    for number in range(2 * MAX_EVENTS):
        events.add(30.0, f"tenant {number}", EventKind.REVOKED_HERE)
    assert len(events.shown(30.0)) == MAX_EVENTS


@pytest.mark.parametrize("kind", EventKind)
def test_every_event_is_a_sentence(kind: EventKind) -> None:
    events = PageEvents()
    for _ in range(2):
        events.add(0.0, "ann", kind, seconds=0.02, tokens=4, detail="It is so.")
        text = events.shown(0.0)[0]["text"]
        assert text[0].isupper() or text[0].isdigit()
        assert text.endswith(".")


def test_the_history_has_a_figure_for_each_slot_that_is_over() -> None:
    history = PageHistory(1000.0)
    history.add_tokens(1001.0, 50)
    history.add_tokens(1009.9, 30)
    for kind in ("TooLarge", "QuotaExceeded", "QuotaExceeded"):
        history.add_refusal(1025.0, kind)
    for seconds in (0.1, 0.2, 0.6):
        history.add_first_token(1025.0, seconds)
    history.add_gaps(1026.0, 0.004, 98)
    history.add_gaps(1026.0, 0.03, 2)
    shown = history.shown(1029.0)
    history.add_tokens(1031.0, 99)
    assert history.shown(1035.0) == {
        "span_s": 300,
        "age_s": [25.0, 15.0, 5.0],
        "tokens_s": [8.0, 0.0, 0.0],
        "first_token_ms": [None, None, pytest.approx(200.0, rel=0.01)],
        "first_token_p99_ms": [None, None, pytest.approx(600.0, rel=0.01)],
        "gap_ms": [None, None, pytest.approx(4.0, rel=0.01)],
        "gap_p99_ms": [None, None, pytest.approx(30.0, rel=0.01)],
        "refused": [0, 0, 3],
        "refused_by": {"QuotaExceeded": 2, "TooLarge": 1},
    }
    assert (shown["refused"], shown["gap_ms"]) == ([0, 0], [None, None]), "a slot that is not over is not shown"


def test_percentiles_of_many_times_are_those_of_their_list() -> None:
    times, counts = [0.0, *(1e-5 * 1.013**number for number in range(997))], TimeCounts()
    for seconds in times:
        counts.add(seconds)
    shares = (0.01, 0.5, 0.99, 1.0)
    for share, found in zip(shares, counts.percentiles_ms(*shares), strict=True):
        exact = sorted(times)[max(1, -(-round(share * len(times) * 100) // 100)) - 1]
        assert found == pytest.approx(max(exact, 1e-6) * 1e3, rel=0.025)


def test_percentiles_of_the_latest_times_forget_older_ones() -> None:
    latest = TimeCounts(latest=3)
    assert latest.percentiles_ms(0.5, 0.99) == (None, None)
    for seconds, count in ((9.0, 50), (0.001, 1), (0.002, 2), (0.001, 1)):
        latest.add(seconds, count)
    alone = TimeCounts()
    for seconds in (0.001, 0.002, 0.002, 0.001):
        alone.add(seconds)
    shares = (0.25, 0.5, 0.75, 1.0)
    assert latest.percentiles_ms(*shares) == alone.percentiles_ms(*shares)


def test_the_history_is_an_hour_at_most() -> None:
    history = PageHistory(0.0)
    for at in range(0, 8000, 10):
        history.add_tokens(float(at), 1)
    shown = history.shown(8000.0)
    assert (shown["span_s"], len(shown["tokens_s"]), set(shown["tokens_s"])) == (3600, 360, {0.1})
    assert shown["age_s"] == [3590.0 - 10 * slot for slot in range(360)]


def test_texts_are_those_of_the_demonstration_alone(scene: Scene) -> None:
    assert [tenant["text"] for tenant in scene.page.observer.state()["tenants"]] == [HOSTILE, "It goes on.", None, None]


def test_events_are_bounded_and_the_latest_are_first(scene: Scene) -> None:
    feed = scene.page.observer
    for number in range(MAX_EVENTS):
        feed.on_forward_revoked(ForwardRevoked(7, f"tenant {number}", None, 3, 0.000123))
    feed.on_engine_rebuilt(EngineRebuilt("the lease expired", True, False, 1.5))
    texts = [event["text"] for event in feed.state()["events"]]
    assert len(texts) == MAX_EVENTS
    assert texts[:2] == [
        "The engine was lost; another one serves after 1,500 ms. Why it was lost: the lease expired",
        "Its region has ended: a step that needed it was stopped before it began, 123 µs after the region's end.",
    ]


def test_without_a_decoder_there_is_a_state() -> None:
    assert PageFeed(lambda: None, "tiny").state()["serving"] is False


# --- who may see and press ---


def test_state_and_acts_take_the_operator_s_key(scene: Scene) -> None:
    for wrong in ("", "Bearer ", f"Bearer {KEY}x", f"Basic {KEY}"):
        client = TestClient(Starlette(routes=scene.page.routes()))
        client.headers["Authorization"] = wrong
        assert client.get("/page/events").status_code == 401
        assert client.get("/page/history").status_code == 401
        assert client.delete("/page/tenants/ann/region").status_code == 401
        assert client.get("/").status_code == 200
    assert scene.revoked == []


def test_a_tenant_s_key_shows_that_tenant_alone(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decode_page, "STREAM_S", SNAPSHOT_S / 2)
    feed = scene.page.observer
    now = [feed._began_at]
    monkeypatch.setattr(feed, "_clock", lambda: now[0])
    for tenant, tokens in (("ann", 30), ("bob", 50)):
        feed.on_step(step(tenant, tokens))
        feed.on_gap(tenant, 0.01, tokens)
        feed.on_finished(finished(tenant, AdmissionReason.QUOTA_EXCEEDED, detail=f"of {tenant}"))
        feed.on_finished(finished(tenant, CompletionReason.MAX_TOKENS_REACHED, 1.2))
    feed.on_prefix_changed(PrefixChanged("ann", PrefixChange.END, "a prefix with the name of a tenant"))
    feed.on_engine_rebuilt(EngineRebuilt("a path of the host", True, False, 1.5))
    now[0] += 10.0
    client = scene.client("ann")
    answer = client.get("/page/events")
    event = answer.text.removesuffix("\n\n").split("\n\n")[0]
    state, history = json.loads(event.removeprefix("data: ")), client.get("/page/history").json()
    (ann,) = state["tenants"]
    assert (state["viewer"], ann["id"], ann["tokens"], state["refused"]) == ("ann", "ann", 30, 1)
    assert [one["text"] for one in state["events"]] == ["A request was refused: of ann"]
    assert (sum(history["tokens_s"]), sum(history["refused"])) == (3.0, 1)
    # Nothing about others: names, sums, the host.
    assert "bob" not in answer.text
    assert (state["host"], state["prefixes"], state["steps"]) == ("", [], None)
    assert (state["live"], state["waiting"]) == (0, 0)
    # The tenant's key can't change anything.
    assert client.delete("/page/tenants/ann/region").status_code == 403
    assert scene.revoked == []
    assert scene.client().get("/page/history").json()["tokens_s"][-1] == 8.0


def test_tenants_with_an_hour_of_their_own_are_bounded(scene: Scene) -> None:
    feed = scene.page.observer
    for number in range(MAX_HISTORIES + 10):
        feed.on_gap(f"tenant {number}", 0.01, 1)
    assert len(feed._histories) == MAX_HISTORIES
    assert feed.history(f"tenant {MAX_HISTORIES + 5}")["tokens_s"] == []


def test_every_answer_has_the_security_headers(scene: Scene) -> None:
    client = scene.client()
    paths = ("/", *(f"/page/{name}" for name in FILES), "/page/history")
    answers = [client.get(path) for path in paths] + [
        client.head("/page/events"),
        client.delete("/page/tenants/x/region"),
    ]
    assert [answer.status_code for answer in answers] == [200] * (len(paths) + 1) + [404]
    for answer in answers:
        assert "require-trusted-types-for 'script'" in answer.headers["Content-Security-Policy"]
        assert answer.headers["Cache-Control"] == "no-store"
    for path in ("/page/decode_page.py", "/page/..%2fdecoder.py", "/page/index.html"):
        assert client.get(path).status_code == 404


def test_a_stream_has_states_and_ends(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decode_page, "STREAM_S", SNAPSHOT_S / 2)
    answer = scene.client().get("/page/events")
    assert answer.headers["Content-Type"].startswith("text/event-stream")
    (event,) = answer.text.removesuffix("\n\n").split("\n\n")
    assert json.loads(event.removeprefix("data: "))["tenants"][0]["id"] == "ann"
    assert (scene.page._streams, scene.page._encoded) == ({}, {})


def test_one_stream_too_many_is_refused(scene: Scene) -> None:
    streams = scene.page._streams
    streams[None] = MAX_STREAMS
    answer = scene.client().get("/page/events")
    assert (answer.status_code, answer.headers["Retry-After"]) == (503, "5")
    # Tenants have other streams, of which one tenant can't use all.
    assert scene.client("ann").head("/page/events").status_code == 200
    streams["ann"] = MAX_TENANT_STREAMS
    assert [scene.client(tenant).head("/page/events").status_code for tenant in ("ann", "bob")] == [503, 200]
    streams["dora"] = MAX_STREAMS - MAX_TENANT_STREAMS
    assert scene.client("bob").head("/page/events").status_code == 503
    del streams[None]
    assert scene.client().head("/page/events").status_code == 200


def test_a_press_revokes_the_region_of_that_tenant(scene: Scene) -> None:
    client = scene.client()
    assert client.delete("/page/tenants/ann/region").status_code == 200
    assert scene.revoked == [("ann", "revoked on the decode server's page")]
    again, refused = client.delete("/page/tenants/ann/region"), client.delete("/page/tenants/dora/region")
    assert (again.status_code, refused.status_code) == (409, 409)
    assert "another one is being opened" in again.json()["detail"]
    assert "It is ended already" in refused.json()["detail"]
    assert [event["tenant"] for event in scene.page.observer.state()["events"]] == ["ann"]


# --- a real decoder ---


@pytest.mark.exhaustive
def test_a_demo_s_tenant_comes_back_and_the_others_go_on(daemon: Daemon) -> None:
    async def scene() -> None:
        tenants = [TenantConfig(name, 2, 16) for name in ("ann", "bob")]
        opened: list[Decoder] = []
        demos: list[DemoTraffic] = []
        page = DecodePage(lambda: opened[0], DIGEST, "tiny", ApiKeys({}), lambda: demos[0])
        settings = DecoderSettings(max_rows=8, prefill_rows=4, max_sequences=4)
        async with Decoder.open(
            TINY_MODEL, tenants, settings, address=daemon.address, observers=[page.observer]
        ) as decoder:
            opened.append(decoder)
            demos.append(DemoTraffic(decoder, ["ann", "bob"]))
            task = asyncio.create_task(demos[0].run())

            async def until(tenant: str, what: str, least: int) -> dict[str, Any]:
                while True:
                    state = page.observer.state()
                    found: dict[str, Any] = next(one for one in state["tenants"] if one["id"] == tenant)
                    if found[what] >= least:
                        return found
                    await asyncio.sleep(0.01)

            await until("ann", "tokens", 5)
            await until("bob", "tokens", 5)
            transport = httpx.ASGITransport(Starlette(routes=page.routes()))
            async with httpx.AsyncClient(transport=transport, base_url="http://x", headers=BEARER) as client:
                answer = await client.delete("/page/tenants/ann/region")
            assert answer.status_code == 200, answer.text
            ann = await until("ann", "rebinds", 1)
            bob = await until("bob", "tokens", 30)
            assert ann["blocks"] == 16
            assert bob["rebinds"] == 0
            assert 0 < len(ann["text"]) <= TAIL_CHARACTERS
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    asyncio.run(scene())


# --- in a browser ---


@contextmanager
def served(page: DecodePage) -> Iterator[str]:
    """Return the page's URL, with the key at its end."""
    config = uvicorn.Config(
        Starlette(routes=page.routes()), port=0, loop="asyncio", log_level="error", timeout_graceful_shutdown=1
    )
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run)
    thread.start()
    try:
        wait_until(lambda: server.started, "the server listens")
        port = server.servers[0].sockets[0].getsockname()[1]
        yield f"http://127.0.0.1:{port}/"
    finally:
        server.should_exit = True
        thread.join()


@pytest.mark.exhaustive
@pytest.mark.skipif(bool(lacks_browser()), reason=lacks_browser())
def test_the_page_in_a_browser(scene: Scene, tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    scheduler = scene.decoder.scheduler
    scheduler.submit(request("ann"), 0.0)
    scheduler.plan(0.0)
    feed = scene.page.observer
    # Reading the page takes as long as the host needs.
    monkeypatch.setattr(page_events, "MERGED_S", 3600.0)
    feed.on_rebind(RebindReport(LONG, "one", "one~1", 4, CompletionReason.REVOKED, False, 12.3456))
    feed.on_finished(finished("bob", AdmissionReason.QUOTA_EXCEEDED, detail=HOSTILE))
    slots = range(40)
    figures = {"age_s": [400.0 - 10 * slot for slot in slots], "refused": [slot // 13 for slot in slots]}
    figures |= {"tokens_s": [slot % 9 * 30.5 for slot in slots]}
    figures |= {"first_token_ms": [None if 5 < slot < 9 else 80.0 + slot for slot in slots]}
    figures |= {"first_token_p99_ms": [None if 5 < slot < 9 else 200.0 + slot for slot in slots]}
    figures |= {"gap_ms": [3.25] * 40, "gap_p99_ms": [12.5] * 40}
    figures |= {"refused_by": {"QuotaExceeded": 1234, "TooLarge": 1}}
    monkeypatch.setattr(feed, "history", lambda _: {"span_s": 400} | figures)
    feed.on_gap("ann", 0.00325, 2)
    with served(scene.page) as url, Browser() as browser:
        browser.open(url)
        browser.wait_for("#status", "This page requires a key: the operator's, or a tenant's.")
        assert browser.text("#tenants") == ""
        browser.open(f"{url}#key={KEY}")
        browser.wait_for("#status", "Live")
        assert browser.run("return document.title") == f"tiny on {socket.gethostname()} - gpulease decode"
        browser.wait_for("#plots .first .now", "119 ms; 239 ms")
        assert browser.text("#plots .gap .now") == "3.25 ms; 12.5 ms"
        assert browser.text("#plots .kinds") == "QuotaExceeded 1,234, TooLarge 1"
        # At most a hundredth off.
        assert browser.text(".card .gap")[:3] == "3.2"
        assert browser.text("#plots .tokens .most") == "at most 244"
        drawn = browser.run("return document.querySelector('#plots .first path').getAttribute('d')")
        assert drawn.count("M") == 2, "there is a gap"
        assert browser.run("return location.href") == url, "no screen shows the key"
        assert browser.text(".card .text").startswith(HOSTILE[:20])
        assert browser.run("return document.querySelectorAll('img, body script').length") == 0
        for width in (360, 768, 1280):
            for scheme in ("light", "dark"):
                look_at(browser, width, scheme)
                assert browser.run("return document.documentElement.scrollWidth") <= width
                assert (
                    browser.run(CUT, ".name, .rate, .revoke, .figures dd, .state, .slice, .words, h1, .totals dd") == []
                )
                faint = browser.run(CONTRAST)
                assert not faint, (width, scheme, faint)
                browser.screenshot(tmp_path / f"decode-{width}-{scheme}.png")
        browser.run("document.querySelector('.card .revoke').focus()")
        browser.press("\ue007")
        browser.wait_for("#revoke-about", "Work in progress (1 sequence) is computed again")
        browser.screenshot(tmp_path / "decode-dialog.png")
        assert not browser.run(CONTRAST)
        browser.press("\ue007")
        assert browser.run("return document.querySelector('dialog').open") is False
        assert scene.revoked == [], "Enter alone cancels"
        browser.run("document.querySelector('.card .revoke').click()")
        browser.run("document.querySelector('#revoke-do').click()")
        browser.wait_for("#revoke-outcome", "The region of ann is revoked.")
        browser.run("document.querySelector('#revoke-cancel').click()")
        browser.wait_for(".card .state", "Its region is gone")
        assert [tenant for tenant, _ in scene.revoked] == ["ann"]
        browser.wait_for("#events", "Its region was revoked on this page.")
        feed.on_finished(finished("bob", AdmissionReason.QUOTA_EXCEEDED, detail="64 wait already"))
        browser.wait_for("#events", "2 requests were refused, the last one: 64 wait already")
        scheduler.rebound("ann", 12, 2.0)
        browser.wait_for(".card .state", "Waiting")
        # A tenant's view.
        browser.run("sessionStorage.clear()")
        browser.open(f"{url}?bob#key=key%20of%20bob")
        browser.wait_for("#served", "tiny, as bob sees it")
        assert browser.run("return document.querySelectorAll('.card').length") == 1
        assert browser.run("return document.querySelector('.card .revoke').checkVisibility()") is False
        assert browser.run("return document.querySelector('#total-steps').checkVisibility()") is False
        complaints = [text for text in browser.complaints() if "401" not in text]
        assert complaints == []
