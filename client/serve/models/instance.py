"""A served model: `Instance` acquires one lease after another and serves on them; `BatchRunner` computes batches."""

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from typing import Final, Self

import numpy as np

from gpulease.client import Buffer, KernelArgs
from gpulease.client.aio import GpuBuilder, GpuLease, GpuSession, Module
from gpulease.client.errors import (
    CapacityExceeded,
    Disconnected,
    Drained,
    GpuLeaseError,
    GpuSessionFailed,
    LeaseExpired,
    OperationFailed,
)
from gpulease.client.http.caller_text import text_for_callers
from gpulease.client.serve.models.model_metrics import ModelMetrics
from gpulease.client.serve.models.model_settings import ModelSettings
from gpulease.client.serve.models.recovery import RestartPause, code_of, is_broken, lease_end_of
from gpulease.client.serve.models.request_queue import MAX_ATTEMPTS, RequestIntake, WaitingRequest
from gpulease.client.serve.rpc import Answer, Outcome
from gpulease.protocol.rpc import CallError, CallErrorCode


class BatchRunner:
    """Computes batches in one session, one after another. `open` makes a runner.

    Inputs and outputs are in memory that the session's worker shares (`session.empty`), so a batch is assembled in the
    memory from which the card reads it.

    Attributes:
        is_warm: Whether a batch was computed. The first batch also compiles or loads the kernel.
    """

    def __init__(self, session: GpuSession, settings: ModelSettings, module: Module, buffers: list[Buffer]) -> None:
        self._session, self._settings, self._module = session, settings, module
        # These three buffers are on the card, for the life of the session. The arrays below are in the host's memory.
        self._weights, self._input, self._output = buffers
        self._input_memory = session.empty(settings.max_batch * settings.input_bytes, np.uint8)
        self._output_memory = session.empty(settings.max_batch * settings.output_bytes, np.uint8)
        self._in_view, self._out_view = self._input_memory.data, self._output_memory.data
        self._args: dict[int, KernelArgs] = {}
        self.is_warm = False

    @classmethod
    async def open(cls, session: GpuSession, settings: ModelSettings) -> Self:
        """Load the model's code and weights. Raises LoadFailed, AllocFailed and other session errors."""
        module = await session.module_load(settings.module)
        # The weights' buffer exists even without weights, because the kernel always gets its address.
        sizes = (
            max(1, len(settings.weights)),
            settings.max_batch * settings.input_bytes,
            settings.max_batch * settings.output_bytes,
        )
        # Allocate them once, for the largest batch; smaller batches use the beginning.
        buffers = [await session.mem_alloc(size) for size in sizes]
        if settings.weights:
            await session.mem_write(buffers[0], 0, settings.weights)
        await session.sync()
        return cls(session, settings, module, buffers)

    async def run(self, payloads: Sequence[bytes]) -> list[bytes]:
        """Compute payloads of whole items in one launch, and return their outputs. Raises the session's errors."""
        # Step 1: assemble the inputs one after another in shared memory.
        settings, at = self._settings, 0
        for payload in payloads:
            self._in_view[at : at + len(payload)] = payload
            at += len(payload)
        # Step 2: copy in, launch, copy out.
        items = at // settings.input_bytes
        size = items * settings.output_bytes
        await self._session.mem_write(self._input, 0, self._input_memory[:at])
        # Only the grid depends on the number of items, so one kernel serves batches of any size.
        grid, block = [items * settings.blocks_per_item], [settings.threads_per_block]
        await self._session.launch(self._module, settings.kernel, grid, block, self._args_for(items))
        await self._session.mem_read(self._output, 0, size, into=self._output_memory[:size])
        # Step 3: cut the outputs apart. Copy them, because the next batch overwrites the array.
        outputs, at = [], 0
        for payload in payloads:
            part = len(payload) // settings.input_bytes * settings.output_bytes
            outputs.append(bytes(self._out_view[at : at + part]))
            at += part
        self.is_warm = True
        return outputs

    async def check(self) -> None:
        """Raise the error that ended the session, if it has ended. Must not be called during a batch."""
        await self._session.sync()

    def _args_for(self, items: int) -> KernelArgs:
        # Only the number of items changes between launches, so the arguments are cached by it.
        args = self._args.get(items)
        if args is None:
            args = KernelArgs().push_buffer(self._weights).push_buffer(self._input).push_buffer(self._output)
            args.push_u32(items)
            for constant in self._settings.constants:
                args.push_u32(constant)
            self._args[items] = args
        return args


CLOSE_LIMIT_S: Final = 5.0
"""Longest time for freeing a lease, in seconds. A lease that is not freed ends at its deadline."""

WAIT_FOR_ROOM_S: Final = 2.0
"""If there is no smaller variant, seconds to wait for room in the daemon's queue, so that other requests do not
overtake."""

_log: Final = logging.getLogger("gpulease.models")

_STOPS: Final = CallError(CallErrorCode.UNAVAILABLE, "the server stops")
_CUT_OFF: Final = CallError(CallErrorCode.LEASE_LOST, "the server stops")

Ended = asyncio.Future[GpuLeaseError]
"""A future that is completed when the lease ends, with the error that ended it."""


class Instance:
    """Serves one model. `run` acquires leases and computes batches until `stop`.

    Args:
        settings: The model.
        address: The daemon's address; None for the default one.
        metrics: The model's metrics.
        pass_on: Passes waiting requests to the smaller variant when this model has no room; None without a variant.
    """

    def __init__(
        self,
        settings: ModelSettings,
        address: str | None,
        metrics: ModelMetrics,
        pass_on: Callable[[list[WaitingRequest]], None] | None = None,
    ) -> None:
        self.settings = settings
        self._address, self._metrics, self._pass_on = address, metrics, pass_on
        self._loop = asyncio.get_running_loop()
        self._intake = RequestIntake(settings, metrics)
        self._lease: GpuLease | None = None
        self._leased_since: float | None = None
        self._pause = RestartPause()
        self._no_room_until = 0.0
        self._must_check_session = False

    # --- for callers ---

    @property
    def lease_id_text(self) -> str:
        """The id of the lease that the model computes on; "" without a lease."""
        return "" if self._lease is None else self._lease.lease_id_text

    @property
    def lacks_room(self) -> bool:
        """Whether the card recently had no room for the model, so that a smaller variant should serve."""
        return self._loop.time() < self._no_room_until

    @property
    def trouble(self) -> GpuLeaseError | None:
        """The error that keeps the model from having a lease; None if the model has a lease or needs none."""
        return self._intake.trouble

    @property
    def waiting_items(self) -> int:
        return self._intake.queue.items

    def submit(self, payload: bytes, deadline_s: float | None = None) -> "asyncio.Future[Outcome]":
        """Queue some items. They are refused at once if they can't be computed at all, or not within `deadline_s`."""
        # Admission depends on how long the lease lasts. If there is none, the next lease will have its full duration.
        left_s = None if self._lease is None else self._lease.remaining_s
        return self._intake.submit(payload, deadline_s, left_s or None)

    def adopt(self, requests: list[WaitingRequest]) -> None:
        """Take over requests that waited for another model."""
        self._intake.adopt(requests)

    def count_lease_time(self) -> None:
        """Add to the metrics how long the lease was held since the last call."""
        if self._leased_since is not None:
            now = self._loop.time()
            self._metrics.lease_seconds.inc(now - self._leased_since)
            self._leased_since = now

    # --- leases and batches ---

    async def run(self) -> None:
        """Acquire a lease, serve, and acquire again, until the instance is stopped."""
        intake = self._intake
        while not intake.is_stopping:
            # A model with `idle_secs` is leased on demand: wait for the first request.
            if self.settings.idle_secs and not intake.queue:
                intake.trouble = None
                await self._wait_for_change(None)
                continue
            try:
                async with self._leased() as (lease, runner, ended):
                    await self._serve(lease, runner, ended)
            except GpuLeaseError as error:
                # Drop the error's traceback, because its frames would keep the lease and its arrays alive.
                await self._recover(error.with_traceback(None))
        intake.dismiss(_STOPS)

    def stop(self) -> None:
        """Begin to stop: admit no more requests, compute the waiting ones, free the lease. Then `run` returns."""
        self._intake.is_stopping = True
        self._intake.changed_event.set()

    @asynccontextmanager
    async def _leased(self) -> AsyncIterator[tuple[GpuLease, BatchRunner, Ended]]:
        """Hold a renewed lease with the model loaded during the block. Raises GpuLeaseError."""
        settings, began = self.settings, self._loop.time()
        # With a smaller variant, do not wait for room: the variant can serve meanwhile.
        builder = GpuBuilder(self._address).min_vram(settings.min_vram_bytes).lease_secs(settings.lease_secs)
        builder.max_kernel_secs(settings.max_kernel_secs).timeout(WAIT_FOR_ROOM_S if self._pass_on is None else 0)
        lease = await builder.acquire()
        self._leased_since = self._loop.time()
        try:
            async with GpuSession(lease) as session:
                runner = await BatchRunner.open(session, settings)
                # The event stream and the renewal both watch for the lease's end. The first to notice it sets this.
                ended: Ended = self._loop.create_future()
                async with (
                    self._watching(lease, ended),
                    lease.keep_alive(lambda error: self._on_renewal_failed(error, ended)),
                ):
                    self._intake.starts.add(self._loop.time() - began, self._loop.time())
                    # The model serves from here on.
                    self._lease, self._intake.trouble, self._no_room_until = lease, None, 0.0
                    _log.info("%s: serves on lease %s", settings.name, lease.lease_id_text)
                    try:
                        yield lease, runner, ended
                    finally:
                        self._lease = None
        finally:
            with suppress(GpuLeaseError, TimeoutError):
                async with asyncio.timeout(CLOSE_LIMIT_S):
                    # Free the lease even after an error: otherwise it would keep the card's memory until its deadline.
                    await lease.free()
            self.count_lease_time()
            self._leased_since = None

    @asynccontextmanager
    async def _watching(self, lease: GpuLease, ended: Ended) -> AsyncIterator[None]:
        watch = asyncio.create_task(self._watch(lease, ended))
        try:
            yield
        finally:
            watch.cancel()
            await asyncio.wait((watch,))

    async def _watch(self, lease: GpuLease, ended: Ended) -> None:
        """Watch the lease's events, so that its end is noticed at once, rather than at the next batch or renewal.

        A lost event stream proves nothing, because a lease and its session can survive a restart of the daemon. So
        `_serve` then checks the session between two batches. A check during a batch could raise the batch's failure.
        """
        pause = RestartPause()
        while lease.remaining_s > 0:
            try:
                async with lease.events() as events:
                    async for event in events:
                        # Other events, such as warnings of a drain, do not stop the service.
                        if (error := lease_end_of(event)) is not None:
                            self._set_ended(ended, error)
                            return
            except Disconnected as broken:
                self._must_check_session = True
                self._intake.changed_event.set()
                # The daemon may be restarting: subscribe again, with growing pauses.
                await asyncio.sleep(pause.after(broken))
            except GpuLeaseError as over:
                self._set_ended(ended, over.with_traceback(None))
                return

    def _on_renewal_failed(self, error: GpuLeaseError, ended: Ended) -> None:
        # On a drained node the lease is valid until it expires. Admission takes the remaining time into account.
        if not isinstance(error, Drained):
            self._set_ended(ended, error.with_traceback(None))

    def _set_ended(self, ended: Ended, error: GpuLeaseError) -> None:
        # Keep the first reason: after a revocation, renewals are also refused, with a less exact error.
        if not ended.done():
            ended.set_result(error)
        self._intake.changed_event.set()

    async def _serve(self, lease: GpuLease, runner: BatchRunner, ended: Ended) -> None:
        """Compute batches until the model is stopped or idle for `idle_secs`. Raises the error that ended the lease."""
        intake, idle_s, idle_from = self._intake, self.settings.idle_secs, self._loop.time()
        while True:
            if ended.done():
                raise ended.result()
            if lease.remaining_s <= 0:
                # This process was suspended for a while. Queued requests are computed on the next lease.
                raise LeaseExpired("the lease's time ran out before it was renewed")
            if self._must_check_session:
                self._must_check_session = False
                # This raises if the session has ended while the event stream was lost.
                await runner.check()
            due, now = intake.queue.due_at(self.settings.max_delay_ms / 1000), self._loop.time()
            # The queue is empty: return if the model is stopping or was idle for long, otherwise sleep.
            if due is None:
                if intake.is_stopping or (idle_s and now >= idle_from + idle_s):
                    return
                await self._wait_for_change(idle_from + idle_s if idle_s else None)
            # The batch may still grow until its oldest request has waited `max_delay_ms`.
            elif due > now and not intake.is_stopping:
                await self._wait_for_change(due)
            else:
                batch = intake.queue.next_batch()
                intake.changed()
                # Drop requests that would be late, because computing them would only delay the next ones.
                if in_time := intake.drop_late(batch, lease.remaining_s):
                    await self._compute(runner, in_time)
                idle_from = self._loop.time()

    async def _wait_for_change(self, deadline_s: float | None) -> None:
        """Wait until the queue or the lease changes, or until the time `deadline_s`; None means no limit."""
        self._intake.changed_event.clear()
        with suppress(TimeoutError):
            async with asyncio.timeout_at(deadline_s):
                await self._intake.changed_event.wait()

    async def _compute(self, runner: BatchRunner, batch: list[WaitingRequest]) -> None:
        # Count the attempts before the launch, so that a request that ends the lease counts as attempted.
        intake, began, was_warm = self._intake, self._loop.time(), runner.is_warm
        for request in batch:
            request.attempts += 1
        # Admission takes into account that requests that arrive from now on wait for this batch, too.
        intake.is_running = True
        self._metrics.launches.inc()
        self._metrics.batch_items.observe(sum(request.items for request in batch))
        try:
            outputs = await runner.run([request.payload for request in batch])
        except GpuLeaseError as error:
            self._metrics.failures.inc()
            self._on_batch_failed(batch, error)
            raise
        except BaseException as error:
            # Answer every request when the server stops, or after a bug here.
            is_end = isinstance(error, asyncio.CancelledError)
            reason = _CUT_OFF if is_end else CallError(CallErrorCode.INTERNAL, "the server failed; its log has details")
            for request in batch:
                request.resolve(reason)
            raise
        finally:
            intake.is_running = False
        now = self._loop.time()
        # The first batch is slower than the others, so leave it out of the estimate.
        if was_warm:
            intake.batches.add(now - began, now)
        # A batch that succeeded proves that the lease works, so the next failure starts with a short pause again.
        self._pause.succeeded()
        for request, output in zip(batch, outputs, strict=True):
            request.resolve(Answer(self.settings.method_id, output))

    # --- failures ---

    def _on_batch_failed(self, batch: list[WaitingRequest], error: GpuLeaseError) -> None:
        """Put the requests that can safely be computed again back into the queue, and answer the others."""
        # Only these errors may have been caused by a request of the batch.
        is_kernel_error = isinstance(error, GpuSessionFailed | OperationFailed)
        retried = []
        for request in batch:
            # Compute a request again after the daemon was lost, or, in a separate batch, if another request of the
            # batch may be at fault. A revoked lease is an operator's decision, and is reported to the caller.
            may_succeed = isinstance(error, Disconnected) or (is_kernel_error and len(batch) > 1)
            if self.settings.is_pure and may_succeed and request.attempts < MAX_ATTEMPTS and not request.answer.done():
                request.is_alone = is_kernel_error
                retried.append(request)
            else:
                request.resolve(CallError(code_of(error), f"{type(error).__name__}: {text_for_callers(error)}"))
        self._intake.put_back(retried)

    async def _recover(self, error: GpuLeaseError) -> None:
        """Pause after the lease has ended or was refused, so that repeated failures do not load the daemon."""
        intake = self._intake
        # Requests that reach their deadlines during the pause get this error as the reason.
        intake.trouble, pause_s = error, self._pause.after(error)
        _log.warning("%s: has no lease, retries in %.2f s: %s", self.settings.name, pause_s, error)
        if isinstance(error, CapacityExceeded):
            # There is no room: for the time of about two attempts, the smaller variant gets all requests, including the
            # waiting ones.
            self._no_room_until = self._loop.time() + 2 * pause_s
            if self._pass_on is not None:
                self._pass_on(intake.queue.take_all())
                intake.changed()
        elif is_broken(error):
            # The model itself is at fault, so waiting would not help its requests.
            text = f"{self.settings.name} can't be served: {text_for_callers(error)}"
            intake.dismiss(CallError(CallErrorCode.UNAVAILABLE, text))
        deadline_s = self._loop.time() + pause_s
        # Changes of the queue wake this wait, but only a stop shortens the pause.
        while not intake.is_stopping and self._loop.time() < deadline_s:
            await self._wait_for_change(deadline_s)
