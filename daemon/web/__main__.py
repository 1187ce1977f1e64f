"""`python -m gpulease.daemon.web CHANNEL_FD PARENT_PID SANDBOX`: the broker starts it."""

import asyncio
import os
import signal
import socket
import sys
from typing import Any, Final

if __name__ == "__main__":
    from gpulease.imports import begin_imports

    begin_imports()

from gpulease.daemon.contract.message_fields import MalformedMessage, expect_message
from gpulease.daemon.contract.messages import HelperBroken, HelperPrepared, Ready
from gpulease.daemon.host.ipc import ChannelClosed, receive_message, send_message
from gpulease.daemon.host.processes import die_with_parent, set_name
from gpulease.daemon.log.writer import go_on_logging
from gpulease.daemon.sandbox.measures import SandboxNeeds, SandboxSettings, SandboxUnavailable
from gpulease.daemon.sandbox.trial import prepare
from gpulease.daemon.web.app import Page, PageAccess, Site, load_page, rehearse
from gpulease.daemon.web.broker_link import BrokerChannel, BrokerLink, BrokerSilent
from gpulease.daemon.web.guard import App, limit_server_log
from gpulease.daemon.web.http_server import server_of
from gpulease.daemon.web.load_samples import Loads
from gpulease.daemon.web.page_state import Feed
from gpulease.daemon.web.view import Pseudonyms
from gpulease.daemon.web.web_messages import START, WebStart
from gpulease.imports import end_imports

MAX_PRIVATE_BYTES: Final = 512 << 20
"""Maximum private memory of the process in bytes, in case of an attack. The process normally uses about 60 MiB."""

NICENESS: Final = 5
"""Nice value of the process, so that tenants' work has priority."""


def main(channel_fd: int, parent_pid: int, sandbox: SandboxSettings) -> int:
    """Receive the sockets from the broker, enter the sandbox, and serve. Returns the exit status."""
    die_with_parent(parent_pid)
    set_name("gpul-web")
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.nice(NICENESS)
    go_on_logging("web", reopens=False)
    limit_server_log()
    channel = socket.socket(fileno=channel_fd)
    try:
        # Step 1: receive the settings and the sockets. The process has not yet read a byte of a request.
        received, fds = receive_message(channel)
        start = expect_message(START, received)
        broker, *listeners = (socket.socket(fileno=fd) for fd in fds)
        # Step 2: import all modules and read the page's files, because the sandbox hides files.
        plan, _ = prepare(sandbox, SandboxNeeds(private_bytes=MAX_PRIVATE_BYTES), lambda _: ())
        page = load_page()
        asyncio.run(_rehearse(start, page))
        # Enter the sandbox between two event loops: the first has closed its descriptors, and the second has opened
        # none.
        plan.enter((channel_fd, *fds), parent_pid)
        # Step 3: ask the broker to open the connection, over which the process must soon send HELLO.
        send_message(channel, HelperPrepared().to_map())
        asyncio.run(_serve(start, page, channel, broker, listeners))
    except ChannelClosed:
        return 0
    except (MalformedMessage, SandboxUnavailable, BrokerSilent, OSError) as error:
        send_message(channel, HelperBroken(str(error)).to_map())
        return 1
    return 0


def _site(start: WebStart, page: Page, feed: Feed) -> tuple[App, BrokerChannel]:
    access, loads = PageAccess(start.token_digest), Loads()
    broker_channel = BrokerChannel(access.change, loads.take, feed.on_membership)
    site = Site(feed, access, Pseudonyms(start.secret), page, broker_channel, loads)
    others = frozenset(start.others)
    return site.app(others | frozenset(start.hosts), others), broker_channel


async def _rehearse(start: WebStart, page: Page) -> None:
    app, _ = _site(start, page, Feed(start.node))
    server_of(app)
    await rehearse(app, start.hosts[0])


async def _serve(
    start: WebStart, page: Page, channel: socket.socket, broker: socket.socket, listeners: list[socket.socket]
) -> None:
    """Serve until the broker is gone, or until the feed or the server fails. Raises BrokerSilent or ChannelClosed."""
    loop = asyncio.get_running_loop()
    feed = Feed(start.node)
    # Connect to the broker before serving, because the page shows the broker's reports.
    _, link = await loop.create_connection(lambda: BrokerLink(feed.on_event), sock=broker)
    await link.greet()
    app, broker_channel = _site(start, page, feed)
    broker_channel.open(channel)
    server = server_of(app)
    feeding, serving = loop.create_task(feed.run(link)), loop.create_task(server.serve(sockets=listeners))
    begin_task = loop.create_task(server.listening.wait())
    # The process is ready once the server listens, unless the feed or the server has ended before.
    await _first_of(begin_task, feeding, serving, link.lost)
    if begin_task.done():
        send_message(channel, Ready().to_map())
    # Serve until the feed, the server or the connection ends. Then the process ends, and the broker starts another one.
    await _first_of(feeding, serving, link.lost)
    if link.lost.done():
        raise ChannelClosed("the broker is gone")
    # Raise the exception that ended the feed or the server.
    for task in (feeding, serving):
        if task.done():
            task.result()


async def _first_of(*futures: asyncio.Future[Any]) -> None:
    await asyncio.wait(futures, return_when=asyncio.FIRST_COMPLETED)


if __name__ == "__main__":
    end_imports()
    fd, parent = map(int, sys.argv[1:3])
    sys.exit(main(fd, parent, SandboxSettings.from_text(sys.argv[3])))
