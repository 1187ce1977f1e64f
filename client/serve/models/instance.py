"""A model in a session: its code, its weights and its batches' places on the card.

One model being served: its life from lease to lease.
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from typing import Final, Self

import numpy as np

from gpulease.client import Buffer, KernelArgs, Module
from gpulease.client.aio import GpuBuilder, GpuLease, GpuSession
from gpulease.client.errors import (
    CapacityExceeded,
    Disconnected,
    Drained,
    GpuLeaseError,
    GpuSessionFailed,
    LeaseExpired,
    OperationFailed,
)
from gpulease.client.serve.models.model_metrics import ModelMetrics
from gpulease.client.serve.models.request_queue import (
    MAX_ATTEMPTS,
    RequestIntake,
    RestartPause,
    WaitingRequest,
    code_of,
    ending_of,
    is_broken,
)
from gpulease.client.serve.models.settings import ModelSettings
from gpulease.client.serve.rpc import Answer, Outcome
from gpulease.protocol.rpc import CallError, CallErrorCode


class Engine:
    """Runs batches, one after the other; made by `open`.

    Inputs and outputs lie in memory that the session's worker shares (`session.empty`), so that a batch is put together
    where the card takes it from.
    """

    def __init__(self, session: GpuSession, settings: ModelSettings, module: Module, buffers: list[Buffer]) -> None:
        self._session, self._settings, self._module = session, settings, module
        self._weights, self._input, self._output = buffers
        self._into = session.empty(settings.max_batch * settings.input_bytes, np.uint8)
        self._out_of = session.empty(settings.max_batch * settings.output_bytes, np.uint8)
        self._in_view, self._out_view = self._into.data, self._out_of.data
        self._args: dict[int, KernelArgs] = {}

    @classmethod
    async def open(cls, session: GpuSession, settings: ModelSettings) -> Self:
        """Load the model. Raises LoadFailed, AllocFailed and their like."""
        module = await session.module_load(settings.module)
        sizes = (
            max(1, len(settings.weights)),
            settings.max_batch * settings.input_bytes,
            settings.max_batch * settings.output_bytes,
        )
        buffers = [await session.mem_alloc(size) for size in sizes]
        if settings.weights:
            await session.mem_write(buffers[0], 0, settings.weights)
        await session.sync()
        return cls(session, settings, module, buffers)

    async def run(self, payloads: Sequence[bytes]) -> list[bytes]:
        """The outputs of whole items' inputs, in one launch. Raises what the session raises."""
        settings, at = self._settings, 0
        for payload in payloads:
            self._in_view[at : at + len(payload)] = payload
            at += len(payload)
        items = at // settings.input_bytes
        size = items * settings.output_bytes
        await self._session.mem_write(self._input, 0, self._into[:at])
        grid, block = [items * settings.blocks_per_item], [settings.threads_per_block]
        await self._session.launch(self._module, settings.kernel, grid, block, self._args_for(items))
        await self._session.mem_read(self._output, 0, size, into=self._out_of[:size])
        outputs, at = [], 0
        for payload in payloads:
            part = len(payload) // settings.input_bytes * settings.output_bytes
            outputs.append(bytes(self._out_view[at : at + part]))
            at += part
        return outputs

    async def check(self) -> None:
        """Raises what the session ended of, if it did. Not while a batch is under way."""
        await self._session.sync()

    def _args_for(self, items: int) -> KernelArgs:
        found = self._args.get(items)
        if found is None:
            found = KernelArgs().push_buffer(self._weights).push_buffer(self._input).push_buffer(self._output)
            found.push_u32(items)
            for constant in self._settings.constants:
                found.push_u32(constant)
            self._args[items] = found
        return found


CLOSE_LIMIT_S: Final = 5.0
"""For giving a lease back. It ends at its deadline in any case."""

WAIT_FOR_ROOM_S: Final = 2.0
"""How long one asks for room where no smaller variant stands in: who waits at the daemon is not overtaken."""

_log: Final = logging.getLogger("gpulease.models")

_STOPS: Final = CallError(CallErrorCode.UNAVAILABLE, "the server stops")
_CUT_OFF: Final = CallError(CallErrorCode.LEASE_LOST, "the server stops")

Ended = asyncio.Future[GpuLeaseError]
"""How the lease ended, once that is known."""


class Instance:
    """Serves one model; `run` is its life.

    Args:
        settings: The model.
        address: Of the daemon; None for the usual one.
        metrics: Where it counts.
        pass_on: Gives requests to a smaller variant, if there is one: what waits when there is no room for this one.
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
        self._held_from: float | None = None
        self._pause = RestartPause()
        self._no_room_until = 0.0
        self._is_doubtful = False

    # --- what others see ---

    @property
    def lease_id_text(self) -> str:
        """The lease it computes on; "" while there is none."""
        return "" if self._lease is None else self._lease.lease_id_text

    @property
    def lacks_room(self) -> bool:
        """Whether the card had no room for it when that was tried last, a moment ago."""
        return self._loop.time() < self._no_room_until

    @property
    def trouble(self) -> GpuLeaseError | None:
        """Why it has no lease; None if it has one, or wants none."""
        return self._intake.trouble

    @property
    def waiting_items(self) -> int:
        """How many items are in line."""
        return self._intake.line.items

    def submit(self, payload: bytes, deadline_s: float | None = None) -> "asyncio.Future[Outcome]":
        """Have some items computed. The outcome is an error at once if they can't be, or not within `deadline_s`."""
        left_s = None if self._lease is None else self._lease.remaining_s
        return self._intake.submit(payload, deadline_s, left_s or None)

    def adopt(self, requests: list[WaitingRequest]) -> None:
        """Take over what waited for another model."""
        self._intake.adopt(requests)

    def count_lease_time(self) -> None:
        """Count what the lease was held for since this was done last."""
        if self._held_from is not None:
            now = self._loop.time()
            self._metrics.lease_seconds.inc(now - self._held_from)
            self._held_from = now

    # --- its life ---

    async def run(self) -> None:
        """Lease, serve, and lease again, until it is stopped."""
        intake = self._intake
        while not intake.is_stopping:
            if self.settings.idle_secs and not intake.line:
                intake.trouble = None
                await self._stir(None)
                continue
            try:
                async with self._leased() as (lease, engine, ended):
                    await self._serve(lease, engine, ended)
            except GpuLeaseError as error:
                # Without its frames, which have the lease and its arrays.
                await self._recover(error.with_traceback(None))
        intake.dismiss(_STOPS)

    def stop(self) -> None:
        """Begin to end: take nothing more, do what waits, give the lease back. Then `run` returns."""
        self._intake.is_stopping = True
        self._intake.stirred.set()

    @asynccontextmanager
    async def _leased(self) -> AsyncIterator[tuple[GpuLease, Engine, Ended]]:
        """A lease with the model on it, kept alive. Raises what can't be done."""
        settings, began = self.settings, self._loop.time()
        wish = GpuBuilder(self._address).min_vram(settings.min_vram_bytes).lease_secs(settings.lease_secs)
        wish.max_kernel_secs(settings.max_kernel_secs).timeout(WAIT_FOR_ROOM_S if self._pass_on is None else 0)
        lease = await wish.acquire()
        self._held_from = self._loop.time()
        try:
            async with GpuSession(lease) as session:
                engine = await Engine.open(session, settings)
                ended: Ended = self._loop.create_future()
                async with self._watched(lease, ended), lease.keep_alive(lambda error: self._lost(error, ended)):
                    self._intake.starts.measured(self._loop.time() - began, self._loop.time())
                    self._lease, self._intake.trouble, self._no_room_until = lease, None, 0.0
                    _log.info("%s: serves on lease %s", settings.name, lease.lease_id_text)
                    try:
                        yield lease, engine, ended
                    finally:
                        self._lease = None
        finally:
            with suppress(GpuLeaseError, TimeoutError):
                async with asyncio.timeout(CLOSE_LIMIT_S):
                    await lease.free()
            self.count_lease_time()
            self._held_from = None

    @asynccontextmanager
    async def _watched(self, lease: GpuLease, ended: Ended) -> AsyncIterator[None]:
        watch = asyncio.create_task(self._watch(lease, ended))
        try:
            yield
        finally:
            watch.cancel()
            await asyncio.wait((watch,))

    async def _watch(self, lease: GpuLease, ended: Ended) -> None:
        """Hear of the lease's end at once, rather than by the next batch or renewal.

        That nobody tells of it says nothing: a lease and its session may outlast the daemon's restart. `_serve` looks
        whether they did, between two batches: in the midst of one its failure could be told to who only looks.
        """
        pause = RestartPause()
        while lease.remaining_s > 0:
            try:
                async with lease.events() as events:
                    async for event in events:
                        if (error := ending_of(event)) is not None:
                            self._end(ended, error)
                            return
            except Disconnected as broken:
                self._is_doubtful = True
                self._intake.stirred.set()
                await asyncio.sleep(pause.after(broken))
            except GpuLeaseError as over:
                self._end(ended, over.with_traceback(None))
                return

    def _lost(self, error: GpuLeaseError, ended: Ended) -> None:
        # A drained node's lease is good to its end: admission sees how much of it is left.
        if not isinstance(error, Drained):
            self._end(ended, error.with_traceback(None))

    def _end(self, ended: Ended, error: GpuLeaseError) -> None:
        if not ended.done():
            ended.set_result(error)
        self._intake.stirred.set()

    async def _serve(self, lease: GpuLease, engine: Engine, ended: Ended) -> None:
        """Batch after batch; returns when it is stopped, or was idle for long enough. Raises how the lease ended."""
        intake, idle_s, idle_from = self._intake, self.settings.idle_secs, self._loop.time()
        while True:
            if ended.done():
                raise ended.result()
            if lease.remaining_s <= 0:
                # This process stood still: those in line have lost nothing yet.
                raise LeaseExpired("the lease's time ran out before it was renewed")
            if self._is_doubtful:
                self._is_doubtful = False
                await engine.check()
            due, now = intake.line.due_at(self.settings.max_delay_ms / 1000), self._loop.time()
            if due is None:
                if intake.is_stopping or (idle_s and now >= idle_from + idle_s):
                    return
                await self._stir(idle_from + idle_s if idle_s else None)
            elif due > now and not intake.is_stopping:
                await self._stir(due)
            else:
                batch = intake.line.next_batch()
                intake.changed()
                if worth := intake.still_worth(batch, lease.remaining_s):
                    await self._compute(engine, worth)
                idle_from = self._loop.time()

    async def _stir(self, until: float | None) -> None:
        """Wait for something to happen, or for a time."""
        self._intake.stirred.clear()
        with suppress(TimeoutError):
            async with asyncio.timeout_at(until):
                await self._intake.stirred.wait()

    async def _compute(self, engine: Engine, batch: list[WaitingRequest]) -> None:
        intake, began = self._intake, self._loop.time()
        for request in batch:
            request.attempts += 1
        intake.is_running = True
        self._metrics.launches.inc()
        self._metrics.batch_items.observe(sum(request.items for request in batch))
        try:
            outputs = await engine.run([request.payload for request in batch])
        except GpuLeaseError as error:
            self._metrics.failures.inc()
            self._failed(batch, error)
            raise
        except BaseException as error:
            # Nobody is left waiting, whatever it is: the server's end, or a mistake here.
            is_end = isinstance(error, asyncio.CancelledError)
            why = _CUT_OFF if is_end else CallError(CallErrorCode.INTERNAL, "the server failed; its log says more")
            for request in batch:
                request.settle(why)
            raise
        finally:
            intake.is_running = False
        now = self._loop.time()
        intake.batches.measured(now - began, now)
        self._pause.succeeded()
        for request, output in zip(batch, outputs, strict=True):
            request.settle(Answer(self.settings.method_id, output))

    # --- when it goes wrong ---

    def _failed(self, batch: list[WaitingRequest], error: GpuLeaseError) -> None:
        """Try again what is safe to be tried again, and tell the others."""
        is_kernels = isinstance(error, GpuSessionFailed | OperationFailed)
        again = []
        for request in batch:
            # Who was in a batch with others may not be what made it fail. A lease that was taken is told, not hidden.
            is_cured = isinstance(error, Disconnected) or (is_kernels and len(batch) > 1)
            if self.settings.is_pure and is_cured and request.attempts < MAX_ATTEMPTS and not request.answer.done():
                request.is_alone = is_kernels
                again.append(request)
            else:
                request.settle(CallError(code_of(error), f"{type(error).__name__}: {error}"))
        self._intake.put_back(again)

    async def _recover(self, error: GpuLeaseError) -> None:
        """The lease is gone, or there was none: pause, so that what goes on going wrong takes nobody's time."""
        intake = self._intake
        intake.trouble, pause_s = error, self._pause.after(error)
        _log.warning("%s: has no lease, tries again in %.2f s: %s", self.settings.name, pause_s, error)
        if isinstance(error, CapacityExceeded):
            self._no_room_until = self._loop.time() + 2 * pause_s
            if self._pass_on is not None:
                self._pass_on(intake.line.take_all())
                intake.changed()
        elif is_broken(error):
            text = f"{self.settings.name} can't be served: {error}"
            intake.dismiss(CallError(CallErrorCode.UNAVAILABLE, text))
        until = self._loop.time() + pause_s
        while not intake.is_stopping and self._loop.time() < until:
            await self._stir(until)
