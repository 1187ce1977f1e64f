"""The daemon's life as whoever started it sees it: starting, ready, reading its settings again, stopping."""

import asyncio
import contextlib
import faulthandler
import signal
from collections.abc import Callable, MutableMapping, Sequence

from gpulease.daemon.broker.service import Service, running_service
from gpulease.daemon.config.settings import Config
from gpulease.daemon.host.fd_passing import interrupting_closes
from gpulease.daemon.host.memory_cleanup import collect_rarely
from gpulease.daemon.host.socket_activation import BadHandover, GivenSocket, kept_name, take_sockets
from gpulease.daemon.host.version import VERSION
from gpulease.daemon.log.catalogue import LogEvent
from gpulease.daemon.log.writer import log_event
from gpulease.daemon.supervisor import notifier as watchdog
from gpulease.daemon.supervisor.notifier import Notifier, status
from gpulease.daemon.supervisor.reload import Reloading


class Supervised:
    """A daemon, and what its service manager gave it: where to tell, how often to show a sign, sockets."""

    def __init__(self, notifier: Notifier, watched_every_s: float | None, given: Sequence[GivenSocket]) -> None:
        self._notifier = notifier
        self._watchdog = watchdog.Watchdog(notifier, watched_every_s)
        self._given = given

    @classmethod
    def taken_from(cls, environment: MutableMapping[str, str], pid: int) -> "Supervised":
        """All of it, out of the environment: it is this process's, and no child's. Raises BadHandover."""
        notifier, every_s = Notifier.taken_from(environment), watchdog.interval_s(environment, pid)
        try:
            return cls(notifier, every_s, take_sockets(environment, pid))
        except BadHandover as error:
            notifier.tell_status(str(error))
            notifier.close()
            raise

    @classmethod
    def unheard(cls) -> "Supervised":
        """One that nobody supervises."""
        return cls(Notifier(), None, ())

    def tell_failure(self, text: str) -> None:
        """Why it ends, for `systemctl status`."""
        self._notifier.tell_status(text)

    def close(self) -> None:
        """Tell nothing more."""
        self._notifier.close()

    async def serve(self, config: Config, load: Callable[[], Config] | None = None) -> None:
        """Run the daemon until it is told to stop; `load` reads its settings again. Raises as `running_service`."""
        told: asyncio.Future[signal.Signals] = asyncio.get_running_loop().create_future()
        _stop_at_signals(told)
        # One that comes while it starts is for later.
        asked_early = asyncio.Event()
        if load is not None:
            asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, asked_early.set)
        async with contextlib.AsyncExitStack() as stack:
            stack.enter_context(interrupting_closes())
            async with self._notifier.starting():
                self._notifier.tell_status("Making a context on every card.")
                service = await stack.enter_async_context(running_service(config, self._given))
            for address in service.addresses:
                message = f"gpuleased {VERSION} listens on {address}"
                log_event(LogEvent.DAEMON_LISTENING, message, address=str(address), version=VERSION)
            if service.url:
                message = f"gpuleased {VERSION} is to be seen at {service.url}"
                log_event(LogEvent.DAEMON_SEEN, message, url=service.url, version=VERSION)
            await self._leave_in_keeping(service)
            await self._notifier.tell_surely("READY=1", status(_ready_text(service)))
            if self._watchdog.start():
                # What ends a loop that is stuck is SIGABRT: then the log gets to know where it was.
                faulthandler.enable()
            stack.callback(self._watchdog.stop)
            if load is not None:
                reloading = Reloading(service, self._notifier, load, config)
                asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, reloading.ask)
                stack.push_async_callback(reloading.stop)
                if asked_early.is_set():
                    reloading.ask()
            collect_rarely()
            number = await told
            service.may_end_sessions(is_interrupted=number is signal.SIGINT)
            log_event(LogEvent.DAEMON_STOPPING)
            await self._notifier.tell_surely("STOPPING=1", status("Stopping."))

    async def _leave_in_keeping(self, service: Service) -> None:
        """Have the service manager keep open the sockets that this daemon made, and let go of those out of use."""
        if not self._notifier.is_heard:
            return
        for name in {one.name for one in service.stale}:
            await self._notifier.tell_surely("FDSTOREREMOVE=1", f"FDNAME={name}")
        for address, fd in service.bound:
            # FDPOLL=0: a listening socket that is shut down for a moment is not to be dropped for it.
            await self._notifier.tell_surely("FDSTORE=1", f"FDNAME={kept_name(address)}", "FDPOLL=0", fds=[fd])
        service.leave_sockets()


def _stop_at_signals(told: "asyncio.Future[signal.Signals]") -> None:
    def take(number: signal.Signals) -> None:
        if not told.done():
            told.set_result(number)

    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, take, number)


def _ready_text(service: Service) -> str:
    return f"Leasing; listens on {', '.join(map(str, service.addresses))}."
