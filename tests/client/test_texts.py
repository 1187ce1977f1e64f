"""Whatever text a program gives, it is told what is wrong with it, by an error of the library's."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpulease.client import (
    GpuBuilder,
    GpuLeaseError,
    GpuSession,
    InvalidRequest,
    KernelArgs,
    Permission,
    aio,
    inspect_token,
    my_audience,
    submit_by,
)
from gpulease.client.narrowing import attenuate
from gpulease.client.serve.gateway.ledger import operation_key
from gpulease.client.serve.rpc import RpcClient
from gpulease.client.texts import MAX_QUOTED_CHARS, bounded, kernel_name, parse_problem, quoted
from gpulease.client.transport.credentials import SecuredAddress, TlsFiles
from gpulease.client.transport.tls import context_of
from gpulease.protocol.limits import MAX_KERNEL_NAME_BYTES
from helpers.daemon import Daemon
from helpers.kernels import FAULTS

MAX_MESSAGE_CHARS = 1500
BAD: dict[str, Any] = {
    "a lone surrogate": "x\udcff",
    "half a pair": "\ud800",
    "NUL": "a\0b",
    "a megabyte": "x" * (1 << 20),
    "many bytes": "\N{PILE OF POO}" * (1 << 18),
    "no text": 17.5,
    "bytes": b"\xff" * 70_000,
    "a list": ["x"],
}
NEVER: dict[str, Callable[[Any], Any]] = {
    "the builder's address": lambda text: GpuBuilder(text).min_vram(1).acquire(),
    "a host": lambda text: GpuBuilder(f"tcp:{text}:1").min_vram(1).acquire(),
    "a socket's path": lambda text: GpuBuilder(f"unix:/{text}").min_vram(1).acquire(),
    "a card": lambda text: GpuBuilder("unix:/nowhere").device(text),
    "a certificate": lambda text: GpuBuilder("tls:localhost:1").tls(text, "/k", "/c").min_vram(1).acquire(),
    "a key": lambda text: GpuBuilder("tls:localhost:1").tls("/c", text, "/c").min_vram(1).acquire(),
    "a size": lambda text: GpuBuilder("unix:/nowhere").min_vram(text),
    "a time": lambda text: GpuBuilder("unix:/nowhere").lease_secs(text) if text != 17.5 else refuse(),
    "an exclusivity": lambda text: GpuBuilder("unix:/nowhere").exclusivity(text),
    "a token to submit by": lambda text: submit_by(text, "infer", b"x", "unix:/nowhere").launch(),
    "a kernel to submit": lambda text: submit_by(b"t", text, b"x", "unix:/nowhere").launch(),
    "a node to submit at": lambda text: submit_by(b"t", "infer", b"x", text),
    "a token to attach by": lambda text: GpuSession.attach(text, "unix:/nowhere"),
    "a token to look at": lambda text: inspect_token(text, "unix:/nowhere"),
    "a node": my_audience,
    "a parameter": lambda text: KernelArgs().push_parameter(text, "u32", 1) if text != BAD["a megabyte"] else refuse(),
    "a kind of parameter": lambda text: KernelArgs().push_parameter("x", text, 1),
    "a number": lambda text: KernelArgs().push_u32(text),
    "a model server's address": RpcClient,
    "a token to narrow": lambda text: attenuate(text, bytes(32)),
    "a key to narrow by": lambda text: attenuate(b"t", text),
    "a request of a gateway": operation_key,
    "the asyncio builder's address": lambda text: aio.GpuBuilder(text)._where(),
}
"""What needs no daemon."""

IN_SESSION: dict[str, Callable[[Any, Any], Any]] = {
    "an image": lambda session, text: session.module_load(text),
    "a kernel": lambda session, text: session.launch(session.module_load(FAULTS), text, [1], [1], KernelArgs()),
    "a grid": lambda session, text: session.launch(session.module_load(FAULTS), "fill_u32", text, [1], KernelArgs()),
    "a module": lambda session, text: session.launch(text, "fill_u32", [1], [1], KernelArgs()),
    "a buffer": lambda session, text: session.mem_write(text, 0, b"x"),
    "a type": lambda session, text: session.empty(1, text),
    "an audience": lambda session, text: session.lease.issue(Permission.MEM_READ, text),
    "a token to end": lambda session, text: session.lease.revoke_token(text),
    "an image to submit": lambda session, text: session.lease.submit("infer", text).launch(),
}


FILES = {("a certificate", "a lone surrogate"), ("a key", "a lone surrogate")}


def refuse() -> None:
    """What is right where others are not."""
    raise InvalidRequest("it is right")


def check_refused(call: Callable[[], Any], kind: type[GpuLeaseError] = GpuLeaseError) -> None:
    with pytest.raises(kind) as told:
        call()
    message = str(told.value)
    assert message.encode(), "it can be written down"
    assert 0 < len(message) <= MAX_MESSAGE_CHARS


@pytest.mark.parametrize("kind", BAD)
@pytest.mark.parametrize("place", NEVER)
def test_each_text(place: str, kind: str) -> None:
    # What is put into a text is one by then: "17.5" may be a host. A file's name may be any bytes (os.fsencode).
    is_text = isinstance(BAD[kind], str) and (place, kind) not in FILES
    check_refused(lambda: NEVER[place](BAD[kind]), InvalidRequest if is_text else GpuLeaseError)


@pytest.fixture(scope="module")
def session() -> Iterator[GpuSession]:
    daemon = Daemon()
    try:
        daemon.wait_until_it_answers()
        with daemon.builder().submits(1 << 20).acquire() as lease, GpuSession(lease) as session:
            yield session
    finally:
        daemon.stop()


@pytest.mark.parametrize("kind", BAD)
@pytest.mark.parametrize("place", IN_SESSION)
def test_each_text_of_a_session(session: GpuSession, place: str, kind: str) -> None:
    check_refused(lambda: IN_SESSION[place](session, BAD[kind]))
    session.sync()


def test_a_recorded_parameter_of_a_megabyte(session: GpuSession) -> None:
    module, out = session.module_load(FAULTS), session.mem_alloc(4)
    args = KernelArgs().push_buffer(out).push_u32(1).push_parameter("x" * (1 << 20), "u32", 1)

    def record() -> None:
        with session.record():
            session.launch(module, "fill_u32", [1], [1], args)

    check_refused(record)
    with session.record() as graph:
        session.launch(module, "fill_u32", [1], [1], KernelArgs().push_buffer(out).push_u32(1).push_u32(1))
    for text in BAD.values():
        if isinstance(text, str):
            values: dict[str, Any] = {text: 1}
            check_refused(lambda values=values: graph.launch(**values))  # type: ignore[misc]


@given(st.one_of(st.text(st.characters()), st.text(max_size=10).map(lambda text: text + "\udc80"), st.binary()))
def test_any_name(name: Any) -> None:
    assert len(quoted(name)) <= 12 * MAX_QUOTED_CHARS
    is_name = isinstance(name, str) and 0 < len(name.encode(errors="replace")) <= MAX_KERNEL_NAME_BYTES
    if is_name and "\0" not in name and not any("\ud800" <= mark <= "\udfff" for mark in name):
        assert kernel_name(name, "launch") == name
    else:
        check_refused(lambda: kernel_name(name, "launch"), InvalidRequest)


def test_the_error_of_a_file_can_be_written_down() -> None:
    with pytest.raises(InvalidRequest, match=r"the file /\\udcff can't be used") as told:
        context_of(TlsFiles("/\udcff", "/k", "/c"))
    assert str(told.value).encode()


def test_a_bounded_text() -> None:
    assert bounded("é", "it", 2) == "é"
    with pytest.raises(InvalidRequest, match="it must have 1 to 1 bytes, not 2"):
        bounded("é", "it", 1)


def test_paths_may_be_paths(tmp_path: Path) -> None:
    paths = [tmp_path / name for name in ("certificate", "key", "ca")]
    files: Any = [paths[0], str(paths[1]).encode(), str(paths[2])]
    address = GpuBuilder("tls:localhost:1").tls(*files)._where()
    assert isinstance(address, SecuredAddress)
    assert address.files == TlsFiles(*map(str, paths))


def test_a_value_that_python_can_not_write_is_quoted_without_an_error() -> None:
    deep: list[Any] = []
    for _ in range(100_000):
        deep = [deep]
    assert quoted(10**5000) == quoted(deep) == "a value that can't be shown"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[" * 100_000, "nested too deeply"),
        ("9" * 5000, "too many digits"),
        ("[1,", "Expecting value: line 1 column 4"),
    ],
)
def test_why_a_text_is_not_json_names_no_function_of_python(text: str, said: str) -> None:
    with pytest.raises((ValueError, RecursionError)) as raised:
        json.loads(text)
    problem = parse_problem(raised.value)
    assert said in problem
    assert "()" not in problem
