"""`gpulease audit recompute`: compute an audited request again, and compare the result with its record."""

import asyncio
import contextlib
import json
from dataclasses import replace
from pathlib import Path
from typing import BinaryIO, Final

import click

from gpulease.client.console.exit_status import EXIT_FAILED, fail
from gpulease.client.console.private_daemon import private_daemon, running_address
from gpulease.client.decode import Checkpoint, Decoder, DecoderSettings, SamplingParameters, open_model
from gpulease.client.decode.model_config import LongScaling, ModelConfig
from gpulease.client.decode.sample_models import TINY_MODEL
from gpulease.client.decode.supervisor.decode_audit import ComputedBy, DecodeRecord, TokenDigest, digests_of
from gpulease.client.decode.supervisor.decoder import DEFAULT_TENANT
from gpulease.client.decode.text.grammar import grammar_library

EXIT_OUTPUT_DIFFERS: Final = EXIT_FAILED
EXIT_PROMPT_DIFFERS: Final = 3
EXIT_MODEL_DIFFERS: Final = 4
EXIT_KERNELS_DIFFER: Final = 5
EXIT_NO_RECORD: Final = 65
"""EX_DATAERR of sysexits(3)."""

MAX_RECORD_BYTES: Final = 1 << 20
"""Largest file of a record, in bytes: 32 times a line of the audit log. Stops a wrong file from filling memory."""

MAX_PROMPT_BYTES: Final = 64 << 20
"""Largest file of a prompt, in bytes: more than any model's context."""

ROWS: Final = 16
"""Number of rows in a step; the output does not depend on it. More would need kernels that the embedded driver compiles
slowly."""

EMBEDDED_DRIVER: Final = "cpu"


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.argument("record", type=click.File("rb"))
@click.option(
    "--prompt", "prompt_file", type=click.File("rb"), help="A file with the prompt: text, or a JSON array of token ids."
)
@click.option(
    "--request",
    "request_file",
    type=click.File("rb"),
    help="Instead of --prompt, a file with the complete body of the HTTP request.",
)
@click.option(
    "--model", "path", type=click.Path(path_type=Path), help="The model's path; by default, the installed tiny model."
)
@click.option(
    "--logit-bias",
    "bias_file",
    type=click.File("rb"),
    help="A file with the request's logit_bias, if it had one: a JSON object.",
)
def recompute(
    record: BinaryIO,
    prompt_file: BinaryIO | None,
    request_file: BinaryIO | None,
    path: Path | None,
    bias_file: BinaryIO | None,
) -> None:
    """Decode the request in RECORD again, and compare. RECORD is one line of `gpulease audit show --json`; -: stdin.

    Uses the running daemon; without one, a private one on the embedded driver, which needs no GPU.

    Exit status: 0 the output is equal, 1 it differs, 3 the prompt, a list of tokens or the grammar differs, 4 the model
    differs, 5 the kernels or the grammar's library differ, 65 RECORD was not written by a decoder.
    """
    decode_record = _record_of(record.read(MAX_RECORD_BYTES))
    # The model and the prompt are this user's; the record has only their digests.
    checkpoint = open_model(path or TINY_MODEL)
    if (prompt_file is None) is (request_file is None):
        raise click.UsageError("give either --prompt or --request")
    requested = SamplingParameters()
    if bias_file is not None:
        requested = replace(requested, logit_bias=_biases_of(bias_file.read(MAX_PROMPT_BYTES)))
    if prompt_file is not None:
        prompt = _prompt_of(prompt_file.read(MAX_PROMPT_BYTES), checkpoint)
    else:
        assert request_file is not None
        prompts, requested = _request_of(request_file.read(MAX_PROMPT_BYTES), checkpoint)
        # If there are several prompts, each has a separate record.
        prompt = next(
            (candidate for candidate in prompts if TokenDigest.of(candidate) == decode_record.prompt), prompts[0]
        )
    # Compare the inputs before computing: a different prompt, model or kernel explains any different output.
    _check(decode_record, TokenDigest.of(prompt), asyncio.run(ComputedBy.of(checkpoint)), requested)
    # The record has all other parameters.
    sampling = replace(
        decode_record.sampling,
        logit_bias=requested.logit_bias,
        grammar=requested.grammar,
        allowed_token_ids=requested.allowed_token_ids,
        bad_words=requested.bad_words,
    )
    digest = TokenDigest.of([])
    # If the request ended without output, nothing has to be computed, so no daemon is needed.
    if decode_record.output.count:
        with contextlib.ExitStack() as stack:
            address = running_address() or stack.enter_context(private_daemon(EMBEDDED_DRIVER))
            for positions in possible_positions(checkpoint.config, len(prompt) + decode_record.output.count):
                digest = TokenDigest.of(
                    asyncio.run(_decoded(address, checkpoint, prompt, decode_record, sampling, positions))
                )
                if digest == decode_record.output:
                    break
    if digest != decode_record.output:
        fail(
            f"audit recompute: the output DIFFERS: {digest}; the record has {decode_record.output}", EXIT_OUTPUT_DIFFERS
        )
    click.echo(f"The output is the same: {digest}.")


def _record_of(data: bytes) -> DecodeRecord:
    try:
        line = json.loads(data)
        # The record is in the line's note.
        return DecodeRecord.read(line["data"]["note"])
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        fail(f"audit recompute: RECORD must be a line that a decoder wrote to an audit log: {error}", EXIT_NO_RECORD)


def _prompt_of(data: bytes, checkpoint: Checkpoint) -> list[int]:
    """Return the prompt's tokens, from text or from a JSON array of ids."""
    # Try an array of ids first, because a prompt rarely has that form.
    with contextlib.suppress(ValueError, RecursionError):
        prompt = json.loads(data)
        if isinstance(prompt, list) and all(type(token) is int and 0 <= token < 1 << 32 for token in prompt):
            return prompt
    try:
        text = data.decode()
    except UnicodeDecodeError:
        raise click.UsageError("the prompt must be UTF-8 text or a JSON array of token ids") from None
    return checkpoint.tokenizer().encode(text)


def _request_of(data: bytes, checkpoint: Checkpoint) -> tuple[list[list[int]], SamplingParameters]:
    """Return the prompts and the sampling of a request's body, parsed as by the server."""
    # Import these only here, because they need the extras `decode` and `serve`.
    from gpulease.client.decode.openai.api_errors import ApiError
    from gpulease.client.decode.openai.completion_request import parse_request
    from gpulease.client.decode.openai.prompt_job import read_prompts, with_grammar, with_tokens
    from gpulease.client.decode.text.prompt_reader import PromptReader

    reader = PromptReader(checkpoint.tokenizer(), checkpoint.config.context)
    try:
        # The body itself shows which endpoint it was for. Seeds are the record's.
        completion_request = parse_request(data, is_chat=b'"messages"' in data, fresh_seed=0)
        completion_request = with_tokens(reader, with_grammar(reader, completion_request))
    except ApiError as error:
        raise click.UsageError(f"the request must be one that the server accepted: {error.message}") from None
    return read_prompts(reader, completion_request), completion_request.sampling


def _biases_of(data: bytes) -> tuple[tuple[int, float], ...]:
    """Return a request's biases, parsed from the form of its body: an object with token ids as keys."""
    try:
        return tuple((int(token), float(bias)) for token, bias in json.loads(data).items())
    except (ValueError, TypeError, AttributeError, RecursionError):
        raise click.UsageError("logit_bias must be a JSON object with a number for each token id") from None


def _check(
    decode_record: DecodeRecord, prompt: TokenDigest, computed_here: ComputedBy, requested: SamplingParameters
) -> None:
    """Report every difference that can be found without computing, and exit if there is one."""
    pairs = (
        # The exit status is that of the first difference, so differences that explain others come first.
        ("prompt", EXIT_PROMPT_DIFFERS, str(decode_record.prompt), str(prompt)),
        *(
            (name, EXIT_PROMPT_DIFFERS, decode_record.digests[name] or "none", digest or "none")
            for name, digest in digests_of(requested).items()
        ),
        # Another version may allow other tokens.
        (
            "grammar's library",
            EXIT_KERNELS_DIFFER,
            decode_record.grammar_by,
            grammar_library() if requested.grammar else "",
        ),
        ("model", EXIT_MODEL_DIFFERS, decode_record.by.model_sha256, computed_here.model_sha256),
        ("set of kernels", EXIT_KERNELS_DIFFER, decode_record.by.kernels_sha256, computed_here.kernels_sha256),
    )
    mismatches = [
        (member, status, recorded, recomputed)
        for member, status, recorded, recomputed in pairs
        if recorded != recomputed
    ]
    for member, _, recorded, recomputed in mismatches:
        click.echo(
            f"gpulease: audit recompute: the {member} must be that of the record, {recorded}, not {recomputed}",
            err=True,
        )
    if mismatches:
        fail("audit recompute: nothing was computed", mismatches[0][1])


def possible_positions(config: ModelConfig, needed: int) -> tuple[int, ...]:
    """Return the values of `positions` to try, because the record does not contain the server's.

    The result depends on them only with LongRoPE, which has one rotation for short sequences and one for long ones
    (rotary.rotation_of).

    Args:
        config: The model's shape.
        needed: Number of positions of the request's prompt and output.
    """
    needed, scaling = min(needed, config.context), config.rope_scaling
    if isinstance(scaling, LongScaling) and needed <= scaling.original_context < config.context:
        return needed, scaling.original_context + 1
    return (needed,)


async def _decoded(
    address: str,
    checkpoint: Checkpoint,
    prompt: list[int],
    decode_record: DecodeRecord,
    sampling: SamplingParameters,
    positions: int,
) -> list[int]:
    count = decode_record.output.count
    # The record has the settings that affect the tokens.
    settings = DecoderSettings(ROWS, ROWS, 1, positions, decode_record.by.packed, decode_record.by.kv_dtype)
    async with Decoder.open(checkpoint, settings=settings, address=address) as decoder:
        masks = await decoder.grammars.compile(DEFAULT_TENANT, sampling.grammar) if sampling.grammar else None
        generation = decoder.submit(prompt, max_tokens=count, sampling=sampling, masks=masks)
        return [emitted.token async for emitted in generation]
