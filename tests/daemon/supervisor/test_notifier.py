import asyncio
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from gpulease.daemon.supervisor.notifier import MAX_STATUS_CHARS, Notifier, status


@pytest.fixture
def heard(tmp_path: Path) -> Iterator[socket.socket]:
    """The other end, where words of an abstract socket arrive."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sock:
        sock.bind(f"\0gpulease-{tmp_path}"[:100])
        sock.setblocking(False)
        yield sock


def address_of(sock: socket.socket) -> str:
    return f"@{sock.getsockname()[1:].decode()}"


def test_the_address_is_taken_out_of_the_environment(heard: socket.socket) -> None:
    environment = {"NOTIFY_SOCKET": address_of(heard), "OTHER": "1"}
    notifier = Notifier.taken_from(environment)
    assert environment == {"OTHER": "1"}
    assert notifier.is_connected
    assert notifier.send("READY=1", "STATUS=here")
    assert heard.recv(100) == b"READY=1\nSTATUS=here"
    notifier.close()


@pytest.mark.parametrize("address", ["", "vsock:2:1234", "relative/path"])
def test_nobody_to_tell(address: str) -> None:
    notifier = Notifier.taken_from({"NOTIFY_SOCKET": address})
    assert not notifier.is_connected
    assert notifier.send("READY=1")


def test_one_who_is_gone_is_told_nothing_more(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    notifier = Notifier(str(tmp_path / "none"))
    assert notifier.send("READY=1")
    assert notifier.send("READY=1")
    assert [record.message for record in caplog.records] == [
        "the service manager can't be notified of the daemon's state: No such file or directory"
    ]
    assert not notifier.is_connected


def test_what_must_arrive_waits_for_room(heard: socket.socket) -> None:
    async def main() -> None:
        notifier = Notifier(address_of(heard))
        sent = 0
        while notifier.send("WATCHDOG=1"):
            sent += 1
        telling = asyncio.create_task(notifier.send_reliably("READY=1"))
        await asyncio.sleep(0)
        assert not telling.done()
        assert [heard.recv(100) for _ in range(sent)] == [b"WATCHDOG=1"] * sent
        await telling
        assert heard.recv(100) == b"READY=1"
        notifier.close()

    asyncio.run(main())


def test_a_status_is_one_bounded_line() -> None:
    assert status("two\nlines\tand  more") == "STATUS=two lines and more"
    assert len(status("x" * 10_000)) == len("STATUS=") + MAX_STATUS_CHARS


def test_a_start_asks_for_time_until_it_is_over(heard: socket.socket) -> None:
    async def main() -> None:
        notifier = Notifier(address_of(heard))
        async with notifier.starting():
            await asyncio.sleep(0)
        assert heard.recv(100) == b"EXTEND_TIMEOUT_USEC=30000000"
        assert len(asyncio.all_tasks()) == 1
        notifier.close()

    asyncio.run(main())
