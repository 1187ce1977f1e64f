"""Takes samples of a node, in a separate thread, on one connection that is replaced when it is lost."""

import threading
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Final

from gpulease.client.cli.node import outcome_text
from gpulease.client.cli.top.sample import Sample, ScreenSamples
from gpulease.client.core.exchange import FixedDeadline, dial, disconnected
from gpulease.client.core.exchange import ask as ask_on_channel
from gpulease.client.core.waits import Procedure
from gpulease.client.errors import GpuLeaseError
from gpulease.client.sync.driver import ask, drive
from gpulease.client.transport.channel import Channel
from gpulease.client.transport.link import LinkEnded
from gpulease.protocol import Opcode
from gpulease.protocol.address import Address
from gpulease.protocol.lease_ids import lease_id_of
from gpulease.protocol.messages import Empty, LeaseRevoke

SAMPLE_LIMIT_S: Final = 10.0
"""Longest time for one sample, in seconds. A daemon answers in milliseconds. If it does not, the failure is shown and
another sample is tried."""

RETRY_S: Final = 2.0
"""Longest pause, in seconds, before the next try after a failed sample, even if the sampling interval is longer."""


def _failure_text(error: Exception) -> str:
    """Describe any error: an uncaught one would end the thread, and Python would print it across the screen."""
    return str(error) if isinstance(error, GpuLeaseError) else f"{type(error).__name__}: {error}"


class Sampler:
    """Takes samples of one node, on one connection that it reuses until the connection is lost."""

    def __init__(self, address: Address) -> None:
        self._address = address
        self._channel: Channel | None = None

    def take(self) -> Sample:
        """Take a sample. Raises Disconnected, or the daemon's refusal; the next call connects again."""
        return drive(self._take())

    def _take(self) -> Procedure[Sample]:
        deadline = FixedDeadline(SAMPLE_LIMIT_S, "top", self._address)
        # Reuse the connection of earlier samples, unless it was lost.
        if self._channel is None:
            self._channel, _ = yield from dial(self._address, deadline)
        channel = self._channel
        try:
            inventory = yield from ask_on_channel(channel, Opcode.GET_INVENTORY, Empty(), deadline)
            leases = yield from ask_on_channel(channel, Opcode.LEASE_LIST_ACTIVE, Empty(), deadline)
        except LinkEnded as ended:
            self.close()
            raise disconnected(ended, channel, "top") from None
        except BaseException:
            self.close()
            raise
        return Sample.of(time.monotonic(), inventory.details, leases.report)

    def close(self) -> None:
        """Close the connection; the next sample opens another."""
        channel, self._channel = self._channel, None
        if channel is not None:
            channel.close()


class Poller:
    """Takes samples in the background, and revokes leases on request.

    Args:
        address: The daemon's address.
        every_s: Seconds between two samples.
        wake: Called, from another thread, after each sample and each revocation.
    """

    def __init__(self, address: Address, every_s: float, wake: Callable[[], None]) -> None:
        self._sampler = Sampler(address)
        self._address = address
        self._wake = wake
        self._lock = threading.Lock()
        self._nudge = threading.Event()
        self._every_s = every_s
        self._is_paused = False
        self._is_stopped = False
        self._samples = ScreenSamples()
        self._notices: list[str] = []
        self._thread = threading.Thread(target=self._run, name="gpulease-top", daemon=True)

    def start(self) -> None:
        """Start the thread that takes samples; `stop` ends it."""
        self._thread.start()

    def stop(self) -> None:
        """Make the thread end. Does not wait for a sample in progress."""
        # The event wakes the thread if it is waiting.
        self._is_stopped = True
        self._nudge.set()

    def pace(self, every_s: float, *, is_paused: bool) -> None:
        """Set the seconds between samples, or pause the samples. Takes effect after the next sample."""
        self._every_s, self._is_paused = every_s, is_paused

    def refresh(self) -> None:
        """Take a sample now, not at the next interval."""
        self._nudge.set()

    def samples(self) -> ScreenSamples:
        """Return the samples to show: the latest, and the one before it."""
        with self._lock:
            return self._samples

    def notice(self) -> str:
        """Return the oldest notice that was not returned yet; "" if there is none.

        A notice reports the outcome of a revocation, or that the daemon answers again.
        """
        with self._lock:
            return self._notices.pop(0) if self._notices else ""

    def revoke(self, lease_id: str, reason: str) -> None:
        """Revoke a lease; `notice` returns the outcome."""
        # Use a separate thread, because proving memory free takes a moment, during which sampling must continue.
        threading.Thread(target=self._revoke, args=(lease_id, reason), name="gpulease-revoke", daemon=True).start()

    def _run(self) -> None:
        try:
            while not self._is_stopped:
                # Clear the event before the sample, so that a refresh requested during the sample causes another one.
                self._nudge.clear()
                self._read()
                self._wake()
                # After a failed sample, try again soon, even if the view is paused or its interval is long.
                trouble = bool(self._samples.trouble)
                pause_s = min(self._every_s, RETRY_S) if trouble else self._every_s
                self._nudge.wait(None if self._is_paused and not trouble else pause_s)
        finally:
            self._sampler.close()

    def _read(self) -> None:
        try:
            sample = self._sampler.take()
        except Exception as error:
            with self._lock:
                self._samples = replace(self._samples, trouble=_failure_text(error))
            return
        # Keep the last two samples, because rates are computed from both.
        with self._lock:
            if self._samples.trouble and self._samples.sample is not None:
                self._notices.append("The daemon answers again on a new connection")
            self._samples = ScreenSamples(sample, self._samples.sample)

    def _revoke(self, lease_id_text: str, reason: str) -> None:
        # Any error becomes a notice, because no one waits for this thread.
        try:
            lease_id = lease_id_of(lease_id_text)
            outcome = ask(Opcode.LEASE_REVOKE, LeaseRevoke(lease_id, reason), str(self._address)).outcome
            notice = outcome_text(lease_id, outcome)
        except Exception as error:
            notice = f"{lease_id_text[:8]} was not revoked: {_failure_text(error)}"
        with self._lock:
            self._notices.append(notice)
        self.refresh()
        self._wake()
