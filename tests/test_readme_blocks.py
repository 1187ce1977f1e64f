"""Every code block of every README works as it is pasted: in the document's order, against one real daemon.

Python blocks go to one prompt a document. A comment behind a `print` says what is printed. Shell blocks run in bash;
those that can't run here have their command lines parsed, and the text beside them says what they need.
"""

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Final

import click
import pytest

from gpulease.client.cli.__main__ import main as gpulease
from gpulease.client.core.lease_request import LEASE_ID_VARIABLE
from gpulease.client.decode.openai.decode_settings import load_decode_settings
from gpulease.client.transport.credentials import VARIABLES
from gpulease.daemon.__main__ import main as gpuleased
from gpulease.daemon.config.settings import load_config
from gpulease.protocol.address import ADDRESS_VARIABLE
from helpers.audit_log import config as audit_config
from helpers.daemon import python_environment
from helpers.waiting import wait_until

ROOT: Final = Path(__file__).parents[1]

LIMIT_S: Final = 240.0
"""For one block: a few commands that start Python, on a host that is ten times slower than a quiet one."""

SERVER: Final = re.compile(r"(pip install '\S+' && )?gpulease serve ")
"""How a block begins whose only command serves until it is interrupted: it runs beside those that follow."""

USUAL_HTTP: Final = {
    "serve gateway": "127.0.0.1:8080",
    "serve models": "127.0.0.1:8081",
    "serve decode": "127.0.0.1:8082",
}
"""Where they listen if nobody says otherwise."""

RUN: Final = {"python", "sh"}
"""Languages of blocks that are run, but for shell blocks of NOT_RUN."""

NODE: Final = "gpuleased --listen unix:/tmp/gpulease.sock"
"""How the block begins that starts the daemon which all documents' programs use."""

VENV: Final = "python3 -m venv /opt/gpulease && /opt/gpulease/bin/pip install '.[daemon,cuda]'\n"
"""How the blocks begin that install the daemon."""

NOT_RUN: Final = {
    "pip install '.[daemon,test]'": "Run the tests",
    f"{VENV}/opt/gpulease/bin/gpuleased": "As root, on a host with a GPU",
    f"{VENV}/opt/gpulease/bin/gpulease install-service": "As root",
    "/opt/gpulease/bin/pip install --upgrade": "as root",
    "gpulease drain --within 10m --wait": "as root",
    "gpuleased --http": "as root",
    "export GPULEASE_ADDRESS=tls:": "From other hosts",
    "pip install '.[daemon,fleet]'": "On every GPU host",
    "gpulease pki issue /etc/gpulease/pki --server directory1.example": "hosts with access to etcd",
    "gpulease fleet quota default": "a user who may write there",
    "etcdctl snapshot restore": "on each of etcd's hosts",
    "etcdctl put /gpulease/v1/generation": "on one host",
    "etcd --quota-backend-bytes": "Use three members",
    "etcdctl --endpoints h1:2379,h2:2379,h3:2379 endpoint status": "defragment one member after the other",
    "etcdctl --endpoints h1:2379 endpoint status --write-out fields": "If etcd runs out of space",
}
"""Shell blocks that are only parsed, by their beginning, and what their section tells the reader of what they need."""

NEEDED: Final = {"client/kernels/README.md": ("triton", "cuda.bindings", "numba.cuda")}
"""Compilers that a document's programs use, and that the tests' own extras do not install."""

PROGRAMS: Final = {
    "curl",
    "etcd",
    "etcdctl",
    "ln",
    "od",
    "pip",
    "printf",
    "pytest",
    "python",
    "python3",
    "rm",
    "systemctl",
}
"""What shell blocks run besides our own commands."""


@dataclass(frozen=True)
class Block:
    """A fenced block of a document.

    Attributes:
        document: Its path from the top of the tree.
        line: The number of its first line.
        language: The fence's tag.
        text: Its lines.
        section: The text of the section that it is in.
    """

    document: str
    line: int
    language: str
    text: str
    section: str

    def __str__(self) -> str:
        return f"{self.document}:{self.line}"

    @property
    def is_run(self) -> bool:
        """Whether a shell block can be run in a test."""
        return not self.text.startswith(tuple(NOT_RUN))


def documents() -> list[str]:
    """Every README of the tree."""
    tops = ("client", "daemon", "protocol", "systemd", "tests", "vectors")
    found = [ROOT / "README.md", *(path for top in tops for path in (ROOT / top).rglob("*.md"))]
    return sorted(path.relative_to(ROOT).as_posix() for path in found)


def blocks_of(document: str) -> list[Block]:
    """The blocks of a document, in its order. A fence may be indented, and then ends as far in as it began."""
    text = (ROOT / document).read_text(encoding="utf-8")
    found = []
    for match in re.finditer(r"^( *)```(\S*)\n(.*?)^\1```$", text, flags=re.MULTILINE | re.DOTALL):
        section = text[text.rfind("\n## ", 0, match.start()) + 1 :].partition("\n## ")[0]
        line = text.count("\n", 0, match.start(3)) + 1
        found.append(Block(document, line, match[2], match[3], section))
    assert 2 * len(found) == len(re.findall(r"^ *```", text, flags=re.MULTILINE)), document
    return found


DOCUMENTS: Final = documents()
BLOCKS: Final = [block for document in DOCUMENTS for block in blocks_of(document)]


class Stage:
    """Runs blocks in a folder of its own, to which their paths and ports are moved."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._moved = {"/tmp/": f"{folder}/", "/etc/gpulease/": f"{folder}/", "/var/log/gpulease": f"{folder}/audit"}
        programs = {"gpuleased": "-P -m gpulease.daemon", "gpulease": "-P -m gpulease.client.cli", "python": ""}
        (folder / "bin").mkdir()
        for name, words in programs.items():
            program = folder / "bin" / name
            program.write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} {words} "$@"\n')
            program.chmod(0o755)
        self.environment = python_environment() | {"PATH": f"{folder}/bin:{os.environ['PATH']}"}

    def moved(self, text: str) -> str:
        """A block's text without its installation, and with places of this run."""
        text = re.sub(r"^pip install '\S+' && ", "", text)
        for place, ours in self._moved.items():
            text = text.replace(place, ours)
        return text

    def run(self, block: Block) -> None:
        """Run a shell block as one script."""
        script = self.moved(block.text)
        done = subprocess.run(
            ["bash", "-euo", "pipefail", "-c", script],
            cwd=ROOT,
            env=self.environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=LIMIT_S,
        )
        assert done.returncode == 0, f"{block}\n{script}\n{done.stdout}{done.stderr}"
        for said in re.findall(r"# (\d+ .*)$", block.text, flags=re.MULTILINE):
            assert " ".join(said.split()) in " ".join(done.stdout.split()), f"{block} printed {done.stdout}"

    @contextmanager
    def serving(self, block: Block, *more: str) -> Iterator[None]:
        """Run a shell block that serves, with more options, until the block of `with` ends."""
        words = [*shlex.split(self.moved(block.text), comments=True), *more]
        log = self._folder / f"{block.line}.log"
        with log.open("wb") as output:
            process = subprocess.Popen(words, cwd=ROOT, env=self.environment, stdout=output, stderr=output)
        try:
            wait_until(lambda: process.poll() is not None or " listen" in log.read_text(), f"{block} listens", LIMIT_S)
            assert process.poll() is None, log.read_text()
            yield
        finally:
            process.terminate()
            assert process.wait(LIMIT_S) == 0, log.read_text()

    @contextmanager
    def serving_http(self, block: Block) -> Iterator[None]:
        """The same for one of `gpulease serve`, whose usual port may be somebody else's."""
        with self.serving(block, "--listen", "tcp:127.0.0.1:0"):
            log = (self._folder / f"{block.line}.log").read_text()
            (port,) = set(re.findall(r"http://127\.0\.0\.1:(\d+)", log))
            self._moved |= {
                f"KEY_OF_{name.upper()}": key for name, key in re.findall(r"^Key of (\w+): (\w+)$", log, re.M)
            }
            self._moved[USUAL_HTTP[" ".join(block.text.split("gpulease ")[1].split()[:2])]] = f"127.0.0.1:{port}"
            yield

    @contextmanager
    def prompt(self) -> Iterator[Callable[[Block], None]]:
        """A Python prompt to paste blocks into."""
        with subprocess.Popen(
            [sys.executable, "-m", "helpers.pasting"],
            cwd=ROOT,
            env=self.environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        ) as process:
            yield partial(self._paste, process)
        assert process.returncode == 0

    def _paste(self, process: "subprocess.Popen[str]", block: Block) -> None:
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(json.dumps(self.moved(block.text)) + "\n")
        process.stdin.flush()
        answer = json.loads(process.stdout.readline())
        assert not answer["error"], f"{block}\n{answer['error']}"
        said = re.findall(r"^ *print\(.*\)  # (.+)$", block.text, flags=re.MULTILINE)
        assert len(said) == block.text.count("print("), f"{block}: say behind each print what it prints"
        assert set(answer["printed"].splitlines()) == set(said), f"{block} printed {answer['printed']}"


@pytest.fixture(scope="module")
def stage() -> Iterator[Stage]:
    """With the daemon that the first README starts, and GPULEASE_ADDRESS as it says; with an audit log besides."""
    # Not pytest's folder: a Unix socket's path has at most 107 bytes.
    with tempfile.TemporaryDirectory(prefix="gpul-", dir="/tmp") as name:
        folder = Path(name)
        stage = Stage(folder)
        # With host memory for parked sessions, which the guide's programs park.
        limits = '[limits]\npark_memory = "1GiB"\n'
        (folder / "config.toml").write_text(audit_config(folder / "audit") + limits)
        (node,) = [block for block in BLOCKS if block.text.startswith(NODE)]
        (address,) = re.findall(r"^export GPULEASE_ADDRESS=(unix:\S+)$", node.section, flags=re.MULTILINE)
        with stage.serving(node, "--config", f"{folder}/config.toml"):
            stage.environment["GPULEASE_ADDRESS"] = stage.moved(address)
            yield stage


def test_there_are_blocks() -> None:
    assert len(BLOCKS) > 15
    assert {"README.md", "client/README.md", "daemon/README.md"} <= {block.document for block in BLOCKS}


@pytest.mark.first
@pytest.mark.timeout(900)
@pytest.mark.parametrize("document", sorted({block.document for block in BLOCKS if block.language in RUN}))
def test_what_is_run_in_the_documents_order(stage: Stage, document: str) -> None:
    for module in NEEDED.get(document, ()):
        pytest.importorskip(module, reason=f"{document} is not run: it needs {module}")
    missing = {}
    with ExitStack() as stack:
        paste: Callable[[Block], None] | None = None
        for block in blocks_of(document):
            if block.language == "python":
                paste = paste or stack.enter_context(stage.prompt())
                paste(block)
            elif block.language == "sh" and block.is_run:
                if SERVER.match(block.text):
                    stack.enter_context(stage.serving_http(block))
                elif absent := {name for name in PROGRAMS if name in block.text.split() and not shutil.which(name)}:
                    missing[str(block)] = absent
                elif not block.text.startswith(NODE):
                    stage.run(block)
    if missing:
        pytest.skip(f"all others were run; this host lacks {missing}")


@pytest.mark.parametrize("block", BLOCKS, ids=str)
def test_a_block_is_what_its_tag_says(block: Block, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # As after `gpulease acquire`: some commands mean this lease.
    monkeypatch.setenv(LEASE_ID_VARIABLE, f"{1:032x}")
    match block.language:
        case "python":
            compile(block.text, str(block), "exec")
        case "sh":
            for line in logical_lines(block.text.replace("\\\n", " ")):
                for words in commands_of(line):
                    check_command(words)
        case "toml" if block.document.startswith("client/decode/"):
            (tmp_path / "decode.toml").write_text(block.text)
            load_decode_settings(tmp_path / "decode.toml")
        case "toml":
            (tmp_path / "gpuleased.toml").write_text(block.text)
            load_config(tmp_path / "gpuleased.toml", {})
        case "json":
            json.loads(block.text)
        case "text":
            pass
        case other:
            pytest.fail(f"{block}: nothing checks a block of {other or 'no language'}: see this test")


def test_what_is_not_run_says_what_it_needs() -> None:
    for beginning, told in NOT_RUN.items():
        (block,) = [block for block in BLOCKS if block.text.startswith(beginning)]
        assert told in " ".join(block.section.split()), block


def logical_lines(text: str) -> Iterator[str]:
    """Lines of shell; one whose quotes are open goes on in the next."""
    begun = ""
    for line in text.splitlines():
        begun += line
        try:
            commands_of(begun)
        except ValueError:
            begun += "\n"
        else:
            yield begun
            begun = ""
    assert not begun, f"a quote is never closed: {begun}"


def commands_of(line: str) -> list[list[str]]:
    """The commands of a line of shell, each as its words. Raises ValueError where a quote is open."""
    lexer = shlex.shlex(line, posix=True, punctuation_chars="&|;")
    lexer.whitespace_split = True
    found: list[list[str]] = [[]]
    for word in lexer:
        if set(word) <= set("&|;"):
            found.append([])
        else:
            found[-1].append(word)
    return [words for words in found if words]


def check_command(words: list[str]) -> None:
    """Fails unless the command is known, with its options."""
    name, rest = Path(words[0]).name, words[1:]
    match name:
        case "gpulease" | "gpuleased":
            command: click.Command = gpulease if name == "gpulease" else gpuleased
            while isinstance(command, click.Group):
                found = command.get_command(click.Context(command), rest[0])
                assert found is not None, words
                command, rest = found, rest[1:]
            command.make_context(name, rest)
        case "pip":
            extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
            assert set(re.findall(r"\w+", words[-1])) <= extras.keys(), words
        case "export":
            assert {word.partition("=")[0] for word in rest} <= {ADDRESS_VARIABLE, *VARIABLES.values()}, words
        case "eval":
            (printing,) = commands_of(rest[0].removeprefix("$(").removesuffix(")"))
            check_command(printing)
        case other:
            assert other in PROGRAMS, f"{words}: a program of ours, or one of PROGRAMS"
