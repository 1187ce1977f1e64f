"""A decode server of many models under mixed requests, while regions are revoked, and a check of every answer.

    PYTHONPATH=.dev:tests python -m lab.server_storm --minutes 60

Starts a private daemon on the embedded driver, and a server of five tiny models with room for three on the card and one
in the host's memory, behind a process for HTTP. Callers send chats, answers by a schema, calls of tools, several
choices, scores, vectors and prompts with a common beginning; some hang up halfway. Meanwhile models are loaded, parked
and unloaded, and regions of tenants and of shared prefixes are revoked. Each answer is compared with the one that the
request got alone. Once a minute the callers pause until nothing runs: then the tasks, the blocks, the descriptors and
the memory are counted. Prints one JSON object, and exits with 1 if an answer was wrong or something has grown.
"""

import asyncio
import contextlib
import json
import logging
import os
import random
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Final

import click
import httpx
import jsonschema

from gpulease.client.console.private_daemon import private_daemon
from gpulease.client.decode import DecoderSettings, SharedPrefix, TenantConfig, open_model
from gpulease.client.decode.scheduler.model_residency import ModelState, ResidencyLimits
from gpulease.client.decode.supervisor.decoder import engine_bytes
from gpulease.client.decode.supervisor.model_pool import ModelSpec
from gpulease.client.decode.text.named_prefixes import NamedPrefix
from gpulease.client.errors import GpuLeaseError
from helpers.decode.many_models import PARKING, PoolRig, pool_rig
from helpers.decode.tiny_copies import HERMES_TEMPLATE, MEAN, add_pooling

from .decode_storm import memory_figures
from .footprint import broker_pid, footprints_of, rss_kib
from .many_models import make_model

TENANTS: Final = (TenantConfig("ann", 4, 40), TenantConfig("bob", 2, 20))
SETTINGS: Final = DecoderSettings(
    max_rows=8, prefill_rows=8, max_sequences=6, positions=160, text_processes=1, rebinds_at_once=1_000_000_000
)
MODELS: Final = ("a", "b", "c", "d", "e")
EMBEDDING_MODEL: Final = "e"
RESIDENT: Final = 3
PARKED: Final = 1

# Few, so that their table is full before the second half starts. It continues PARKING's table of limits.
_TOMBSTONES: Final = "max_tombstones = 256\n"

VARIANTS: Final = 3
"""Different requests of each kind."""

SKEW: Final = 1.2
PAUSE_S: Final = 0.3
"""Mean pause of a caller between two requests."""

REVOKE_EVERY_S: Final = 1.0
PREFIX_SHARE: Final = 0.03
"""The part of the revocations that meet a shared prefix."""

SAMPLE_EVERY_S: Final = 60.0
QUIET_LIMIT_S: Final = 60.0
"""Seconds until nothing may run any more, once no caller sends requests."""

TASKS_PER_DECODER: Final = 40
"""Bound of the tasks of a server at rest, for each open decoder. Requests that leave a task would pass it soon."""

PLACE: Final = {
    "type": "object",
    "properties": {"x": {"type": "integer", "minimum": 0, "maximum": 99}, "side": {"enum": ["left", "right"]}},
    "required": ["x", "side"],
    "additionalProperties": False,
}
TOOLS: Final = [{"type": "function", "function": {"name": "look", "parameters": PLACE}}]
PREFIX: Final = [7 + number * 13 % 480 for number in range(80)]
"""Five full blocks with which some prompts of all tenants begin; the first four are shared by name."""

SHARED: Final = NamedPrefix("shared", token_ids=tuple(PREFIX[:64]))

Answer = tuple[int, Any]
"""The status of a reply, and what must be the same each time."""


@dataclass(frozen=True, slots=True)
class Kind:
    """A kind of requests.

    Attributes:
        path: Where they are sent.
        body: Returns the body of a variant.
        answer: Returns what must be the same of a reply. Raises AssertionError for an invalid one.
        hangs_up_after: Events of the stream that the caller reads; None: all of them.
    """

    path: str
    body: Callable[[int], dict[str, Any]]
    answer: Callable[[dict[str, Any]], Any] = lambda reply: reply["choices"]
    hangs_up_after: int | None = None


def _chat(variant: int, **more: Any) -> dict[str, Any]:
    text = ("What does the with statement do?", "Where?", "A list is")[variant]
    body = {"messages": [{"role": "user", "content": text}], "max_tokens": 24, "temperature": 1, "seed": variant}
    return body | more


def _prompt(variant: int, **more: Any) -> dict[str, Any]:
    text = ("Changed in version", "The with statement", "Return the")[variant]
    return {"prompt": text, "max_tokens": 12, "temperature": 0.8, "seed": variant} | more


def _valid(reply: dict[str, Any]) -> Any:
    """The choices of a reply, which must be valid by the schema or cut off."""
    for choice in reply["choices"]:
        message = choice["message"]
        texts = [call["function"]["arguments"] for call in message.get("tool_calls") or ()]
        for text in texts or [message["content"]]:
            if choice["finish_reason"] != "length":
                jsonschema.validate(json.loads(text), PLACE)
        # The server draws the ids of calls.
        for call in message.get("tool_calls") or ():
            del call["id"]
    return reply["choices"]


_SCHEMA: Final = {"type": "json_schema", "json_schema": {"name": "answer", "schema": PLACE, "strict": True}}
_CHAT: Final = "/v1/chat/completions"
KINDS: Final = {
    "chat": Kind(_CHAT, _chat),
    "chat_stream": Kind(_CHAT, partial(_chat, stream=True)),
    "chat_hang_up": Kind(_CHAT, partial(_chat, stream=True, max_tokens=60), hangs_up_after=6),
    "schema": Kind(_CHAT, partial(_chat, response_format=_SCHEMA, max_tokens=60), _valid),
    "tools": Kind(_CHAT, partial(_chat, tools=TOOLS, tool_choice="required", max_tokens=80), _valid),
    "choices": Kind("/v1/completions", partial(_prompt, n=2, best_of=3)),
    "prompts": Kind("/v1/completions", lambda variant: _prompt(variant, prompt=["A set", "A list is"], n=2)),
    "scores": Kind("/v1/completions", partial(_prompt, echo=True, logprobs=3, max_tokens=4)),
    "prefix": Kind("/v1/completions", lambda it: _prompt(it, prompt=[*PREFIX, 5 + it, 9], logprobs=2)),
    "prefix_stream": Kind("/v1/completions", lambda it: _prompt(it, prompt=[*PREFIX[:48], it], stream=True)),
    "response": Kind(
        "/v1/responses",
        lambda variant: {"input": "What is it?", "max_output_tokens": 16, "temperature": 0.5 + variant / 10},
        # Without a seed an answer differs each time, and with it whether it ends before its limit.
        lambda reply: reply["usage"]["input_tokens"],
    ),
    "vectors": Kind(
        "/v1/embeddings",
        lambda variant: {"input": ["An iterator", "A coroutine is", "Return the"][: variant + 1]},
        lambda reply: reply["data"],
    ),
    "refused": Kind("/v1/completions", partial(_prompt, temperature=-1), lambda reply: reply),
}


@dataclass
class Findings:
    """What the callers found.

    Attributes:
        answers: Number of answers that were compared, by kind.
        wrong: The first wrong answers: what was sent, what came, what was right.
        failed: Replies and errors that no request should get, by their text.
        revoked: Regions that were revoked.
        late_s: The longest time of an answer.
    """

    answers: Counter[str] = field(default_factory=Counter)
    wrong: list[dict[str, Any]] = field(default_factory=list)
    wrong_count: int = 0
    failed: Counter[str] = field(default_factory=Counter)
    revoked: int = 0
    late_s: float = 0.0

    def counts(self) -> dict[str, int]:
        """The figures that are printed while the storm runs."""
        counts = {"answers": self.answers.total(), "wrong": self.wrong_count}
        return counts | {"failed": self.failed.total(), "revoked": self.revoked}


class _Gate:
    """Lets callers send while it is open, and waits until none does once it is closed."""

    def __init__(self) -> None:
        self._changed, self._is_open, self._inside = threading.Condition(), True, 0

    @contextlib.contextmanager
    def sending(self) -> Iterator[None]:
        with self._changed:
            self._changed.wait_for(lambda: self._is_open)
            self._inside += 1
        try:
            yield
        finally:
            with self._changed:
                self._inside -= 1
                self._changed.notify_all()

    @contextlib.contextmanager
    def closed(self) -> Iterator[None]:
        with self._changed:
            self._is_open = False
            self._changed.wait_for(lambda: not self._inside)
        try:
            yield
        finally:
            with self._changed:
                self._is_open = True
                self._changed.notify_all()


def ask(http: httpx.Client, model: str, kind: Kind, variant: int) -> Answer:
    """Send a request; returns its status and what must be the same of its answer. Raises httpx.HTTPError."""
    body = {"model": model, **kind.body(variant)}
    if not body.get("stream"):
        reply = http.post(kind.path, json=body)
        return reply.status_code, kind.answer(reply.json()) if reply.status_code == 200 else reply.json()
    # A stream: the texts of its choices, and why they ended.
    texts: dict[int, str] = {}
    finishes: dict[int, str] = {}
    with http.stream("POST", kind.path, json=body) as reply:
        if reply.status_code != 200:
            reply.read()
            return reply.status_code, reply.json()
        events = (line.removeprefix("data: ") for line in reply.iter_lines() if line.startswith("data: "))
        for number, event in enumerate(events):
            if event == "[DONE]" or number == kind.hangs_up_after:
                break
            parsed = json.loads(event)
            if "choices" not in parsed:
                return 500, parsed
            for choice in parsed["choices"]:
                text = choice["text"] if "text" in choice else choice["delta"].get("content")
                texts[choice["index"]] = texts.get(choice["index"], "") + (text or "")
                if choice["finish_reason"]:
                    finishes[choice["index"]] = choice["finish_reason"]
    return 200, (texts, finishes)


def is_same(kind: Kind, found: Answer, expected: Answer) -> bool:
    """Return whether an answer is the expected one; of one that was hung up on, the shorter text must begin the other.

    Several tokens may come in one event, so the same number of events may have more or less of the text.
    """
    if kind.hangs_up_after is None or found[0] != 200 or expected[0] != 200:
        return found == expected
    one, other = (str(answer[1][0].get(0, "")) for answer in (found, expected))
    return one.startswith(other) or other.startswith(one)


class _Storm:
    def __init__(self, rig: PoolRig, callers: int, seed: int) -> None:
        self._rig, self._callers, self._seed = rig, callers, seed
        self._until = 0.0
        self._gate, self._stop = _Gate(), threading.Event()
        self._expected: dict[tuple[str, str, str, int], Answer] = {}
        self.findings = Findings()

    @property
    def is_over(self) -> bool:
        return self._stop.is_set() or time.monotonic() >= self._until

    def learn(self) -> None:
        """Send each request alone, for its right answer."""
        for tenant in TENANTS:
            with self._rig.http(tenant.id) as http:
                for model, (name, kind), variant in _requests():
                    answer = ask(http, model, kind, variant)
                    if answer[0] != (400 if name == "refused" else 200):
                        raise click.ClickException(f"{name} {variant} of {model} alone: {answer}")
                    self._expected[tenant.id, model, name, variant] = answer

    def call(self, number: int) -> None:
        """Send requests at random until the storm is over, and compare their answers."""
        chooser = random.Random(self._seed * 1000 + number)
        weights = [1 / rank**SKEW for rank in range(1, len(MODELS) + 1)]
        tenant = TENANTS[number % len(TENANTS)].id
        with self._rig.http(tenant) as http:
            while not self.is_over:
                time.sleep(chooser.expovariate(1 / PAUSE_S))
                model = chooser.choices(MODELS, weights)[0]
                names = [name for name in KINDS if name != "vectors" or model == EMBEDDING_MODEL]
                self._compare(http, tenant, model, chooser.choice(names), chooser.randrange(VARIANTS))

    def _compare(self, http: httpx.Client, tenant: str, model: str, name: str, variant: int) -> None:
        kind, expected = KINDS[name], self._expected[tenant, model, name, variant]
        with self._gate.sending():
            began = time.monotonic()
            try:
                found = ask(http, model, kind, variant)
            except (httpx.HTTPError, AssertionError, ValueError, jsonschema.ValidationError) as error:
                self.findings.failed[f"{name}: {type(error).__name__}: {error}"] += 1
                return
            self.findings.late_s = max(self.findings.late_s, time.monotonic() - began)
        if is_same(kind, found, expected):
            self.findings.answers[name] += 1
        elif found[0] != expected[0]:
            self.findings.failed[f"{name}: {found[0]}: {json.dumps(found[1])[:300]}"] += 1
        else:
            self.findings.wrong_count += 1
            if len(self.findings.wrong) < 10:
                sent = {"tenant": tenant, "model": model, "kind": name, "variant": variant}
                self.findings.wrong.append(sent | {"found": found[1], "expected": expected[1]})

    def revoke(self) -> None:
        """Revoke regions of loaded models at random until the storm is over."""
        chooser = random.Random(self._seed)
        while not self.is_over:
            time.sleep(REVOKE_EVERY_S * chooser.uniform(0.5, 1.5))
            try:
                self.findings.revoked += self._rig.wait_for(self._revoke_one(chooser))
            except GpuLeaseError as error:
                self.findings.failed[f"revoke: {type(error).__name__}: {error}"] += 1

    async def _revoke_one(self, chooser: random.Random) -> bool:
        pool = self._rig.pool
        loaded = [it for name, it in pool.decoders.items() if pool.state_of(name) is ModelState.LOADED]
        regions = [one.region for decoder in loaded for one in decoder.regions.pools.values()]
        # A prefix comes back only with the next load of its model, so few of them end.
        if chooser.random() < PREFIX_SHARE:
            regions = [one.region for decoder in loaded for _, one in decoder.regions.prefixes.values()]
        regions = [region for region in regions if region.is_alive]
        if not regions:
            return False
        await chooser.choice(regions).revoke("storm")
        return True

    def run(self, for_s: float, address: str, say: Callable[[str], object]) -> list[dict[str, float]]:
        """Run the callers for some seconds; returns a sample of each quiet moment."""
        self._until = time.monotonic() + for_s
        workers = [threading.Thread(target=self._guarded, args=(self.call, n)) for n in range(self._callers)]
        workers.append(threading.Thread(target=self._guarded, args=(self.revoke,)))
        for worker in workers:
            worker.start()
        samples: list[dict[str, float]] = []
        began = time.monotonic()
        try:
            while not self.is_over:
                self._stop.wait(max(0.0, min(SAMPLE_EVERY_S, self._until - time.monotonic())))
                with self._gate.closed():
                    samples.append({"at_s": time.monotonic() - began, **self._quiet_sample(address)})
                say(json.dumps(samples[-1] | self.findings.counts()))
        finally:
            self._stop.set()
            for worker in workers:
                worker.join()
        return samples

    def _guarded(self, work: Callable[..., None], *given: Any) -> None:
        """Run a thread's work; its error is a finding, and ends the storm."""
        try:
            work(*given)
        except Exception as error:
            self.findings.failed[f"{work.__name__}: {type(error).__name__}: {error}"] += 1
            self._stop.set()

    def _quiet_sample(self, address: str) -> dict[str, float]:
        """Wait until nothing runs in the server, then count what it has. Nothing may stay of a request."""
        limit = time.monotonic() + QUIET_LIMIT_S
        while (left := self._rig.do(self._unfinished)) and time.monotonic() < limit:
            time.sleep(0.05)
        if left:
            self.findings.failed[f"at rest: {', '.join(left)}"] += 1
        tasks, names = self._rig.do(self._tasks)
        decoders = len(self._rig.do(lambda: self._rig.pool.decoders))
        if tasks > TASKS_PER_DECODER * (1 + decoders):
            self.findings.failed[f"at rest: {tasks} tasks: {names}"] += 1
        broker = broker_pid(address)
        daemon, children = footprints_of(broker), _children(broker)
        return {
            "tasks": tasks,
            "decoders": decoders,
            "fds": len(os.listdir("/proc/self/fd")),
            "threads": threading.active_count(),
            "server_kib": float(rss_kib(os.getpid())),
            "children": len(children),
            # Each open model has one, so their sum says nothing of growth.
            "child_mean_kib": sum(children.values()) / max(1, len(children)),
            "broker_kib": float(daemon.broker.rss_kib),
            "broker_fds": daemon.broker.fds,
            "workers": daemon.workers,
            "worker_mean_kib": daemon.worker_pss_kib,
        }

    def _unfinished(self) -> list[str]:
        """Name what still runs or is in use, in the server's loop."""
        found = []
        for name, decoder in self._rig.pool.decoders.items():
            for tenant, state in decoder.scheduler.tenants.items():
                counts = {
                    "waiting": len(state.waiting),
                    "live": len(state.live),
                    "blocks": state.blocks.used,
                    "coming": decoder.prompts.coming[tenant],
                }
                found += [f"{name} {tenant} {what} {count}" for what, count in counts.items() if count]
        for name, model in self._rig.pool.residency.models.items():
            found += [f"{name} waiting"] * bool(model.waiting) + [f"{name} in use"] * bool(model.in_use)
        return found + [f"coming of {tenant}" for tenant, count in self._rig.models.coming.items() if count]

    @staticmethod
    def _tasks() -> tuple[int, dict[str, int]]:
        names = Counter(task.get_coro().__qualname__ for task in asyncio.all_tasks())  # type: ignore[union-attr]
        return names.total(), dict(names.most_common(8))


def _requests() -> Iterator[tuple[str, tuple[str, Kind], int]]:
    for model in MODELS:
        for name, kind in KINDS.items():
            for variant in range(VARIANTS):
                if name != "vectors" or model == EMBEDDING_MODEL:
                    yield model, (name, kind), variant


def _children(broker: int) -> dict[int, int]:
    """RSS in KiB of the server's other processes, which parse texts or speak HTTP, by pid."""
    found: dict[int, int] = {}
    for task in Path("/proc/self/task").iterdir():
        # A process may end between two reads.
        with contextlib.suppress(OSError, ValueError):
            for pid in map(int, (task / "children").read_text().split()):
                found[pid] = rss_kib(pid)
    return {pid: kib for pid, kib in found.items() if pid != broker}


def report_of(findings: Findings, samples: list[dict[str, float]]) -> dict[str, Any]:
    """The report of a storm: what was found, and each figure at rest from its first to its last sample."""
    at_s = [sample["at_s"] for sample in samples]
    report: dict[str, Any] = {
        "answers": findings.answers.total(),
        "by_kind": dict(findings.answers),
        "wrong": findings.wrong_count,
        "first_wrong": findings.wrong,
        "failed": dict(findings.failed),
        "revoked": findings.revoked,
        "longest_s": findings.late_s,
    }
    if len(samples) >= 3:
        names = [name for name in samples[0] if name != "at_s"]
        report["memory"] = {
            name: memory_figures(at_s, [sample[name] for sample in samples]) for name in names if name.endswith("_kib")
        }
        report["at_rest"] = {
            name: {"first": samples[0][name], "last": samples[-1][name], "most": max(it[name] for it in samples)}
            for name in names
        }
    return report


def is_sound(report: dict[str, Any]) -> bool:
    """True if nothing was wrong and nothing grew. Without answers and revocations nothing was shown."""
    is_flat = all(figures["is_flat"] for figures in report.get("memory", {}).values())
    return is_flat and not report["wrong"] and not report["failed"] and report["answers"] > 0 < report["revoked"]


def make_models(folder: Path) -> dict[str, Path]:
    """Write the models: all with a template of tools, one of them with vectors, too."""
    paths = {name: make_model(folder / name, number) for number, name in enumerate(MODELS)}
    for path in paths.values():
        settings = json.loads((path / "tokenizer_config.json").read_text())
        (path / "tokenizer_config.json").write_text(json.dumps(settings | {"chat_template": HERMES_TEMPLATE}))
    add_pooling(paths[EMBEDDING_MODEL], MEAN)
    return paths


def measure(minutes: float, callers: int, seed: int, say: Callable[[str], object]) -> dict[str, Any]:
    """Run a storm of some minutes; returns its report."""
    with contextlib.ExitStack() as stack:
        paths = make_models(Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="gpulease-"))))
        shared = SharedPrefix(SHARED.name, SHARED.token_ids)
        size = max(engine_bytes(open_model(path), TENANTS, SETTINGS, [shared]) for path in paths.values())
        address = stack.enter_context(private_daemon("cpu", (str(RESIDENT * size),), settings=PARKING + _TOMBSTONES))
        specs = {name: ModelSpec(path, TENANTS, SETTINGS, prefixes=(SHARED,)) for name, path in paths.items()}
        limits = ResidencyLimits(RESIDENT * size, PARKED * size, min_stay_s=1.0)
        rig = stack.enter_context(pool_rig(address, specs, limits, http_processes=1, tenants=TENANTS))
        storm = _Storm(rig, callers, seed)
        say("each request alone")
        storm.learn()
        say(f"the storm, for {minutes:g} minutes")
        samples = storm.run(minutes * 60, address, say)
        changes: Counter[str] = Counter()
        for (_, kind), count in rig.do(lambda: dict(rig.pool.counts)).items():
            changes[kind] += count
        report = report_of(storm.findings, samples) | {"minutes": minutes, "changes": dict(changes)}
    return report


@click.command()
@click.option("--minutes", type=click.FloatRange(min=0.01), default=60.0, show_default=True, help="Of the storm.")
@click.option("--callers", type=click.IntRange(min=1), default=3, show_default=True, help="Each sends one at a time.")
@click.option("--seed", default=1, show_default=True)
def main(minutes: float, callers: int, seed: int) -> None:
    """Send mixed requests and revoke regions. Exits with 1 if one answer is wrong or something grows."""
    # One line for each request would be most of the output.
    logging.getLogger("httpx").setLevel(logging.WARNING)
    report = measure(minutes, callers, seed, partial(click.echo, err=True))
    click.echo(json.dumps(report, indent=1))
    sys.exit(0 if is_sound(report) else 1)


if __name__ == "__main__":
    main()
