"""Reads tenants' texts in worker processes. Tenants take turns, each job has limits, and a worker may die.

A tokenizer holds the interpreter's lock for a time that grows with the text, and a chat template is a program that can
use up all memory. In the step loop's process, either would stop every tenant's tokens. If a job exceeds a limit, its
request is refused and its worker is replaced. Other jobs are not affected.
"""

import asyncio
import contextlib
import os
import signal
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Final

from gpulease.client.decode.decode_errors import (
    AdmissionReason,
    AdmissionRefused,
    RequestRejected,
    TextNotRead,
    TextProcessesFailed,
    decoder_closed,
)
from gpulease.client.decode.decode_log import DecodeLog, cause_of
from gpulease.client.decode.first_ended import answer_within
from gpulease.client.decode.text.fork_server import ForkedWorker, ForkServer
from gpulease.client.decode.text.tenant_turns import TenantTurns
from gpulease.client.decode.text.text_jobs import MAX_JOB_BYTES, Job, TextLimits, framed, packed, refused
from gpulease.client.decode.text.tokenizer import Tokenizer

MAX_WAIT_S: Final = 30.0
"""Seconds that a text may wait for a process. All processes may be busy with texts that use all of their CPU time."""

MAX_TRIES: Final = 2
"""Maximum number of tries to read a text whose process ended without exceeding a limit: something else may have killed
it."""


@dataclass(eq=False, slots=True)
class _TextJob:
    tenant_id: str
    frame: bytes
    answer: asyncio.Future[dict[str, Any]]
    tries: int = 0
    is_started: bool = False


class TextProcesses:
    """A fork server and its workers. `of` starts them, `stop` ends them.

    One tenant can occupy all workers but one, so another tenant's text need not wait for that tenant.

    Attributes:
        replaced: Number of workers that were replaced because a job exceeded a limit, or because they ended.
    """

    def __init__(self, tokenizer_fd: int, count: int, limits: TextLimits, log: DecodeLog) -> None:
        """Prepare `count` workers. `tokenizer_fd` is a file for `ForkServer.start`, which this object closes."""
        self.replaced = 0
        self._log = log
        self._count, self._limits = count, limits
        self._turns = TenantTurns[_TextJob](max(1, count - 1))
        self._wake = asyncio.Event()
        self._tokenizer_fd = tokenizer_fd
        self._server: ForkServer | None = None
        self._starting = asyncio.Lock()
        self._slots: list[asyncio.Task[None]] = []
        self._is_stopped = False

    @classmethod
    async def of(
        cls, tokenizer: Tokenizer, context: int, count: int, limits: TextLimits, log: DecodeLog
    ) -> "TextProcesses":
        """Start the processes for a tokenizer. Raises TextProcessesFailed."""
        processes = cls(await asyncio.to_thread(_tokenizer_file, tokenizer, context, limits), count, limits, log)
        try:
            # Fork all workers now, so that a tokenizer that can't be loaded is reported before the first request.
            workers = [await processes._fork() for _ in range(count)]
        except BaseException:
            await processes.stop()
            raise
        processes._slots = [asyncio.create_task(processes._work(worker)) for worker in workers]
        return processes

    async def do(self, tenant_id: str, job: Job, arguments: Mapping[str, Any]) -> dict[str, Any]:
        """Run a job in a worker, and return its answer.

        Args:
            tenant_id: The tenant to which the text belongs.
            job: The job's function, which the worker imports by name.
            arguments: Its named arguments, of types that msgpack supports.

        Raises TextNotRead if reading the text exceeds a limit, AdmissionRefused if the text can't fit or no process
        becomes free in time, RequestRejected for a text that is refused, TextProcessesFailed if the processes can't be
        started.
        """
        try:
            frame = framed({"call": f"{job.__module__}:{job.__qualname__}", "arguments": arguments})
        except (TypeError, ValueError, OverflowError) as error:
            raise RequestRejected(f"a message or a variable has a value that JSON can't represent: {error}") from None
        # Check the size before queueing the job, because waiting jobs are in memory.
        if len(frame) > MAX_JOB_BYTES:
            detail = f"the prompt has {len(frame):,} bytes; the limit is {MAX_JOB_BYTES:,}"
            raise AdmissionRefused(AdmissionReason.TOO_LARGE, detail, None)
        if self._is_stopped:
            raise decoder_closed()
        waiting = _TextJob(tenant_id, frame, asyncio.get_running_loop().create_future())
        self._turns.add(tenant_id, waiting)
        self._wake.set()
        try:
            await asyncio.wait((waiting.answer,), timeout=MAX_WAIT_S)
            # The wait limits only the time in the queue. Once a worker has the job, the job's own limits apply.
            if not waiting.is_started and not waiting.answer.done():
                detail = f"no process was free for the text within {MAX_WAIT_S:g} s; send this request again later"
                raise AdmissionRefused(AdmissionReason.POOL_EXHAUSTED, detail, None)
            answer = await waiting.answer
        finally:
            self._turns.drop(tenant_id, waiting)
            if not waiting.answer.cancel() and not waiting.answer.cancelled():
                waiting.answer.exception()  # Retrieve an error that arrived as the caller gave up.
        if "refused" in answer:
            raise refused(answer)
        return answer

    async def stop(self) -> None:
        """End all processes. Jobs that wait or are in progress raise NoModelLoaded."""
        self._is_stopped = True
        for task in self._slots:
            task.cancel()
        await asyncio.gather(*self._slots, return_exceptions=True)
        # The cancelled tasks have failed their jobs. Fail the jobs that still waited.
        for job in self._turns.drain():
            _fail(job, decoder_closed())
        if self._server is not None:
            await self._server.stop()
        os.close(self._tokenizer_fd)

    # --- workers ---

    async def _work(self, worker: ForkedWorker | None) -> None:
        """Give jobs to one worker, and replace the worker when necessary. Runs until cancelled."""
        while True:
            if worker is None:
                # Fork a worker now, so that the next text need not wait. If this fails, `_do` tries again and reports
                # the error.
                with contextlib.suppress(Exception):
                    worker = await self._fork()
            while (job := self._turns.take()) is None:
                self._wake.clear()
                await self._wake.wait()
            # From here on the job's own limits apply, not MAX_WAIT_S.
            job.is_started = True
            try:
                # The caller may have been cancelled while the job waited.
                if not job.answer.done():
                    worker = await self._do(worker, job)
            except asyncio.CancelledError:
                _fail(job, decoder_closed())
                raise
            # The fork server can't be started. Report this to the caller, and try again with the next text.
            except TextProcessesFailed as error:
                self._log.error("text_process_not_started", tenant=job.tenant_id, cause=cause_of(error))
                _fail(job, error)
                worker = None
            # This is an internal error. The worker may be in the middle of a job, so replace it.
            except Exception as error:
                self._log.failure("text_failed", error, tenant=job.tenant_id)
                _fail(job, error)
                self._replace(worker)
                worker = None
            finally:
                self._turns.done(job.tenant_id)
                # Wake another task, which may now run the tenant's next job.
                self._wake.set()

    async def _do(self, worker: ForkedWorker | None, job: _TextJob) -> ForkedWorker | None:
        """Run a job. Returns the worker if it can run another job, otherwise None."""
        if worker is None or worker.ended.done() or job.tries:
            # Use a new worker for a retry: whatever ended the first worker may have harmed this one.
            self._drop(worker)
            worker = await self._fork()
        job.tries += 1
        try:
            # The worker itself limits CPU time. This limit also covers a worker that sleeps or a host that is
            # overloaded.
            answer = await answer_within(worker.do(job.frame), self._limits.wall_s)
        except TimeoutError:
            self._refuse(job, f"took more than {self._limits.wall_s:g} s", "time")
            self._replace(worker)
            return None
        # Normally there is an answer, perhaps a refusal. It says whether the worker must be replaced.
        if answer is not None and "failed" not in answer:
            if not job.answer.done():
                job.answer.set_result(answer)
            if answer["is_last"]:
                worker.close()
                return None
            return worker
        if answer is not None and answer["failed"] == "memory":
            self._refuse(job, f"needs more than {self._limits.memory_bytes >> 20} MiB of memory", "memory")
        elif answer is not None and answer["failed"] == "panic":
            self._log.error("library_panicked", tenant=job.tenant_id, cause=str(answer["said"]))
            self._refuse(job, "made a library of the server fail; the server's log has details", "library")
        elif answer is not None:
            self._log.error("text_failed", tenant=job.tenant_id, cause=str(answer["failed"]))
            _fail(job, TextProcessesFailed("a text could not be parsed; the server's log has details"))
        else:
            await self._on_worker_end(worker, job)
        self._replace(worker)
        return None

    async def _on_worker_end(self, worker: ForkedWorker, job: _TextJob) -> None:
        """Find out why a worker ended during a job: refuse the job, or queue it again."""
        if self._server is not None:
            self._server.kill(worker)
        # The fork server reports waitpid's status. The status is None if the fork server has ended, too.
        status = await worker.ended
        number = os.WTERMSIG(status) if status is not None and os.WIFSIGNALED(status) else 0
        # The kernel ends a worker with this signal if it exceeds its CPU time.
        if number == signal.SIGXCPU:
            self._refuse(job, f"takes more than {self._limits.processor_s} s of CPU time", "processor")
        # Perhaps the kernel or an operator killed the worker, so try again, at the front of the tenant's queue.
        elif job.tries < MAX_TRIES:
            self._log.warning("text_read_again", tenant=job.tenant_id, signal=number)
            job.is_started = False
            self._turns.add(job.tenant_id, job, is_first=True)
        elif number == signal.SIGABRT:
            # The tokenizer's library aborts when an allocation fails.
            self._refuse(job, f"needs more than {self._limits.memory_bytes >> 20} MiB of memory", "memory")
        else:
            self._refuse(job, f"ended the process that parsed it, {job.tries} times", "process")

    def _refuse(self, job: _TextJob, reason: str, limit: str) -> None:
        self._log.warning("text_process_replaced", tenant=job.tenant_id, why=f"its text {reason}")
        _fail(job, TextNotRead(f"the prompt can't be parsed: it {reason}", limit))

    def _replace(self, worker: ForkedWorker | None) -> None:
        self.replaced += 1
        self._drop(worker)

    def _drop(self, worker: ForkedWorker | None) -> None:
        if worker is not None and self._server is not None:
            self._server.kill(worker)

    async def _fork(self) -> ForkedWorker:
        """Fork a worker, if necessary from a new fork server. Raises TextProcessesFailed."""
        try:
            return await (await self._running_server()).fork()
        except OSError as error:
            raise TextProcessesFailed(f"the processes that read texts can't be started: {error}") from None

    async def _running_server(self) -> ForkServer:
        async with self._starting:
            if self._server is None or not self._server.is_alive:
                if self._server is not None:
                    self._log.error("text_fork_server_ended")
                    await self._server.stop()
                self._server = await ForkServer.start(self._tokenizer_fd)
            return self._server


def _tokenizer_file(tokenizer: Tokenizer, context: int, limits: TextLimits) -> int:
    """Write a fork server's input to a file in memory, once, so that a replacement needs no work of the event loop.

    Returns the file's descriptor.
    """
    fd = os.memfd_create("tokenizer", os.MFD_CLOEXEC)
    with open(fd, "wb", closefd=False) as file:
        file.write(packed([tokenizer.values(), context, asdict(limits)]))
    return fd


def _fail(job: _TextJob, error: Exception) -> None:
    if not job.answer.done():
        job.answer.set_exception(error)
