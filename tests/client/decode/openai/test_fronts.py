"""Fronts: what a front may send, and what happens if a front dies, hangs or sends false messages."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import subprocess
import threading
from typing import Any

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Mount, Route
from starlette.testclient import TestClient

from gpulease.client.decode.openai.completion_intake import MAX_BODY_BYTES, DecoderSource
from gpulease.client.decode.openai.fronts import front_server
from gpulease.client.decode.openai.fronts.front_messages import (
    MAX_FRAME_BYTES,
    Begin,
    Cancel,
    Drop,
    FromFront,
    FrontProtocolError,
    FrontReady,
    PlaceRequest,
    RequestSubmitted,
    frame,
    read_from_front,
    read_to_front,
)
from gpulease.client.decode.openai.fronts.front_source import FrontSource
from gpulease.client.decode.openai.fronts.inner_proxy import InnerProxy
from gpulease.client.decode.openai.openai_server import ERROR_REPLIES
from gpulease.client.decode.openai.served_models import OneModel
from helpers.daemon import Daemon
from helpers.decode.openai_rig import MODEL, OpenAiRig, openai_rig
from helpers.waiting import wait_until

PROMPT = "Changed in version"

MESSAGES = st.one_of(
    st.builds(PlaceRequest, st.integers(0, 2**63), st.text()),
    st.builds(Begin, st.integers(0, 2**63), st.binary(), st.booleans(), st.text()),
    st.builds(Cancel, st.integers(0, 2**63), st.integers(0, 2**31)),
    st.builds(Drop, st.integers(0, 2**63)),
    st.just(FrontReady()),
)


def read_all(data: bytes, step: int) -> list[FromFront]:
    """Return the messages read from bytes that arrive in pieces of `step` bytes."""

    async def read() -> list[FromFront]:
        reader = asyncio.StreamReader()
        found: list[FromFront] = []

        async def feed() -> None:
            for begin in range(0, len(data), step):
                reader.feed_data(data[begin : begin + step])
                await asyncio.sleep(0)
            reader.feed_eof()

        feeding = asyncio.create_task(feed())
        try:
            while (message := await read_from_front(reader)) is not None:
                found.append(message)
        finally:
            feeding.cancel()
        return found

    return asyncio.run(read())


@given(st.lists(MESSAGES, max_size=5), st.sampled_from([1, 7, 1 << 20]), st.binary(max_size=3))
def test_messages_are_read_as_they_were_sent_however_they_arrive(
    messages: list[FromFront], step: int, tail: bytes
) -> None:
    # `tail`, shorter than a length, is the end of a stream that was cut off.
    assert read_all(b"".join(map(frame, messages)) + tail, step) == messages


@given(st.binary(max_size=60))
def test_foreign_bytes_are_a_message_the_end_or_a_refusal(data: bytes) -> None:
    try:
        read_all(len(data).to_bytes(4, "big") + data, 1 << 20)
    except FrontProtocolError as error:
        assert str(error)  # noqa: PT017  # any other exception fails the test


def test_a_frame_is_refused_by_its_length_alone() -> None:
    with pytest.raises(FrontProtocolError, match="longer than"):
        read_all((MAX_FRAME_BYTES + 1).to_bytes(4, "big"), 4)


def front_pids() -> list[int]:
    """Return the process ids of the fronts that this process started."""
    done = subprocess.run(
        ["pgrep", "-P", str(os.getpid()), "-f", "fronts.front_process"], capture_output=True, text=True, check=False
    )
    return [int(word) for word in done.stdout.split()]


def complete(rig: OpenAiRig, **options: Any) -> httpx.Response:
    asked = {"model": MODEL, "prompt": PROMPT, "max_tokens": 12, "temperature": 0} | options
    with rig.http() as http:
        return http.post("/v1/completions", json=asked)


def live(rig: OpenAiRig) -> int:
    return int(rig.do(lambda: len(rig.decoder.scheduler.tenants["ann"].live)))


def test_a_front_that_is_killed_loses_its_own_streams_alone(shared_daemon: Daemon) -> None:
    with openai_rig(shared_daemon, wait_s=30.0, http_processes=1) as rig:
        expected = complete(rig).json()["choices"][0]["text"]
        asked = {"model": MODEL, "prompt": PROMPT, "max_tokens": 120, "stream": True}
        (before,) = front_pids()
        # A front ignores the SIGHUP of a reload that is sent to the whole process group.
        os.kill(before, signal.SIGHUP)
        with rig.http() as http, http.stream("POST", "/v1/completions", json=asked) as reply:
            pieces = reply.iter_bytes()
            next(pieces)
            os.kill(before, signal.SIGKILL)
            with pytest.raises(httpx.RemoteProtocolError):
                list(pieces)
        # Its sequence is cancelled and its place freed, and the next process serves.
        wait_until(lambda: live(rig) == 0, "the stream's sequence is cancelled")
        assert rig.do(lambda: rig.decoder.prompts.coming["ann"]) == 0
        wait_until(lambda: front_pids() not in ([], [before]), "another front was started")
        assert complete(rig).json()["choices"][0]["text"] == expected


def test_a_front_that_reads_nothing_is_ended(shared_daemon: Daemon, monkeypatch: pytest.MonkeyPatch) -> None:
    """The step loop never waits for a front, and the memory of unread messages is bounded."""
    # The limit is below a message's size: the first message that the socket does not accept exceeds it.
    monkeypatch.setattr(front_server, "MAX_UNREAD_BYTES", -1)
    with pytest.raises(front_server.FrontsFailed), openai_rig(shared_daemon, http_processes=1):
        pass


@pytest.mark.parametrize(
    ("messages", "reason"),
    [
        ([PlaceRequest(1, "nobody")], "can't begin"),
        ([PlaceRequest(1, "ann"), PlaceRequest(1, "ann")], "can't begin"),
        ([Begin(1, b"{}", False, "x")], "no place"),
        ([PlaceRequest(1, "ann"), Begin(1, b"{}", False, "x"), Begin(1, b"{}", False, "x")], "no place"),
    ],
)
def test_what_a_front_never_sends_ends_its_connection(
    fronted: OpenAiRig, messages: list[FromFront], reason: str
) -> None:
    sent: list[Any] = []

    async def receive() -> None:
        models = OneModel(fronted.decoder, DecoderSource(fronted.decoder, MODEL, 0.0, 8))
        connection = front_server.FrontConnection(models, sent.append)
        try:
            for message in messages:
                await connection.receive(message)
        finally:
            await connection.close()

    with pytest.raises(FrontProtocolError, match=reason):
        fronted.wait_for(receive())
    assert fronted.do(lambda: fronted.decoder.prompts.coming["ann"]) == 0


def test_messages_about_requests_that_are_over_do_nothing(fronted: OpenAiRig) -> None:
    async def receive() -> None:
        models = OneModel(fronted.decoder, DecoderSource(fronted.decoder, MODEL, 0.0, 8))
        connection = front_server.FrontConnection(models, lambda _: None)
        for message in (Cancel(9, 0), Drop(9), PlaceRequest(1, "ann"), Drop(1), Cancel(1, 0), Drop(1)):
            await connection.receive(message)

    fronted.wait_for(receive())
    assert fronted.do(lambda: fronted.decoder.prompts.coming["ann"]) == 0


def test_a_caller_that_goes_as_its_sequences_come_leaves_nothing_in_the_front(fronted: OpenAiRig) -> None:
    async def part() -> None:
        models = OneModel(fronted.decoder, DecoderSource(fronted.decoder, MODEL, 0.0, 8))
        (reader, writer), (ours, back) = [await asyncio.open_unix_connection(sock=end) for end in socket.socketpair()]
        connection = front_server.FrontConnection(models, lambda message: back.write(frame(message)))
        source = FrontSource(reader, writer, lambda _: fronted.decoder.tokenizer(), has_many=False)

        async def ask() -> None:
            async with source.place("ann") as place:
                body = {"prompt": PROMPT, "max_tokens": 60, "ignore_eos": True}
                await place.begin(json.dumps(body).encode(), "gone", is_chat=False)

        async def pass_on() -> None:
            while (message := await read_from_front(ours)) is not None:
                await connection.receive(message)

        asking, passing = asyncio.create_task(ask()), asyncio.create_task(pass_on())
        while not isinstance(message := await read_to_front(reader), RequestSubmitted):
            assert message is not None
            source._receive(message)
        source._receive(message)
        assert len(source._generations) == 1
        asking.cancel()
        await asyncio.wait({asking})
        assert source._generations == {}
        writer.close()
        await passing
        await connection.close()
        back.close()

    fronted.wait_for(part())


@pytest.fixture(scope="module")
def fronted(shared_daemon: Daemon) -> Any:
    with openai_rig(shared_daemon) as rig:
        yield rig


def test_a_reply_to_a_body_that_is_not_read_is_passed_on(fronted: OpenAiRig) -> None:
    body = b" " * MAX_BODY_BYTES
    with fronted.http() as http:
        for _ in range(8):
            assert http.post("/metrics", content=body).status_code == 405
            assert http.post("/tokenize", content=body, headers={"Authorization": ""}).status_code == 401


def test_failures_outside_of_any_endpoint_have_the_shape_of_all_errors() -> None:
    async def broken(_: Request) -> Response:
        raise ZeroDivisionError

    # The decoder's process has stopped or is about to stop.
    routes = [Route("/broken", broken), Mount("/", InnerProxy("/nowhere/socket"))]
    app = Starlette(routes=routes, exception_handlers=ERROR_REPLIES)
    http = TestClient(app, raise_server_exceptions=False)
    gone, failed = (http.get(path, headers={"X-Request-Id": "mine"}) for path in ("/tokenizer_info", "/broken"))
    assert (gone.status_code, gone.json()["error"]["code"], gone.headers["Retry-After"]) == (503, "stopping", "1")
    assert (failed.status_code, failed.json()["error"]["code"]) == (500, "internal_error")
    assert gone.headers["X-Request-Id"] == failed.headers["X-Request-Id"] == "mine"


@pytest.mark.parametrize("http_processes", [0, 1])
def test_a_stopping_server_finishes_its_streams(shared_daemon: Daemon, http_processes: int) -> None:
    asked = {"prompt": PROMPT, "max_tokens": 60, "stream": True, "ignore_eos": True}
    lines: list[str] = []
    begun = threading.Event()

    def read(rig: OpenAiRig) -> None:
        with rig.http() as http, http.stream("POST", "/v1/completions", json=asked) as reply:
            for line in reply.iter_lines():
                lines.append(line)
                if line.startswith("data: "):
                    begun.set()

    # Longer than any host needs for a few tokens.
    with openai_rig(shared_daemon, http_processes=http_processes, stop_s=60) as rig:
        reading = threading.Thread(target=read, args=[rig])
        reading.start()
        assert begun.wait(60)
    reading.join()
    objects = [json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: {")]
    assert [one["choices"][0]["finish_reason"] for one in objects][-1] == "length"
    assert "data: [DONE]" in lines
