"""Real processes that read texts, with low limits."""

import asyncio
import os
import select
import signal
import socket
import sys
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Final

import pytest
from tokenizers import AddedToken, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as LibraryTokenizer

from gpulease.client.decode.decode_errors import (
    AdmissionRefused,
    ModelRejected,
    NoModelLoaded,
    RequestRejected,
    TextNotRead,
    TextProcessesFailed,
)
from gpulease.client.decode.decode_log import DecodeLog
from gpulease.client.decode.text import fork_server, text_processes
from gpulease.client.decode.text.chat_template import ChatTemplate
from gpulease.client.decode.text.fork_server import ForkedWorker, ForkServer
from gpulease.client.decode.text.grammar import regex_rule
from gpulease.client.decode.text.letters import LETTERS
from gpulease.client.decode.text.text_jobs import TextLimits, read_chat, read_text, unpacked_tokens
from gpulease.client.decode.text.text_processes import TextProcesses
from gpulease.client.decode.text.tokenizer import Tokenizer
from helpers.decode.text_jobs import check, crash, fail, panic
from helpers.processes import own_descendants, process_info
from helpers.waiting import PATIENCE_S

LIMITS: Final = TextLimits(memory_bytes=96 << 20, processor_s=1)
CONTEXT: Final = 100_000
ENDLESS: Final = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"

# Each takes more than the limits of a template bound by themselves.
MEMORY: Final = {
    "~": "{% set ns = namespace(x='aaaaaaaa') %}{% for i in range(27) %}{% set ns.x = ns.x ~ ns.x %}{% endfor %}",
    "+": "{% set ns = namespace(x='aaaaaaaa') %}{% for i in range(27) %}{% set ns.x = ns.x + ns.x %}{% endfor %}",
    "lists": "{% set ns = namespace(x=[1,1]) %}{% for i in range(27) %}{% set ns.x = ns.x + ns.x %}{% endfor %}",
    "center": "{{ 'x'.center(1000000000)|length }}",
    "|center": "{{ 'x'|center(1000000000)|length }}",
    "%": "{{ ('%1000000000s' % 'x')|length }}",
    "format": "{{ '{:>1000000000}'.format('x')|length }}",
    "|format": "{{ '%1000000000d'|format(1)|length }}",
    "indent": "{{ 'x\ny'|indent(1000000000)|length }}",
    "tojson": "{{ {'a': 1}|tojson(indent=1000000000)|length }}",
    "zfill": "{{ 'x'.zfill(1000000000)|length }}",
    "replace": "{{ ('x'*1000000).replace('x', 'y'*1000)|length }}",
    "join": "{{ range(100000)|join('y'*10000)|length }}",
}
PROCESSOR: Final = {
    "loops": ENDLESS,
    "whole numbers": "{% set ns = namespace(x=10) %}{% for i in range(30) %}{% set ns.x = ns.x * ns.x %}{% endfor %}",
}


def chosen(ways: dict[str, str]) -> str:
    """One template of many, of which the first message names one."""
    parts = [f"{{% if messages[0].content == {name!r} %}}{source}{{% endif %}}" for name, source in ways.items()]
    return "".join(parts) + "{{ messages[0].content }}"


def tokenizer(template: str | None = None) -> Tokenizer:
    library = LibraryTokenizer(models.BPE(dict(LETTERS), []))
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    library.decoder = decoders.ByteLevel()
    library.add_special_tokens([AddedToken("<end>", special=True)])
    made = None if template is None else ChatTemplate(template, {"bos_token": "<end>"}, "a file")
    return Tokenizer(library, 256, made, "a file")


@asynccontextmanager
async def running(template: str = "", limits: TextLimits = LIMITS, count: int = 2) -> AsyncIterator[TextProcesses]:
    processes = await TextProcesses.of(tokenizer(template), CONTEXT, count, limits, DecodeLog())
    try:
        yield processes
    finally:
        await processes.stop()


def play(scene: Callable[[TextProcesses], Coroutine[Any, Any, None]], template: str = "", **settings: Any) -> None:
    async def part() -> None:
        before = asyncio.all_tasks()
        async with running(template, **settings) as processes:
            await scene(processes)
        assert asyncio.all_tasks() == before

    asyncio.run(part())


async def text_tokens(processes: TextProcesses, text: str, tenant: str = "a") -> list[int]:
    return list(unpacked_tokens((await processes.do(tenant, read_text, {"text": text}))["tokens"]))


async def chat_tokens(processes: TextProcesses, content: str, tenant: str = "a", **variables: Any) -> list[int]:
    messages = [{"role": "user", "content": content}]
    answer = await processes.do(tenant, read_chat, {"messages": messages, "variables": variables})
    return list(unpacked_tokens(answer["tokens"]))


def test_a_process_reads_as_the_tokenizer_does() -> None:
    template = "{{ bos_token }}{{ messages[0].content }}{{ mood }}"
    known = tokenizer(template)

    async def scene(processes: TextProcesses) -> None:
        for text in ("", "a", "äh <end> 😀", "<end>b"):
            assert await text_tokens(processes, text) == known.encode(text)
        assert await chat_tokens(processes, "hi", mood="!") == known.encode("<end>hi!")
        # What is refused there is refused here, in the same words, and costs no process.
        for part in (text_tokens(processes, "a\ud800"), chat_tokens(processes, "a\ud800")):
            with pytest.raises(RequestRejected, match="the text can't be cut into tokens"):
                await part
        with pytest.raises(RequestRejected, match="does not accept these messages"):
            await processes.do("a", read_chat, {"messages": [], "variables": {}})
        with pytest.raises(RequestRejected, match="has a value that JSON can't represent"):
            await chat_tokens(processes, "hi", mood=object())
        assert processes.replaced == 0

    play(scene, template)


def test_what_can_t_fit_is_refused_before_it_is_cut() -> None:
    """The longest entry has 5 bytes: a text of more than 5 times the context can't fit, and one of less may not."""

    async def scene(processes: TextProcesses) -> None:
        for part in (text_tokens(processes, "é" * 250_001), chat_tokens(processes, "é" * 250_001)):
            with pytest.raises(AdmissionRefused, match=r"TooLarge: the (prompt|chat) has 500,002 bytes of text"):
                await part
        with pytest.raises(AdmissionRefused, match=r"TooLarge: the prompt has 25,165,\d+ bytes"):
            await text_tokens(processes, "a" * (24 << 20))
        with pytest.raises(AdmissionRefused, match="TooLarge: the prompt has 100002 tokens"):
            await text_tokens(processes, "a" * 100_001)
        nested: list[Any] = []
        for _ in range(40):
            nested = [nested]
        with pytest.raises(RequestRejected, match="nested more than 32 levels"):
            await chat_tokens(processes, "hi", mood=nested)

    play(scene)


@pytest.mark.parametrize(
    ("ways", "limit"), [(MEMORY, "memory"), pytest.param(PROCESSOR, "processor", marks=pytest.mark.exhaustive)]
)
def test_a_template_that_explodes_costs_its_own_request_alone(ways: dict[str, str], limit: str) -> None:
    words = {"memory": "needs more than 96 MiB of memory", "processor": "takes more than 1 s of CPU time"}

    async def scene(processes: TextProcesses) -> None:
        for way in ways:
            with pytest.raises(TextNotRead, match=words[limit]) as raised:
                await chat_tokens(processes, way)
            assert raised.value.limit == limit
            # Whoever comes next is served, of the same tenant as well.
            assert len(await chat_tokens(processes, "hi")) == 3
        assert processes.replaced == len(ways)

    play(scene, chosen(ways))


def test_others_go_on_while_a_tenant_s_texts_take_their_time() -> None:
    async def scene(processes: TextProcesses) -> None:
        slow = [asyncio.create_task(chat_tokens(processes, "slow")) for _ in range(2)]
        for _ in range(5):
            assert len(await chat_tokens(processes, "hi", "b")) == 3
        assert not any(task.done() for task in slow)
        for task in slow:
            task.cancel()
        await asyncio.gather(*slow, return_exceptions=True)

    play(scene, chosen({"slow": ENDLESS}))


def test_a_text_that_takes_too_long_by_the_clock_is_given_up() -> None:
    async def scene(processes: TextProcesses) -> None:
        with pytest.raises(TextNotRead, match=r"took more than 0.3 s") as raised:
            await chat_tokens(processes, "slow")
        assert raised.value.limit == "time"
        assert len(await chat_tokens(processes, "hi")) == 3

    play(scene, chosen({"slow": ENDLESS}), limits=TextLimits(wall_s=0.3))


def test_a_process_that_something_else_killed_costs_nobody_a_request() -> None:
    before = own_descendants()

    async def scene(processes: TextProcesses) -> None:
        assert len(await text_tokens(processes, "a")) == 2
        (server,) = [pid for pid in own_descendants() - before if _parent(pid) == os.getpid()]
        for pid in own_descendants() - before - {server}:
            os.kill(pid, signal.SIGKILL)
        assert len(await text_tokens(processes, "a")) == 2
        os.kill(server, signal.SIGKILL)
        # Until another one has taken its place, every text is read as well.
        while server in own_descendants():
            assert len(await text_tokens(processes, "a")) == 2

    play(scene)


@pytest.fixture
def _helpers_are_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """Processes find the tests' own jobs."""
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(Path(__file__).parents[3]), *sys.path]))


@pytest.mark.usefixtures("_helpers_are_there")
def test_a_fault_in_a_process_is_an_error_and_costs_no_other_text() -> None:
    """A text that ends its process is tried in at most two processes: it would probably end a third one, too."""

    async def scene(processes: TextProcesses) -> None:
        with pytest.raises(TextNotRead, match="ended the process that parsed it, 2 times") as raised:
            await processes.do("a", crash, {})
        assert raised.value.limit == "process"
        with pytest.raises(TextProcessesFailed, match="the server's log has details"):
            await processes.do("a", fail, {})
        assert processes.replaced == 3
        with pytest.raises(TextNotRead, match="made a library of the server fail") as raised:
            await processes.do("a", panic, {})
        assert (raised.value.limit, processes.replaced) == ("library", 4)
        assert len(await text_tokens(processes, "a")) == 2

    play(scene)


@pytest.mark.usefixtures("_helpers_are_there")
@pytest.mark.parametrize("part", ["a?", ".?", "a*b*"])
def test_a_grammar_that_takes_long_to_compile_is_found_in_a_process(part: str) -> None:
    """The library would need the square of its length, in a thread of the server, which nothing can end."""

    async def scene(processes: TextProcesses) -> None:
        with pytest.raises(TextNotRead) as raised:
            await processes.do("a", check, {"grammar": f"start: {regex_rule(part * 15_000)}"})
        # Whichever it reaches first.
        assert raised.value.limit in ("processor", "memory")
        assert await processes.do("a", check, {"grammar": f"start: {regex_rule(part * 50)}"})

    play(scene)


def test_the_end_of_the_processes_ends_what_waits_for_them() -> None:
    async def part() -> None:
        async with running(chosen({"slow": ENDLESS}), count=1) as processes:
            slow = [asyncio.create_task(chat_tokens(processes, "slow", tenant)) for tenant in "abc"]
            await asyncio.sleep(0)
        for result in await asyncio.gather(*slow, return_exceptions=True):
            assert isinstance(result, NoModelLoaded)
        with pytest.raises(NoModelLoaded):
            await text_tokens(processes, "a")

    asyncio.run(part())


@pytest.mark.exhaustive
def test_a_caller_that_gives_up_leaves_its_place() -> None:
    async def scene(processes: TextProcesses) -> None:
        slow = asyncio.create_task(chat_tokens(processes, "slow"))
        waiting = [asyncio.create_task(chat_tokens(processes, "slow")) for _ in range(50)]
        await asyncio.sleep(0)
        for task in waiting:
            task.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)
        with pytest.raises(TextNotRead):
            await slow
        # Had they kept their places, each would take its second first.
        assert len(await chat_tokens(processes, "hi")) == 3
        assert processes.replaced == 1

    play(scene, chosen({"slow": ENDLESS}))


def test_a_tokenizer_that_can_t_be_made_there_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    async def part() -> None:
        made = tokenizer("")
        with monkeypatch.context() as patch:
            patch.setattr(Tokenizer, "values", lambda _: [b"{}", None, None, "a file", True])
            with pytest.raises(ModelRejected, match="a file: not a valid tokenizer"):
                await TextProcesses.of(made, CONTEXT, 1, LIMITS, DecodeLog())
        monkeypatch.setattr("sys.executable", "/nowhere/python")
        with pytest.raises(TextProcessesFailed, match="can't be started"):
            await TextProcesses.of(made, CONTEXT, 1, LIMITS, DecodeLog())

    asyncio.run(part())


def _parent(pid: int) -> int:
    info = process_info(pid)
    return 0 if info is None else info.parent


SHORT_S: Final = 0.05


def be_late_soon(sock: int) -> None:
    """Block the event loop, from the turn after the next, until a process has answered and its time is over."""

    def be_late() -> None:
        assert select.select([sock], [], [], PATIENCE_S)[0], "the process has answered"
        time.sleep(2 * SHORT_S)

    loop = asyncio.get_running_loop()
    loop.call_soon(loop.call_soon, be_late)


def test_a_text_that_was_read_in_time_is_answered_by_a_server_that_is_late(monkeypatch: pytest.MonkeyPatch) -> None:
    class Worker(ForkedWorker):
        async def do(self, frame: bytes) -> dict[str, Any] | None:
            be_late_soon(self._writer.get_extra_info("socket").fileno())
            return await super().do(frame)

    async def scene(processes: TextProcesses) -> None:
        assert await text_tokens(processes, "a") == tokenizer().encode("a")
        assert processes.replaced == 0

    monkeypatch.setattr(fork_server, "ForkedWorker", Worker)
    play(scene, limits=TextLimits(wall_s=SHORT_S))


def test_a_fork_server_that_is_ready_in_time_serves_a_server_that_is_late(monkeypatch: pytest.MonkeyPatch) -> None:
    class Server(ForkServer):
        def __init__(self, process: Any, control: socket.socket) -> None:
            super().__init__(process, control)
            be_late_soon(control.fileno())

    async def scene(processes: TextProcesses) -> None:
        assert await text_tokens(processes, "a") == tokenizer().encode("a")

    monkeypatch.setattr(fork_server, "START_LIMIT_S", SHORT_S)
    monkeypatch.setattr(text_processes, "ForkServer", Server)
    play(scene)
