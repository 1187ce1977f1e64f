"""Sends mixed requests to a decode server with several models, while regions are revoked, and checks every answer.

    PYTHONPATH=.dev:tests python -m lab.server_storm --minutes 60

Starts a private daemon on the embedded driver, and a server of five tiny models with room for three on the card and one
in the host's memory; a separate process serves HTTP. Callers request chats, answers by a schema, tool calls, several
choices, scores, vectors and prompts with a common beginning; some disconnect halfway. Meanwhile models are loaded,
parked and unloaded, and regions of tenants and of shared prefixes are revoked. Each answer is compared with the answer
to the same request without other load. Once a minute the callers pause until nothing runs; then the tasks, the blocks,
the descriptors and the memory of each of the server's processes are counted. The callers are in a separate process.
Prints one JSON object, and exits with 1 if an answer was wrong or something has grown.
"""

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

from gpulease.client.console.private_daemon import children_of, private_daemon
from helpers.decode.many_models import PARKING, key_of
from helpers.decode.tiny_copies import HERMES_TEMPLATE, MEAN, add_pooling

from .decode_storm import memory_figures
from .footprint import Footprint, broker_pid, footprint_of, footprints_of, rss_kib
from .many_models import make_model
from .storm_server import MODELS, PREFIX, RESIDENT, TENANTS, StormServer, lease_bytes, model_paths, storm_server

EMBEDDING_MODEL: Final = "e"

# The limit is low, so that the table is full before the second half starts. The line continues PARKING's [limits].
_TOMBSTONES: Final = "max_tombstones = 256\n"

VARIANTS: Final = 3
"""Number of different requests of each kind."""

SKEW: Final = 1.2
PAUSE_S: Final = 0.3
"""Mean pause of a caller between two requests."""

REVOKE_EVERY_S: Final = 1.0
SAMPLE_EVERY_S: Final = 60.0
QUIET_LIMIT_S: Final = 60.0
"""Seconds after the last request in which the server must finish all work."""

TASKS_PER_DECODER: Final = 40
"""Maximum number of tasks of a server at rest, per open decoder. If requests left tasks behind, it would soon be
exceeded."""

PLACE: Final = {
    "type": "object",
    "properties": {"x": {"type": "integer", "minimum": 0, "maximum": 99}, "side": {"enum": ["left", "right"]}},
    "required": ["x", "side"],
    "additionalProperties": False,
}
TOOLS: Final = [{"type": "function", "function": {"name": "look", "parameters": PLACE}}]

Answer = tuple[int, Any]
"""The status of a reply, and the part of it that must be the same each time."""


@dataclass(frozen=True, slots=True)
class Kind:
    """A kind of request.

    Attributes:
        path: The path to which requests are sent.
        body: Returns the body of a variant.
        answer: Returns the part of a reply that must be the same each time. Raises AssertionError for an invalid reply.
        hangs_up_after: Number of the stream's events that the caller reads before it disconnects; None: all.
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
    """Return the choices of a reply. Each must match the schema, unless it was cut off."""
    for choice in reply["choices"]:
        message = choice["message"]
        texts = [call["function"]["arguments"] for call in message.get("tool_calls") or ()]
        for text in texts or [message["content"]]:
            if choice["finish_reason"] != "length":
                jsonschema.validate(json.loads(text), PLACE)
        # The ids of calls are random.
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
        # Without a seed the answer differs each time, so compare only the prompt's length.
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
    """The results of the callers' checks.

    Attributes:
        answers: Number of right answers, by kind.
        wrong: The first wrong answers, with the request, the answer and the expected answer.
        failed: Number of replies and errors that no request should get, by their text.
        revoked: Number of regions that were revoked.
        late_s: The longest time until an answer, in seconds.
    """

    answers: Counter[str] = field(default_factory=Counter)
    wrong: list[dict[str, Any]] = field(default_factory=list)
    wrong_count: int = 0
    failed: Counter[str] = field(default_factory=Counter)
    revoked: int = 0
    late_s: float = 0.0

    def counts(self) -> dict[str, int]:
        """Return the figures that are printed while the storm runs."""
        counts = {"answers": self.answers.total(), "wrong": self.wrong_count}
        return counts | {"failed": self.failed.total(), "revoked": self.revoked}


class _Gate:
    """Lets callers send requests while it is open. Closing it waits until no request is in progress."""

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
    """Send a request. Returns its status and the comparable part of its answer. Raises httpx.HTTPError."""
    body = {"model": model, **kind.body(variant)}
    if not body.get("stream"):
        reply = http.post(kind.path, json=body)
        return reply.status_code, kind.answer(reply.json()) if reply.status_code == 200 else reply.json()
    # For a stream, collect the choices' texts and finish reasons.
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
    """Return whether an answer is the expected one. If the caller disconnected, one text must be the other's beginning.

    An event may contain several tokens, so the same number of events may contain more or less of the text.
    """
    if kind.hangs_up_after is None or found[0] != 200 or expected[0] != 200:
        return found == expected
    one, other = (str(answer[1][0].get(0, "")) for answer in (found, expected))
    return one.startswith(other) or other.startswith(one)


class _Storm:
    def __init__(self, server: StormServer, callers: int, seed: int) -> None:
        self._server, self._callers, self._seed = server, callers, seed
        self._until = 0.0
        self._gate, self._stop = _Gate(), threading.Event()
        self._expected: dict[tuple[str, str, str, int], Answer] = {}
        self.findings = Findings()

    @property
    def is_over(self) -> bool:
        return self._stop.is_set() or time.monotonic() >= self._until

    def learn(self) -> None:
        """Send each request alone, and store its answer as the expected one."""
        for tenant in TENANTS:
            with _http(self._server.url, tenant.id) as http:
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
        with _http(self._server.url, tenant) as http:
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
            outcome = self._server.ask("revoke")
            if isinstance(outcome, str):
                self.findings.failed[f"revoke: {outcome}"] += 1
            else:
                self.findings.revoked += outcome

    def run(self, for_s: float, address: str, say: Callable[[str], object]) -> list[dict[str, float]]:
        """Run the callers for `for_s` seconds. Returns the samples that were taken while they paused."""
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
        """Run a thread's work. An error is recorded and ends the storm."""
        try:
            work(*given)
        except Exception as error:
            self.findings.failed[f"{work.__name__}: {type(error).__name__}: {error}"] += 1
            self._stop.set()

    def _quiet_sample(self, address: str) -> dict[str, float]:
        """Wait until nothing runs in the server, then count its resources. Requests must not leave anything behind."""
        limit = time.monotonic() + QUIET_LIMIT_S
        while (left := self._server.ask("unfinished")) and time.monotonic() < limit:
            time.sleep(0.05)
        if left:
            self.findings.failed[f"at rest: {', '.join(left)}"] += 1
        found = self._server.ask("at_rest")
        names = found.pop("names")
        if found["tasks"] > TASKS_PER_DECODER * (1 + found["decoders"]):
            self.findings.failed[f"at rest: {found['tasks']} tasks: {names}"] += 1
        broker = broker_pid(address)
        daemon, server = footprints_of(broker), footprint_of(self._server.pid)
        return {
            **found,
            "server_kib": float(server.rss_kib),
            "server_pss_kib": float(server.pss_kib),
            **_children(self._server.pid),
            "callers_mib": rss_kib(os.getpid()) / 1024,
            "broker_kib": float(daemon.broker.rss_kib),
            "broker_fds": daemon.broker.fds,
            "workers": daemon.workers,
            "worker_mean_kib": daemon.worker_pss_kib,
        }


def _requests() -> Iterator[tuple[str, tuple[str, Kind], int]]:
    for model in MODELS:
        for name, kind in KINDS.items():
            for variant in range(VARIANTS):
                if name != "vectors" or model == EMBEDDING_MODEL:
                    yield model, (name, kind), variant


def _http(url: str, tenant: str) -> httpx.Client:
    return httpx.Client(base_url=url, headers={"Authorization": f"Bearer {key_of(tenant)}"}, timeout=120, verify=False)


def _children(server: int) -> dict[str, float]:
    """Return figures of the server's other processes: those that serve HTTP and those that parse texts."""
    pids = [pid for pid, _ in children_of(server)]
    for pid in pids:
        pids += [child for child, _ in children_of(pid)]
    kinds: dict[str, list[Footprint]] = {"front": [], "text": []}
    for pid in pids:
        # A process may end between two reads.
        with contextlib.suppress(OSError, ValueError):
            is_front = b"front_process" in Path(f"/proc/{pid}/cmdline").read_bytes()
            kinds["front" if is_front else "text"].append(footprint_of(pid))
    figures: dict[str, float] = {}
    for kind, found in kinds.items():
        figures[f"{kind}s"] = len(found)
        # Each open model has text processes, so their sum does not show growth.
        figures[f"{kind}_mean_kib"] = sum(one.rss_kib for one in found) / max(1, len(found))
        figures[f"{kind}_pss_mean_kib"] = sum(one.pss_kib for one in found) / max(1, len(found))
    return figures


def report_of(findings: Findings, samples: list[dict[str, float]]) -> dict[str, Any]:
    """Return the report of a storm: the findings, and the first, last and largest value of each figure at rest."""
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
    """Return whether nothing was wrong and nothing grew. There must have been answers and revocations."""
    is_flat = all(figures["is_flat"] for figures in report.get("memory", {}).values())
    return is_flat and not report["wrong"] and not report["failed"] and report["answers"] > 0 < report["revoked"]


def make_models(folder: Path) -> None:
    """Write the models' files. All have a chat template with tools, and one also embeds texts."""
    for number, (name, path) in enumerate(model_paths(folder).items()):
        make_model(path, number)
        settings = json.loads((path / "tokenizer_config.json").read_text())
        (path / "tokenizer_config.json").write_text(json.dumps(settings | {"chat_template": HERMES_TEMPLATE}))
        if name == EMBEDDING_MODEL:
            add_pooling(path, MEAN)


def measure(minutes: float, callers: int, seed: int, say: Callable[[str], object]) -> dict[str, Any]:
    """Run a storm of `minutes` minutes. Returns its report."""
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="gpulease-")))
        make_models(folder)
        card = (str(RESIDENT * lease_bytes(folder)),)
        address = stack.enter_context(private_daemon("cpu", card, settings=PARKING + _TOMBSTONES))
        server = stack.enter_context(storm_server(address, folder))
        storm = _Storm(server, callers, seed)
        say("each request alone")
        storm.learn()
        say(f"the storm, for {minutes:g} minutes")
        samples = storm.run(minutes * 60, address, say)
        return report_of(storm.findings, samples) | {"minutes": minutes, "changes": server.ask("changes")}


@click.command()
@click.option("--minutes", type=click.FloatRange(min=0.01), default=60.0, show_default=True, help="Of the storm.")
@click.option("--callers", type=click.IntRange(min=1), default=3, show_default=True, help="Each sends one at a time.")
@click.option("--seed", default=1, show_default=True)
def main(minutes: float, callers: int, seed: int) -> None:
    """Send mixed requests and revoke regions. Exits with 1 if one answer is wrong or something grows."""
    # httpx would log a line for each request.
    logging.getLogger("httpx").setLevel(logging.WARNING)
    report = measure(minutes, callers, seed, partial(click.echo, err=True))
    click.echo(json.dumps(report, indent=1))
    sys.exit(0 if is_sound(report) else 1)


if __name__ == "__main__":
    main()
