"""`gpulease audit recompute`: a request that a real decoder served, as it was recorded and as it was not."""

import asyncio
import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from gpulease.client.cli import audit_recompute as command
from gpulease.client.cli.__main__ import main
from gpulease.client.decode import TINY_MODEL, Decoder, DecoderSettings, KvDtype, SamplingParameters, open_model
from gpulease.client.decode.model_config import LongScaling
from gpulease.client.decode.supervisor.decode_audit import DecodeAudit
from gpulease.client.decode.text.grammar import json_rule
from gpulease.client.decode.text.prompt_reader import PromptReader
from gpulease.client.decode.text.written_grammar import lark_of
from gpulease.protocol.address import ADDRESS_VARIABLE
from helpers.audit_log import check_whole, config, records
from helpers.daemon import Daemon

pytestmark = pytest.mark.usefixtures("_decode_kernels")

PROMPT = "The with statement"
TOKENS = 6
CHOSEN = SamplingParameters(temperature=0.8, top_p=0.95, top_k=40, seed=7)


class Recorded:
    """A daemon with a log that has one request, which was cancelled before its end."""

    def __init__(self, folder: Path) -> None:
        self.log = folder / "log"
        self.daemon = Daemon(config=config(self.log))
        self.daemon.wait_until_it_answers()
        self.record = self.decoded(CHOSEN)

    def decoded(self, sampling: SamplingParameters, kv_dtype: KvDtype = KvDtype.BF16) -> Any:
        """Serve one request. Returns its record."""
        asyncio.run(self._serve(sampling, kv_dtype))
        found = [record for record in records(self.log) if record["kind"] == "note"]
        return [record for record in found if record["data"]["note"]["event"] == "decode"][-1]

    async def _serve(self, sampling: SamplingParameters, kv_dtype: KvDtype) -> None:
        checkpoint = open_model(TINY_MODEL)
        audit = await DecodeAudit.of(checkpoint, kv_dtype=kv_dtype)
        settings = DecoderSettings(16, 16, 1, 64, kv_dtype=kv_dtype)
        opened = Decoder.open(checkpoint, settings=settings, address=self.daemon.address, observers=[audit])
        async with opened as decoder, audit.writing(lambda: decoder.engine.lease):
            prompt = checkpoint.tokenizer().encode(PROMPT)
            masks = await decoder.grammars.compile("default", sampling.grammar) if sampling.grammar else None
            generation = decoder.submit(prompt, max_tokens=40, sampling=sampling, masks=masks)
            emitted = 0
            async for _ in generation:
                emitted += 1
                if emitted == TOKENS:
                    generation.cancel()


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Recorded]:
    made = Recorded(tmp_path_factory.mktemp("recorded"))
    try:
        yield made
    finally:
        made.daemon.stop()


def recompute(recorded: Recorded, record: Any, prompt: str, tmp_path: Path, *more: str) -> Result:
    file = tmp_path / "prompt"
    file.write_text(prompt)
    words = ["audit", "recompute", "-", "--prompt", str(file), *more]
    text = record if isinstance(record, str) else json.dumps(record)
    return CliRunner().invoke(main, words, input=text, env={ADDRESS_VARIABLE: recorded.daemon.address})


def changed(record: dict[str, Any], **parts: dict[str, Any]) -> dict[str, Any]:
    """The record with parts of its note changed."""
    copy: dict[str, Any] = json.loads(json.dumps(record))
    for name, part in parts.items():
        copy["data"]["note"][name].update(part)
    return copy


def test_a_cancelled_request_is_recorded_and_is_computed_equally(recorded: Recorded, tmp_path: Path) -> None:
    check_whole(recorded.log)
    note = recorded.record["data"]["note"]
    assert (note["reason"], note["output"]["count"] >= TOKENS) == ("Cancelled", True)
    done = recompute(recorded, recorded.record, PROMPT, tmp_path)
    assert (done.exit_code, "The output is the same" in done.stdout) == (0, True), done.output


def test_penalties_and_biases_are_computed_equally(recorded: Recorded, tmp_path: Path) -> None:
    """The record has the penalties, and the digest of the biases, which the command gets as the request had them."""
    sampling = SamplingParameters(
        0.8, seed=5, min_p=0.01, repetition_penalty=1.3, presence_penalty=0.5, frequency_penalty=0.25,
        logit_bias=((40, 3.5), (41, -100.0)), min_tokens=3, stop_token_ids=(9,),
    )  # fmt: skip
    record = recorded.decoded(sampling)
    file = tmp_path / "biases"
    file.write_text('{"41": -100, "40": 3.5}')
    done = recompute(recorded, record, PROMPT, tmp_path, "--logit-bias", str(file))
    assert (done.exit_code, "The output is the same" in done.stdout) == (0, True), done.output
    done = recompute(recorded, record, PROMPT, tmp_path)
    assert done.exit_code == command.EXIT_PROMPT_DIFFERS
    assert "the logit_bias must be that of the record" in done.stderr
    done = recompute(
        recorded,
        changed(record, sampling={"min_p": "1.0", "presence_penalty": "-2.0"}),
        PROMPT,
        tmp_path,
        "--logit-bias",
        str(file),
    )
    assert done.exit_code == command.EXIT_OUTPUT_DIFFERS


def test_keys_and_values_in_fp8_are_computed_equally(recorded: Recorded, tmp_path: Path) -> None:
    record = recorded.decoded(SamplingParameters(1.5, seed=5), KvDtype.FP8)
    done = recompute(recorded, record, PROMPT, tmp_path)
    assert (done.exit_code, "The output is the same" in done.stdout) == (0, True), done.output


def test_a_request_s_body_gives_its_prompt_and_its_grammar(recorded: Recorded, tmp_path: Path) -> None:
    """The masks come from the schema in the body; another schema is another grammar."""

    def body(most: int) -> str:
        schema = {"type": "array", "items": {"type": "integer", "maximum": most}}
        form = {"type": "json_schema", "json_schema": {"name": "list", "schema": schema}}
        return json.dumps({"prompt": PROMPT, "response_format": form})

    schema = json.loads(body(9))["response_format"]["json_schema"]["schema"]
    record = recorded.decoded(SamplingParameters(0.9, seed=3, grammar=f"start: {json_rule(schema)}"))
    file = tmp_path / "body"
    for text, status, said in (
        (body(9), 0, "is the same"),
        (body(8), command.EXIT_PROMPT_DIFFERS, "the grammar must be"),
    ):
        file.write_text(text)
        words = ["audit", "recompute", "-", "--request", str(file)]
        environment = {ADDRESS_VARIABLE: recorded.daemon.address}
        done = CliRunner().invoke(main, words, input=json.dumps(record), env=environment)
        assert (done.exit_code, said in done.output) == (status, True), done.output


def test_a_request_s_body_gives_its_written_grammar(recorded: Recorded, tmp_path: Path) -> None:
    written = 'root ::= "(" root ")" | [a-c]{3,9}'
    record = recorded.decoded(SamplingParameters(0.9, seed=3, grammar=lark_of(written)))
    file = tmp_path / "body"
    for text, status, said in (
        (written, 0, "is the same"),
        (written + ' | ""', command.EXIT_PROMPT_DIFFERS, "the grammar must be"),
    ):
        file.write_text(json.dumps({"prompt": PROMPT, "grammar": text}))
        environment = {ADDRESS_VARIABLE: recorded.daemon.address}
        arguments = ["audit", "recompute", "-", "--request", str(file)]
        done = CliRunner().invoke(main, arguments, input=json.dumps(record), env=environment)
        assert (done.exit_code, said in done.output) == (status, True), done.output


def test_a_request_s_body_gives_its_lists_of_tokens(recorded: Recorded, tmp_path: Path) -> None:
    """The record has their digests; in another order they are the same lists."""
    tokenizer = open_model(TINY_MODEL).tokenizer()
    words = tuple(PromptReader(tokenizer, 160).read_word("version"))
    sampling = SamplingParameters(0.9, seed=3, allowed_token_ids=tuple(range(20, 200)), bad_words=words)
    record = recorded.decoded(sampling)
    body: dict[str, Any] = {"prompt": PROMPT, "bad_words": ["version"]}
    file = tmp_path / "body"
    for allowed, status, said in (
        (list(range(199, 19, -1)), 0, "is the same"),
        ([5], command.EXIT_PROMPT_DIFFERS, "the allowed_token_ids must be"),
    ):
        file.write_text(json.dumps(body | {"allowed_token_ids": allowed}))
        environment = {ADDRESS_VARIABLE: recorded.daemon.address}
        arguments = ["audit", "recompute", "-", "--request", str(file)]
        done = CliRunner().invoke(main, arguments, input=json.dumps(record), env=environment)
        assert (done.exit_code, said in done.output) == (status, True), done.output


@pytest.mark.parametrize(
    "parts",
    [{"output": {"sha256": "0" * 64}}, pytest.param({"sampling": {"seed": "8"}}, marks=pytest.mark.exhaustive)],
)
def test_a_tampered_record_shows(recorded: Recorded, tmp_path: Path, parts: dict[str, Any]) -> None:
    tokens = json.dumps(open_model(TINY_MODEL).tokenizer().encode(PROMPT))
    done = recompute(recorded, changed(recorded.record, **parts), tokens, tmp_path)
    assert (done.exit_code, "DIFFERS" in done.stderr) == (command.EXIT_OUTPUT_DIFFERS, True)


def test_what_differs_is_named_and_nothing_is_computed(recorded: Recorded, tmp_path: Path) -> None:
    other = changed(recorded.record, model={"sha256": "1" * 64})
    other["data"]["note"]["kernels_sha256"] = "2" * 64
    done = recompute(recorded, recorded.record, PROMPT + "!", tmp_path)
    assert (done.exit_code, "the prompt must be that of the record" in done.stderr) == (
        command.EXIT_PROMPT_DIFFERS,
        True,
    )
    done = recompute(recorded, other, PROMPT, tmp_path)
    assert done.exit_code == command.EXIT_MODEL_DIFFERS
    assert "the model must be that of the record" in done.stderr
    assert "the set of kernels must be that of the record" in done.stderr


@pytest.mark.parametrize("record", ["", "[]", "{}", '{"data":{"note":{"event":"decode"}}}', "no JSON"])
def test_what_is_no_record_is_said(recorded: Recorded, tmp_path: Path, record: str) -> None:
    assert recompute(recorded, record, PROMPT, tmp_path).exit_code == command.EXIT_NO_RECORD


def test_a_request_is_computed_with_each_rotation_that_its_server_may_have_had() -> None:
    """LongRoPE's is that of the server's positions, which a record does not have."""
    config = replace(open_model(TINY_MODEL).config, context=256)
    long = replace(config, rope_scaling=LongScaling((1.0,) * 16, (2.0,) * 16, 64, 1.0))
    assert command.possible_positions(config, 40) == (40,)
    assert command.possible_positions(config, 300) == (256,)
    assert command.possible_positions(long, 40) == (40, 65)
    assert command.possible_positions(long, 64) == (64, 65)
    assert command.possible_positions(long, 65) == (65,)
    assert command.possible_positions(replace(long, context=64), 40) == (40,)


def test_help_lists_it(recorded: Recorded) -> None:
    assert "recompute" in CliRunner().invoke(main, ["--help"]).stdout
    assert "--prompt" in CliRunner().invoke(main, ["audit", "recompute", "-h"]).stdout
