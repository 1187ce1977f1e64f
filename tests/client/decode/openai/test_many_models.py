"""A server with several models over HTTP: loads, parks and reloads change no token; and what clients see meanwhile."""

import asyncio
import itertools
import json
import os
import re
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from gpulease.client.decode import TenantConfig, open_model
from gpulease.client.decode.checkpoint.safetensors_folder import SafetensorsFolder
from gpulease.client.decode.decode_errors import AdmissionRefused, UnknownModel
from gpulease.client.decode.openai import openai_server
from gpulease.client.decode.openai.api_keys import distinct_keys, key_digest
from gpulease.client.decode.openai.fronts.front_messages import Begin, PlaceRequest, RequestSubmitted, ToFront
from gpulease.client.decode.openai.fronts.front_server import FrontConnection
from gpulease.client.decode.openai.openai_server import make_pool_application
from gpulease.client.decode.openai.served_models import ManyModels
from gpulease.client.decode.scheduler.model_residency import ResidencyLimits
from gpulease.client.decode.supervisor.model_pool import ModelPool, ModelSpec
from gpulease.client.decode.text import tokenizer
from gpulease.client.decode.text.named_prefixes import NamedPrefix
from helpers.daemon import Daemon, running
from helpers.decode.many_models import (
    ANN,
    PARKING,
    SETTINGS,
    PoolRig,
    asked,
    events_of,
    key_of,
    model_bytes,
    pool_rig,
    spec,
)
from helpers.waiting import wait_until
from lab.many_models import make_model

pytestmark = pytest.mark.usefixtures("_decode_kernels")

NAMES = ("a", "b", "c", "d")


@pytest.fixture(scope="module")
def audit(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("audit") / "log"


@pytest.fixture(scope="module")
def node(audit: Path) -> Iterator[Daemon]:
    with running(Daemon(vram=("400MiB",), config=f'audit = "{audit}"\n{PARKING}')) as daemon:
        yield daemon


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("models")
    return {name: make_model(folder / name, number) for number, name in enumerate(NAMES)}


def limits(models: int = 2, parked: int = 5, **others: Any) -> ResidencyLimits:
    size = model_bytes()
    return ResidencyLimits(models * size, parked * size, min_stay_s=0.0, **others)


@pytest.fixture(scope="module")
def rig(node: Daemon, paths: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[PoolRig]:
    specs: dict[str, ModelSpec] = {name: spec(path) for name, path in paths.items()}
    specs["ann-s"] = spec(paths["a"], [ANN])
    specs["broken"] = spec(tmp_path_factory.mktemp("broken") / "nothing.gguf")
    with pool_rig(node.address, specs, limits()) as rig:
        # Load each model once, so that each test leaves the same decoders open as it found.
        for name in (*NAMES, "ann-s"):
            rig.text(name)
        yield rig


def audit_text(audit: Path) -> str:
    return "".join(file.read_text() for file in ([audit] if audit.is_file() else sorted(audit.rglob("*"))))


def count(rig: PoolRig, model: str, kind: str) -> int:
    return int(rig.do(lambda: rig.pool.counts[model, kind]))


def test_requests_whose_bodies_are_read_or_whose_models_come_are_limited_by_tenant() -> None:
    async def part() -> None:
        ann = TenantConfig("ann", 1, 4, max_waiting=1)
        models = ManyModels(ModelPool({}, ResidencyLimits(1)), [ann], 1.0)
        async with models.place("ann"), models.place("ann"):
            with pytest.raises(AdmissionRefused, match="2 of its requests are already waiting"):
                await models.place("ann").__aenter__()
        async with models.place("ann"):
            assert models.coming["ann"] == 1
        assert models.coming["ann"] == 0

    asyncio.run(part())


def test_a_load_reads_no_tokenizer_again(rig: PoolRig, paths: dict[str, Path]) -> None:
    decoder, known = rig.pool.decoders["a"], rig.pool._tokenizers[paths["a"]][1]
    assert rig.wait_for(decoder.tokenizer()) is known
    # A changed file is read again.
    file = paths["a"] / "tokenizer.json"
    before = file.stat()
    assert rig.pool._tokenizer_of(paths["a"]) is known
    os.utime(file, (before.st_atime, before.st_mtime + 1))
    assert rig.pool._tokenizer_of(paths["a"]) is None
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert rig.pool._tokenizer_of(paths["a"]) is known


def test_texts_are_the_same_before_and_after_a_park_and_a_reload(rig: PoolRig) -> None:
    # The card has room for two models, so each round parks every model and returns it to the card.
    first = {name: rig.text(name) for name in NAMES}
    assert len(set(first.values())) > 1
    for _ in range(2):
        assert {name: rig.text(name) for name in NAMES} == first
    assert all(count(rig, name, "return") >= 1 for name in NAMES)
    assert {count(rig, name, "load") for name in NAMES} == {1}


def test_records_name_the_files_and_settings_of_each_load(tmp_path: Path) -> None:
    async def part() -> None:
        pool, path = ModelPool({}, ResidencyLimits(1)), make_model(tmp_path / "a", 0)
        first, again = [await pool._by("a", open_model(path), spec(path)) for _ in range(2)]
        assert again is first
        # Other weights, under the same name.
        (path / "model.safetensors").write_bytes((make_model(tmp_path / "b", 1) / "model.safetensors").read_bytes())
        other = await pool._by("a", open_model(path), spec(path))
        assert other.model_sha256 == open_model(path).sha256() != first.model_sha256
        unpacked = ModelSpec(path, (ANN,), replace(SETTINGS, packed=not SETTINGS.packed))
        assert (await pool._by("a", open_model(path), unpacked)).packed is unpacked.settings.packed

    asyncio.run(part())


def test_a_model_is_counted_although_its_texts_have_a_mistake(tmp_path: Path) -> None:
    """Its load then raises an error about the texts, rather than one about a missing size."""
    pool, path = ModelPool({}, ResidencyLimits(1)), make_model(tmp_path / "a", 0)
    size = pool._measure("a", spec(path)).size_bytes
    assert size == model_bytes(path) > 0
    assert pool._measure("a", spec(path, prefixes=(NamedPrefix("x", text="short"),))).size_bytes == size
    (path / "tokenizer.json").unlink()
    assert pool._measure("a", spec(path)).size_bytes == size


def test_models_are_listed_with_their_states(rig: PoolRig) -> None:
    rig.text("b")
    with rig.http() as http:
        listed = {one["id"]: one for one in http.get("/v1/models").json()["data"]}
        assert list(listed) == [*NAMES, "ann-s", "broken"]
        assert listed["b"]["gpulease"]["state"] == "loaded"
        assert listed["b"]["max_model_len"] == 96
        assert listed["b"]["gpulease"]["memory_bytes"] == model_bytes()
        assert http.get("/v1/models/b").json()["id"] == "b"
        ready = http.get("/ready")
        assert (ready.status_code, ready.json()["models"]["b"]["ready"]) == (200, True)
        assert http.get("/ready?model=b").status_code == 200
        assert http.get("/ready?model=z").status_code == 404
        assert http.get("/healthz").json()["models"]["b"]["state"] == "loaded"
        metrics = http.get("/metrics").text
    assert 'gpulease_decode_model_state{model="b",state="loaded"} 1.0' in metrics
    assert 'gpulease_decode_requests_total{model="b",reason="MaxTokensReached",tenant="ann"}' in metrics
    assert metrics.count("# TYPE gpulease_decode_tokens_total counter") == 1


def test_names_that_a_tenant_may_not_use_are_unknown_to_it(rig: PoolRig) -> None:
    with rig.http("bob") as http:
        replies = [http.post("/v1/completions", json=asked(name)) for name in ("z", "ann-s")]
        assert [reply.status_code for reply in replies] == [404, 404]
        assert {reply.json()["error"]["code"] for reply in replies} == {"model_not_found"}
        assert "ann-s" not in {one["id"] for one in http.get("/v1/models").json()["data"]}
        assert http.get("/v1/models/ann-s").status_code == 404
        nameless = http.post("/v1/completions", json={"prompt": "x"})
        assert (nameless.status_code, nameless.json()["error"]["param"]) == (400, "model")
        assert http.post("/v1/completions", content=b"{").json()["error"]["code"] == "invalid_json"
        assert http.post("/v1/completions", json={"model": 5}).status_code == 400
    assert rig.text("ann-s") == rig.text("a")


def test_a_model_that_can_t_be_loaded_says_so_and_is_tried_by_a_later_request(rig: PoolRig) -> None:
    with rig.http() as http:
        failed = http.post("/v1/completions", json=asked("broken"))
        assert (failed.status_code, failed.json()["error"]["code"]) == (503, "model_failed")
        assert "nothing.gguf" not in failed.text
        assert int(failed.headers["Retry-After"]) >= 1
        loads = count(rig, "broken", "load_failed")
        again = http.post("/v1/completions", json=asked("broken"))
        assert (again.status_code, again.json()["error"]["code"]) == (503, "model_failed")
        assert count(rig, "broken", "load_failed") == loads
        listed = http.get("/v1/models/broken").json()["gpulease"]
        assert (listed["state"], listed["reason"]) == ("failed", "ModelRejected")
        assert http.get("/ready?model=broken").status_code == 503
        assert http.get("/ready").status_code == 200


def test_a_stream_gets_comments_while_its_model_comes(rig: PoolRig) -> None:
    wanted = rig.text("d")
    for name in ("a", "b"):
        rig.text(name)
    wait_until(lambda: rig.state("d") == "parked", "d to be parked")
    with rig.http() as http, http.stream("POST", "/v1/completions", json=asked("d", stream=True)) as reply:
        objects, comments = events_of(reply.iter_lines())
    assert comments[0] == ": loading"
    assert "".join(one["choices"][0]["text"] for one in objects) == wanted
    assert {one["model"] for one in objects} == {"d"}
    # The response has begun, so an error comes as the stream's last event.
    with rig.http() as http:
        broken = rig.pool.residency.models["broken"]
        wait_until(lambda: broken.retry_at < time.monotonic(), "the back-off's end")
        with http.stream("POST", "/v1/completions", json=asked("broken", stream=True)) as reply:
            objects, comments = events_of(reply.iter_lines())
    assert comments[0] == ": loading"
    assert objects[-1]["error"]["code"] == "model_failed"
    assert objects[-1]["gpulease"]["status"] == 503


@pytest.mark.parametrize("path", ["completions", "responses"])
def test_a_caller_that_takes_nothing_while_its_model_comes_has_no_tokens_computed(
    rig: PoolRig, monkeypatch: pytest.MonkeyPatch, path: str
) -> None:
    # The card has room for two models, so this one has to be loaded.
    for name in ("b", "c"):
        rig.text(name)
    keys = distinct_keys({"ann": key_digest(key_of("ann"))})
    app = make_pool_application(rig.pool, rig.models, keys)
    body = asked("a", stream=True)
    if path == "responses":
        body = {"model": "a", "input": "Changed in version", "stream": True, "max_output_tokens": 16}
    received = [{"type": "http.request", "body": json.dumps(body).encode()}]
    headers = [(b"authorization", f"Bearer {key_of('ann')}".encode())]
    scope = {"type": "http", "method": "POST", "path": f"/v1/{path}", "headers": headers, "query_string": b""}

    async def receive() -> dict[str, Any]:
        return received.pop() if received else await asyncio.Future()

    async def send(_: object) -> None:
        await asyncio.Future()

    def ends() -> dict[str, str]:
        with rig.http() as http:
            found = re.findall(
                r'requests_total\{model="a",reason="(\w+)",tenant="ann"\} (\S+)', http.get("/metrics").text
            )
        return dict(found)

    before = ends()
    monkeypatch.setattr(openai_server, "SEND_LIMIT_S", 0.0)
    rig.wait_for(app(scope, receive, send))
    monkeypatch.undo()
    wait_until(lambda: ends() != before, "its end", seen=ends)
    assert [reason for reason, count in ends().items() if count != before.get(reason, "0.0")] == ["Cancelled"]


def test_responses_and_tokens_are_those_of_the_model_that_is_named(rig: PoolRig) -> None:
    with rig.http() as http:
        said = {"model": "c", "input": "What?", "max_output_tokens": 6, "temperature": 0}
        assert http.post("/v1/responses", json=said).json()["model"] == "c"
        tokens = http.post("/tokenize", json={"model": "c", "prompt": "Changed"}).json()
        assert (tokens["max_model_len"], tokens["count"] > 0) == (96, True)
        refused = http.post("/v1/embeddings", json={"model": "c", "input": "x"})
        assert refused.json()["error"]["code"] == "unsupported_model"


def test_a_tenant_s_revocation_touches_its_own_requests_alone(rig: PoolRig) -> None:
    wanted = rig.text("a"), rig.text("a", "bob"), rig.text("b")
    rig.text("a")
    rig.wait_for(rig.pool.decoders["a"].regions.pools["ann"].region.revoke("test"))
    assert (rig.text("a"), rig.text("a", "bob"), rig.text("b")) == wanted
    # Also while the model is parked: the next request opens the region again.
    for name in ("c", "d"):
        rig.text(name)
    wait_until(lambda: rig.state("a") == "parked", "a to be parked")
    rig.wait_for(rig.pool.decoders["a"].regions.pools["ann"].region.revoke("test"))
    assert (rig.text("a"), rig.text("a", "bob"), rig.text("b")) == wanted


def test_the_page_shows_the_models_and_revokes_a_tenant_s_regions(rig: PoolRig) -> None:
    wanted = rig.text("a"), rig.text("b", "bob")
    with rig.http("operator") as http:
        with http.stream("GET", "/page/events") as reply:
            (state, *_), _ = events_of(itertools.islice(reply.iter_lines(), 2))
        models = {one["id"]: one for one in state["models"]}
        assert list(models) == [*NAMES, "ann-s", "broken"]
        assert models["b"]["state"] == "loaded"
        assert [tenant["id"] for tenant in state["tenants"]] == ["ann", "bob"]
        revoked = http.delete("/page/tenants/ann/region")
        # One region for each model that is open, loaded or parked.
        assert len(revoked.json()["region"].split(", ")) == 5
        assert http.delete("/page/tenants/zoe/region").status_code == 404
    pools = rig.do(lambda: [rig.pool.decoders[name].regions.pools["bob"] for name in NAMES])
    assert [pool.region.revoked for pool in pools] == [False] * len(NAMES)
    assert (rig.text("a"), rig.text("b", "bob")) == wanted


def test_a_tenant_sees_the_counts_of_its_own_requests_alone(rig: PoolRig) -> None:
    def counts(models: list[dict[str, Any]], model: str = "a") -> tuple[int, int]:
        (found,) = [one.get("gpulease", one) for one in models if one["id"] == model]
        return found["waiting"], found["in_use"]

    def listed(tenant: str) -> tuple[int, int]:
        with rig.http(tenant) as http:
            return counts(http.get("/v1/models").json()["data"])

    def paged(tenant: str) -> tuple[int, int]:
        with rig.http(tenant) as http, http.stream("GET", "/page/events") as reply:
            (state, *_), _ = events_of(itertools.islice(reply.iter_lines(), 2))
        return counts(state["models"])

    rig.text("a")
    using = [rig.pool.use("a", tenant=tenant, wait_s=60) for tenant in ("ann", "ann", "bob")]
    uses = [rig.wait_for(use.__aenter__()) for use in using]
    try:
        assert [use.tenant for use in uses] == ["ann", "ann", "bob"]
        assert (listed("ann"), listed("bob")) == ((0, 2), (0, 1))
        wait_until(lambda: (paged("ann"), paged("bob"), paged("operator")) == ((0, 2), (0, 1), (0, 3)), "the counts")
        with rig.http() as http:
            # These paths need no key.
            for path in ("/healthz", "/ready"):
                assert http.get(path).json()["models"]["a"].keys() == {"state", "memory_bytes", "ready"}, path
    finally:
        for use in using:
            rig.wait_for(use.__aexit__(None, None, None))
    assert (listed("ann"), listed("bob")) == ((0, 0), (0, 0))


async def count_while_waiting(rig: PoolRig, paths: dict[str, Path]) -> None:
    """Count a tenant's requests that wait for a model. Another tenant does not see them."""
    await rig.pool.change({"a": spec(paths["a"], wait_s=32.0)})
    waiting = asyncio.create_task(rig.pool.use("a", tenant="bob", wait_s=60).__aenter__())
    await asyncio.sleep(0)
    found = [rig.pool.request_counts("a", tenant)["waiting"] for tenant in ("ann", "bob", None)]
    waiting.cancel()
    await asyncio.gather(waiting, return_exceptions=True)
    assert (found, rig.pool.request_counts("a", "bob")["waiting"]) == ([0, 1, 1], 0)


def test_a_model_in_use_stays_until_its_stream_has_ended(node: Daemon, paths: dict[str, Path]) -> None:
    specs = {name: spec(paths[name]) for name in ("a", "b")}
    with pool_rig(node.address, specs, limits(models=1), load_wait_s=0.2) as rig, rig.http() as http:
        # The first load takes longer than a request without a stream may wait.
        early = http.post("/v1/completions", json=asked("a"))
        assert (early.status_code, early.json()["error"]["code"]) == (503, "model_loading")
        assert early.headers["Retry-After"]
        wait_until(lambda: rig.state("a") == "loaded", "a to be loaded")
        body = asked("a", stream=True, max_tokens=60, ignore_eos=True)
        with http.stream("POST", "/v1/completions", json=body) as reply:
            lines = reply.iter_lines()
            next(lines)
            # A request that no longer waits for b is not counted any more.
            b = rig.pool.residency.models["b"]
            with (
                rig.http("bob") as other,
                other.stream("POST", "/v1/completions", json=asked("b", stream=True)) as gone,
            ):
                comments = gone.iter_lines()
                assert next(comments) == ": loading"
                assert len(b.waiting) == 1
            wait_until(lambda: not b.waiting, "the end of the wait")
            # Then a makes room for b: the request for b waits until the one for a has ended.
            said = asked("b", stream=True)
            with rig.http("bob") as other, other.stream("POST", "/v1/completions", json=said) as waiting:
                objects, _ = events_of(waiting.iter_lines())
            assert "error" not in objects[-1]
            objects, _ = events_of(lines)
            assert objects[-1]["choices"][0]["finish_reason"] == "length"
        assert rig.state("b") == "loaded"
        assert rig.state("a") in ("parked", "unloaded")


async def withdraw_while_waiting(rig: PoolRig, paths: dict[str, Path]) -> None:
    """Withdraw a model from a tenant with a waiting request, which is then refused as if the model did not exist."""
    ours, alone = spec(paths["a"], wait_s=31.0), spec(paths["a"], [ANN])
    # Changed settings load the model again, so the request waits.
    await rig.pool.change({"a": ours})
    waiting = asyncio.create_task(rig.pool.use("a", tenant="bob", wait_s=60).__aenter__())
    await asyncio.sleep(0)
    await rig.pool.change({"a": alone})
    with pytest.raises(UnknownModel):
        await waiting
    assert not rig.pool.residency.models["a"].in_use


async def remove_while_read(rig: PoolRig) -> None:
    """Reload without a model while the server reads a front's request for it: the request is still served."""
    sent: list[ToFront] = []
    connection = FrontConnection(rig.models, sent.append)
    await connection.receive(PlaceRequest(1, "ann"))
    await connection.receive(Begin(1, json.dumps(asked("a")).encode(), False, "one", "a"))
    while not rig.pool.residency.models["a"].in_use:  # noqa: ASYNC110  # the pool has no event for it
        await asyncio.sleep(0)
    await rig.pool.change({})
    async with asyncio.timeout(30):
        while len(sent) < 2:  # noqa: ASYNC110  # the connection has no event for it
            await asyncio.sleep(0.01)
    assert isinstance(sent[1], RequestSubmitted), sent[1]
    await connection.close()


def reads_here(*_: object) -> None:
    raise AssertionError("this process reads a vocabulary, and the steps of other models stop")


def test_a_reload_adds_and_removes_models_while_others_serve(
    node: Daemon, paths: dict[str, Path], audit: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    specs = {name: spec(paths[name]) for name in ("a", "b")}
    with pool_rig(node.address, specs, limits(parked=0), is_audited=True) as rig, rig.http() as http:
        wanted = rig.text("a"), rig.text("b")
        rig.wait_for(rig.pool.change({"b": specs["b"]}))
        wait_until(lambda: rig.do(lambda: "a" not in rig.pool.residency.models), "a to be gone")
        assert http.post("/v1/completions", json=asked("a")).status_code == 404
        with monkeypatch.context() as patched:
            patched.setattr(SafetensorsFolder, "tokenizer", reads_here)
            patched.setattr(tokenizer, "library_tokenizer", reads_here)
            rig.wait_for(rig.pool.change(specs))
            assert (rig.text("a"), rig.text("b")) == wanted
        assert (count(rig, "a", "load"), count(rig, "b", "load")) == (2, 1)
        # A new alias does not make it another model: nothing is loaded again.
        named = {**specs, "b": replace(specs["b"], aliases=("org/b",))}
        rig.wait_for(rig.pool.change(named))
        listed = {one["id"]: one.get("root") for one in http.get("/v1/models").json()["data"]}
        assert listed == {"a": None, "b": None, "org/b": "b"}
        assert http.get("/ready", params={"model": "org/b"}).status_code == 200
        reply = http.post("/v1/completions", json=asked("org/b")).json()
        assert (reply["model"], reply["choices"][0]["text"]) == ("b", wanted[1])
        assert http.post("/tokenize", json={"model": "org/b", "prompt": "a"}).status_code == 200
        assert count(rig, "b", "load") == 1
        rig.wait_for(rig.pool.change(specs))
        assert http.post("/v1/completions", json=asked("org/b")).status_code == 404
        rig.wait_for(count_while_waiting(rig, paths))
        rig.wait_for(withdraw_while_waiting(rig, paths))
        rig.wait_for(remove_while_read(rig))
        # A model with other shared prefixes is loaded again. Neither tenant has sent a prompt with one of them before.
        text = "Changed in version 3.7: the with statement is an expression."
        prompt = {"prompt": f"{text} It ", "seed": 3}
        rig.wait_for(rig.pool.change({"b": specs["b"]}))
        plain = [rig.complete("b", tenant, **prompt) for tenant in ("ann", "bob")]
        rig.wait_for(rig.pool.change({"b": replace(specs["b"], prefixes=(NamedPrefix("with", text=text),))}))
        wait_until(lambda: rig.state("b") == "unloaded", "b to be unloaded")
        shared = [rig.complete("b", tenant, **prompt) for tenant in ("ann", "bob")]
        assert [reply["choices"] for reply in shared] == [reply["choices"] for reply in plain]
        cached = [reply["usage"]["prompt_tokens_details"]["cached_tokens"] for reply in (*plain, *shared)]
        assert cached[:2] == [0, 0] != cached[2:] == [cached[2]] * 2
        assert cached[2] >= 16
    # The records contain the models' names in requests, not the files' names.
    names_of_records = re.findall(r'"event":"decode",.*?"model":\{"name":"(\w+)"', audit_text(audit))
    assert sorted(names_of_records) == ["a", "a", "a", *"bbbbbbb"]


def test_fronts_serve_many_models(node: Daemon, paths: dict[str, Path]) -> None:
    specs = {name: spec(paths[name]) for name in ("a", "b")}
    with pool_rig(node.address, specs, limits(models=1), http_processes=1) as rig:
        wanted = {name: rig.text(name) for name in specs}
        with rig.http() as http:
            with http.stream("POST", "/v1/completions", json=asked("a", stream=True)) as reply:
                objects, comments = events_of(reply.iter_lines())
            assert comments[0] == ": loading"
            assert "".join(one["choices"][0]["text"] for one in objects) == wanted["a"]
            assert http.post("/v1/completions", json=asked("z")).status_code == 404
            assert {one["id"] for one in http.get("/v1/models").json()["data"]} == {"a", "b"}
