"""A load on a decode server over HTTP: requests of several tenants that arrive at random, and the results by tenant.

    python -m gpulease.client.bench.decode_load http://127.0.0.1:8082 --key K1 --key K2 --rate 20 --requests 2000

Arrivals are a Poisson process: a slow server gets no fewer requests. A tenant's goodput is the tokens per second of its
complete replies. Only the standard library is needed, so that any host can be the client.
"""

import asyncio
import json
import random
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Final
from urllib.parse import urlsplit

import click

from gpulease.client.bench.figures import percentile
from gpulease.client.console.number_range import NumberRange
from gpulease.client.console.tables import table
from gpulease.protocol.json_text import indented_json

MAX_OPEN: Final = 400
"""Maximum number of open requests: the server accepts 512 connections, and a client has 1,024 descriptors. A request
that arrives beyond this is counted as not sent."""

LIMIT_S: Final = 300.0
"""Longest time for a request, in seconds; after that the client abandons it."""

MAX_LINE_BYTES: Final = 1 << 20
"""Longest line of a reply, in bytes. Stops a server that never ends one."""

WORDS: Final = ("the", "import", "class", "a", "with", "statement", "is", "value", "of", "return", "method", "in")


@dataclass(slots=True)
class RequestOutcome:
    """Times and end of one request.

    Attributes:
        tenant: The index of its key.
        sent_at: When it was sent, in monotonic seconds.
        token_times: When each of its tokens arrived. Tokens that arrived together have the same time.
        error: The reason for a failure; "" for a complete reply.
        ended_at: When it ended, in monotonic seconds.
    """

    tenant: int
    sent_at: float
    token_times: list[float] = field(default_factory=list)
    error: str = ""
    ended_at: float = 0.0


def arrivals(rate: float, count: int, seed: int) -> Iterator[float]:
    """Yield the times, in seconds from 0, at which `count` requests arrive, `rate` per second on average."""
    # Exponential gaps make a Poisson process of that rate.
    chance, at = random.Random(seed), 0.0
    for _ in range(count):
        yield at
        at += chance.expovariate(rate)


def prompt_of(words: int, seed: int) -> str:
    """A prompt of `words` words; each seed has its own."""
    chance = random.Random(seed)
    return " ".join(chance.choice(WORDS) for _ in range(words))


def figures_of(outcomes: Iterable[RequestOutcome]) -> dict[str, Any]:
    """Return the figures of some requests. Times are in milliseconds, or None without a sample."""
    finished = list(outcomes)
    # Only complete replies count as goodput; the others' times still count.
    complete = [outcome for outcome in finished if not outcome.error]
    spent_s = max((outcome.ended_at for outcome in finished), default=0.0) - min(
        (outcome.sent_at for outcome in finished), default=0.0
    )
    # The times from requests to their first tokens, and the gaps between tokens.
    first = [outcome.token_times[0] - outcome.sent_at for outcome in finished if outcome.token_times]
    gaps = [b - a for outcome in finished for a, b in zip(outcome.token_times, outcome.token_times[1:], strict=False)]
    tokens = sum(len(outcome.token_times) for outcome in complete)
    return {
        "requests": len(finished),
        "whole": len(complete),
        "goodput_tokens_s": round(tokens / spent_s, 1) if spent_s > 0 else 0.0,
        **_percentiles("first_token", first),
        **_percentiles("inter_token", gaps),
        "errors": dict(Counter(outcome.error for outcome in finished if outcome.error).most_common()),
    }


def _percentiles(name: str, samples: Sequence[float]) -> dict[str, float | None]:
    return {f"{name}_p{part}_ms": round(percentile(samples, part) * 1e3, 2) if samples else None for part in (50, 99)}


def tokens_of(chunk: Any) -> int:
    """Number of tokens in an object of a stream. Raises ReplyError for an error object."""
    # An error in the middle of a stream comes as a separate object.
    if "error" in chunk:
        raise ReplyError(f"stream: {chunk['error'].get('code')}")
    return sum(len((choice.get("logprobs") or {}).get("tokens") or ()) for choice in chunk["choices"])


class ReplyError(Exception):
    """A reply that is not a completion. The text has its status and code, or says how it was cut off."""


class DecodeClient:
    """Sends completion requests to one server, with HTTP/1.0, so that a reply ends with its connection, without chunks.

    Args:
        url: The server's URL, `http://HOST:PORT`. Raises ValueError for any other.
        max_tokens: Number of tokens that each request asks for.
    """

    def __init__(self, url: str, max_tokens: int) -> None:
        # Accept only plain HTTP: with TLS, the client's cipher would be measured as well.
        parts = urlsplit(url)
        if parts.scheme != "http" or not parts.hostname:
            raise ValueError(f"a server's URL must be http://HOST:PORT, not {url!r}")
        self._host, self._port = parts.hostname, parts.port or 80
        self._max_tokens = max_tokens

    async def complete(self, key: str, prompt: str, seed: int, outcome: RequestOutcome) -> None:
        """Send one request, and record the reply in `outcome`."""
        # With log-probabilities a reply lists its tokens; one object of a stream may have several.
        request = {"prompt": prompt, "max_tokens": self._max_tokens, "seed": seed, "stream": True, "logprobs": 0}
        try:
            async with asyncio.timeout(LIMIT_S):
                await self._stream(key, json.dumps(request).encode(), outcome)
        # Each kind of failure has its own text, by which the report counts failures.
        except ReplyError as error:
            outcome.error = str(error)
        except TimeoutError:
            outcome.error = "no end in time"
        except (OSError, EOFError, ValueError, KeyError, TypeError, AttributeError) as error:
            outcome.error = f"no sound reply: {type(error).__name__}"
        outcome.ended_at = time.monotonic()

    async def _stream(self, key: str, body: bytes, outcome: RequestOutcome) -> None:
        reader, writer = await asyncio.open_connection(self._host, self._port, limit=MAX_LINE_BYTES)
        # Use one connection for each request, as in HTTP/1.0.
        try:
            head = f"POST /v1/completions HTTP/1.0\r\nHost: {self._host}:{self._port}\r\nAuthorization: Bearer {key}"
            head += f"\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
            writer.write(head.encode("latin-1") + body)
            await writer.drain()
            await _check_head(reader)
            async for line in _lines(reader):
                # This line ends the stream. If the connection ends without it, the reply was cut off.
                if line == b"data: [DONE]":
                    return
                if line.startswith(b"data: "):
                    now = time.monotonic()
                    outcome.token_times += [now] * tokens_of(json.loads(line.removeprefix(b"data: ")))
        finally:
            writer.close()
        raise ReplyError("broken off")


async def _check_head(reader: asyncio.StreamReader) -> None:
    """Read a reply's head. Raises ReplyError, with the body's code, for a status other than 200."""
    # Read the status line, then the head's lines up to the empty one.
    status = (await reader.readline()).split(b" ")[1].decode("latin-1")
    async for line in _lines(reader):
        if not line:
            break
    if status != "200":
        body = json.loads(await reader.read(MAX_LINE_BYTES))
        raise ReplyError(f"{status} {body.get('error', body).get('code')}")


async def _lines(reader: asyncio.StreamReader) -> AsyncIterator[bytes]:
    while line := await reader.readline():
        yield line.rstrip(b"\r\n")


async def offer_load(client: DecodeClient, keys: Sequence[str], load: "RequestLoad") -> list[RequestOutcome]:
    """Send each request of a load at its scheduled arrival time, with a random key.

    Returns the requests' outcomes after the end of the last one.
    """
    chance, begin_s, outcomes = random.Random(load.seed), time.monotonic(), list[RequestOutcome]()
    running = set[asyncio.Task[None]]()
    for number, at_s in enumerate(arrivals(load.rate, load.requests, load.seed)):
        # Wait for the arrival time, however many requests are still open: arrivals don't depend on the server.
        await asyncio.sleep(max(0.0, begin_s + at_s - time.monotonic()))
        outcome = RequestOutcome(chance.randrange(len(keys)), time.monotonic())
        outcomes.append(outcome)
        # With another open request the client could run out of descriptors, so count this one as not sent.
        if len(running) >= MAX_OPEN:
            outcome.error, outcome.ended_at = "not sent", outcome.sent_at
            continue
        prompt = prompt_of(load.prompt_words, load.seed + number)
        task = asyncio.create_task(client.complete(keys[outcome.tenant], prompt, number, outcome))
        running.add(task)
        task.add_done_callback(running.discard)
    # The last requests may end long after the last arrival.
    await asyncio.gather(*running)
    return outcomes


@dataclass(frozen=True, slots=True)
class RequestLoad:
    """A load: `requests` requests, `rate` per second on average, with prompts of `prompt_words` words."""

    rate: float
    requests: int
    prompt_words: int
    seed: int


_COLUMNS: Final = (
    ("requests", "requests"),
    ("whole", "whole"),
    ("goodput_tokens_s", "tokens/s"),
    ("first_token_p50_ms", "first p50 ms"),
    ("first_token_p99_ms", "first p99 ms"),
    ("inter_token_p50_ms", "next p50 ms"),
    ("inter_token_p99_ms", "next p99 ms"),
)


def load_table(report: dict[str, Any]) -> str:
    """Lay out a report as one table, a row for each key and one for all, with the errors below it."""
    rows = [
        [name, *("" if figures[key] is None else f"{figures[key]:g}" for key, _ in _COLUMNS)]
        for name, figures in [*report["tenants"].items(), ("all", report["all"])]
    ]
    errors = [f"{count} x {error}" for error, count in report["all"]["errors"].items()]
    return "\n\n".join([table(["key", *(head for _, head in _COLUMNS)], rows), *errors])


def report_of(outcomes: Sequence[RequestOutcome], keys: int) -> dict[str, Any]:
    """Return the figures of each key, by its position from 1, and of all together."""
    tenants = {
        str(place + 1): figures_of(outcome for outcome in outcomes if outcome.tenant == place) for place in range(keys)
    }
    return {"tenants": tenants, "all": figures_of(outcomes)}


@click.command()
@click.argument("url")
@click.option("--key", "keys", multiple=True, required=True, help="A tenant's key. Repeatable; each key is one tenant.")
@click.option("--rate", type=NumberRange(min=0.001), default=10.0, show_default=True, help="Requests per second.")
@click.option("--requests", type=click.IntRange(min=1), default=1000, show_default=True, help="In all.")
@click.option(
    "--prompt-words",
    type=click.IntRange(1, 100_000),
    default=24,
    show_default=True,
    help="Number of words in each prompt.",
)
@click.option(
    "--max-tokens",
    type=click.IntRange(min=1),
    default=64,
    show_default=True,
    help="Maximum number of tokens in each reply.",
)
@click.option("--seed", type=int, default=1, show_default=True, help="The seed for arrivals and prompts.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead.")
def main(
    url: str,
    keys: tuple[str, ...],
    rate: float,
    requests: int,
    prompt_words: int,
    max_tokens: int,
    seed: int,
    as_json: bool,
) -> None:
    """Offer a load to the decode server at URL, and print its tenants' results."""
    try:
        client = DecodeClient(url, max_tokens)
    # A wrong URL is a mistake of the command line.
    except ValueError as error:
        raise click.UsageError(str(error)) from None
    load = RequestLoad(rate, requests, prompt_words, seed)
    report = report_of(asyncio.run(offer_load(client, keys, load)), len(keys))
    click.echo(indented_json(report) if as_json else load_table(report))


if __name__ == "__main__":
    main()
