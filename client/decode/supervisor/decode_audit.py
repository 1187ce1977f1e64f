"""Records of a decoder's requests in the daemon's audit log: their contents, and the task that writes them.

    audit = await DecodeAudit.of(checkpoint)
    async with Decoder.open(checkpoint, observers=[audit]) as decoder, audit.writing(lambda: decoder.engine.lease):
        ...

A record contains digests, no texts. `gpulease audit recompute` takes a record and its prompt, computes the output
again, and compares the digests.
"""

import asyncio
import hashlib
import logging
import os
import time
from array import array
from collections import deque
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from sys import byteorder
from typing import Any, Final, Self

from gpulease.client.aio import GpuLease
from gpulease.client.decode.checkpoint import Checkpoint
from gpulease.client.decode.decode_reports import DecoderObserver, FinishedRequest
from gpulease.client.decode.decode_requests import SamplingParameters
from gpulease.client.decode.engine.kernel_library import kernels_sha256
from gpulease.client.decode.model_config import KvDtype
from gpulease.client.decode.text.grammar import grammar_digest, grammar_library
from gpulease.client.errors import GpuLeaseError, InvalidRequest
from gpulease.protocol.foreign_text import encodable
from gpulease.protocol.lease_ids import lease_text
from gpulease.protocol.time_units import US_PER_S

MAX_PENDING: Final = 16_384
"""Maximum number of records that wait for the daemon, about 30 MB. Without a limit, a daemon that stays down would make
the server run out of memory."""

AT_ONCE: Final = 64
"""Maximum number of records in one write, which waits for the disk once. A renewal of the lease waits for the write."""

RETRY_S: Final = 1.0
"""Seconds between two tries to write a record that the daemon did not accept."""

LAST_WRITES_S: Final = 10.0
"""Seconds to write the remaining records when the server stops. A daemon that hangs must not delay the stop longer."""

MAX_NAME_CHARACTERS: Final = 128
"""Maximum number of characters of a name in a record, so that the record stays below the size limit of a note."""

SERVER_BYTES: Final = 8
"""Number of random bytes in the name that a server uses in its records: enough that no two servers in one log share a
name."""

_FLOATS: Final = ("min_p", "repetition_penalty", "presence_penalty", "frequency_penalty")
"""Sampling parameters that are floats. A record contains them only if they differ from their defaults."""

EVENT: Final = "decode"
START_EVENT: Final = "decode_start"

_log: Final = logging.getLogger("gpulease.decode")


@dataclass(frozen=True, slots=True)
class TokenDigest:
    """A list of tokens in a record: their number, and the SHA-256 of the tokens as little-endian u32s."""

    count: int
    sha256: str

    @classmethod
    def of(cls, tokens: Sequence[int]) -> Self:
        # Use a fixed byte order, so that the digest is the same on every host.
        words = array("I", tokens)
        if byteorder == "big":
            words.byteswap()
        return cls(len(tokens), hashlib.sha256(words.tobytes()).hexdigest())

    def __str__(self) -> str:
        return f"{self.count} tokens, sha256 {self.sha256}"

    def note(self) -> dict[str, Any]:
        return {"count": self.count, "sha256": self.sha256}


@dataclass(frozen=True, slots=True)
class ComputedBy:
    """Everything that a request's output depends on, other than prompt and sampling.

    Attributes:
        model: The model's name: the last part of its path; on a server with several models, its name in requests.
        model_sha256: Digest of its files (`Checkpoint.sha256`).
        kernels_sha256: Digest of the kernels.
        packed: Whether quantised weights stay packed.
        kv_dtype: The type in which keys and values are stored.
    """

    model: str
    model_sha256: str
    kernels_sha256: str
    packed: bool
    kv_dtype: KvDtype = KvDtype.BF16

    @classmethod
    async def of(
        cls, checkpoint: Checkpoint, *, packed: bool = True, kv_dtype: KvDtype = KvDtype.BF16, name: str = ""
    ) -> Self:
        """Read the model's files, in a thread. `name` is the model's name in requests. Raises ModelRejected."""
        name = _text(name or Path(checkpoint.name).name)
        return cls(name, await asyncio.to_thread(checkpoint.sha256), kernels_sha256(), packed, kv_dtype)

    def note(self) -> dict[str, Any]:
        model: dict[str, Any] = {"name": self.model, "sha256": self.model_sha256, "packed": self.packed}
        # Records of engines with bf16 have no such member.
        if self.kv_dtype is not KvDtype.BF16:
            model["kv_dtype"] = str(self.kv_dtype)
        return {"model": model, "kernels_sha256": self.kernels_sha256}


def note_of(finished: FinishedRequest, computed_by: ComputedBy, server: str, number: int) -> dict[str, Any]:
    """Return the record of a request. It has no floats: sampling parameters are written as their shortest texts.

    `server` and `number` identify the record: it may be in the log twice, if a connection broke during the write.
    """
    sampling = finished.sampling
    return {
        "event": EVENT,
        "server": server,
        "number": number,
        "request": _text(finished.request_id),
        "tenant": _text(finished.tenant_id),
        "region": None if finished.region_id is None else lease_text(finished.region_id),
        "prompt": TokenDigest.of(finished.prompt).note(),
        "output": TokenDigest.of(finished.emitted).note(),
        "sampling": {
            "temperature": repr(float(sampling.temperature)),
            "top_p": repr(float(sampling.top_p)),
            "top_k": sampling.top_k,
            # A seed may be larger than the largest integer of a record.
            "seed": str(sampling.seed),
            **_changes_of(sampling),
        },
        # Times are in whole microseconds: a record has no floats, because their text is not canonical.
        "reason": str(finished.reason),
        "replays": finished.replays,
        "compute_us": round(finished.compute_s * US_PER_S),
        "gpu_us": round(finished.gpu_s * US_PER_S),
        "wall_us": round((finished.ended_at - finished.submitted_at) * US_PER_S),
        **computed_by.note(),
    }


@dataclass(frozen=True, slots=True)
class DecodeRecord:
    """A request's record, read from the log: the inputs of the computation, and the digest of its output.

    Attributes:
        digests: The digests, as `digests_of` returns them, of parameters that `sampling` does not have.
        grammar_by: The library that computed the grammar's masks; "" without a grammar.
    """

    prompt: TokenDigest
    output: TokenDigest
    sampling: SamplingParameters
    by: ComputedBy
    digests: Mapping[str, str]
    grammar_by: str = ""

    @classmethod
    def read(cls, note: Mapping[str, Any]) -> Self:
        """Parse a note. Raises ValueError if it is not the record of a request."""
        # The lease has other notes, too, such as the one about the server's start.
        if note.get("event") != EVENT:
            raise ValueError("it describes no request")
        try:
            sampling_note, model = note["sampling"], note["model"]
            # The texts of floats and of the seed are parsed back exactly, because they are their shortest
            # representations.
            defaults = SamplingParameters()
            sampling = SamplingParameters(
                float(sampling_note["temperature"]),
                float(sampling_note["top_p"]),
                int(sampling_note["top_k"]),
                int(sampling_note["seed"]),
                float(sampling_note.get("min_p", defaults.min_p)),
                float(sampling_note.get("repetition_penalty", defaults.repetition_penalty)),
                float(sampling_note.get("presence_penalty", defaults.presence_penalty)),
                float(sampling_note.get("frequency_penalty", defaults.frequency_penalty)),
                min_tokens=int(sampling_note.get("min_tokens", 0)),
                stop_token_ids=tuple(sampling_note.get("stop_token_ids", ())),
                ignores_end=bool(sampling_note.get("ignores_end", False)),
            )
            kv_dtype = KvDtype(model["kv_dtype"]) if "kv_dtype" in model else KvDtype.BF16
            computed_by = ComputedBy(
                model["name"], model["sha256"], note["kernels_sha256"], bool(model["packed"]), kv_dtype
            )
            grammar = sampling_note.get("grammar", {"sha256": "", "by": ""})
            digests = {name: str(sampling_note.get(name, "")) for name in digests_of(defaults)} | {
                "grammar": str(grammar["sha256"])
            }
            prompt, output = TokenDigest(**note["prompt"]), TokenDigest(**note["output"])
            return cls(prompt, output, sampling, computed_by, digests, str(grammar["by"]))
        except (KeyError, TypeError, ValueError, GpuLeaseError) as error:
            raise ValueError(f"it is not as a decoder writes it: {type(error).__name__}: {error}") from None


def digests_of(sampling: SamplingParameters) -> dict[str, str]:
    """Return the SHA-256 of each parameter that may be too long for a record, by its name; "" if it is not set.

    Lists are digested in ascending order, because their order has no effect. Each item is a line: for a bias, the token
    and the bias's shortest text; for a sequence, its tokens with spaces between them.
    """
    lists = {
        "logit_bias": [f"{token} {float(bias)!r}" for token, bias in sorted(sampling.logit_bias)],
        "allowed_token_ids": [str(token) for token in sorted(set(sampling.allowed_token_ids))],
        "bad_words": [" ".join(map(str, word)) for word in sorted(set(sampling.bad_words))],
    }
    digests = {
        name: hashlib.sha256("".join(f"{line}\n" for line in lines).encode()).hexdigest() if lines else ""
        for name, lines in lists.items()
    }
    return digests | {"grammar": grammar_digest(sampling.grammar) if sampling.grammar else ""}


def _changes_of(sampling: SamplingParameters) -> dict[str, Any]:
    """Return the record's members for further parameters that affect the choice of tokens, if they are set."""
    defaults = SamplingParameters()
    changes: dict[str, Any] = {
        name: repr(float(value)) for name in _FLOATS if (value := getattr(sampling, name)) != getattr(defaults, name)
    }
    digests = digests_of(sampling)
    changes |= {name: digest for name, digest in digests.items() if digest and name != "grammar"}
    if sampling.min_tokens:
        changes["min_tokens"] = sampling.min_tokens
        changes["stop_token_ids"] = list(sampling.stop_token_ids)
    if sampling.grammar:
        # The library computes the masks, so tokens depend on its version, too.
        changes["grammar"] = {"sha256": digests["grammar"], "by": grammar_library()}
    if sampling.ignores_end:
        changes["ignores_end"] = True
    return changes


class DecodeAudit(DecoderObserver):
    """Writes a record of every request that ended, in a task. The server's log reports each record that is lost.

    Attributes:
        server: A random name, which all of its records contain.
        written: Number of records that are in the audit log.
        lost: Number of records that will never be written: the queue was full, or the daemon refused them permanently.
    """

    def __init__(self, by: ComputedBy) -> None:
        self.by = by
        self.server = os.urandom(SERVER_BYTES).hex()
        self.written = self.lost = self._finished = 0
        self._pending: deque[dict[str, Any]] = deque()
        self._wake = asyncio.Event()
        self._is_failing = False

    @classmethod
    async def of(cls, checkpoint: Checkpoint, *, packed: bool = True, kv_dtype: KvDtype = KvDtype.BF16) -> Self:
        """Return an observer for a model. Reads all of the model's files to compute their digest.

        Raises ModelRejected.
        """
        return cls(await ComputedBy.of(checkpoint, packed=packed, kv_dtype=kv_dtype))

    def on_finished(self, report: FinishedRequest) -> None:
        """Queue the record of a request. Even a lost record uses up a number, so the audit log shows a gap."""
        self._finished += 1
        # Drop the newest record, so that the older ones stay in order.
        if len(self._pending) >= MAX_PENDING:
            self._count_lost(1, f"{MAX_PENDING} wait already")
            return
        self._pending.append(note_of(report, self.by, self.server, self._finished))
        self._wake.set()

    @property
    def pending(self) -> int:
        """The number of records that wait to be written."""
        return len(self._pending)

    @asynccontextmanager
    async def writing(self, lease: Callable[[], GpuLease]) -> AsyncIterator[None]:
        """Write records until the block ends, and then the remaining ones. `lease` returns the decoder's current lease.

        Raises Unsupported if the daemon keeps no audit log, or any other error of writing the first record.
        """
        # The first record shows that the daemon accepts notes, and names the served model for readers of the log.
        await lease().note({"event": START_EVENT, "server": self.server, **self.by.note()})
        task = asyncio.create_task(self._write(lease))
        try:
            yield
        finally:
            # The server is stopping: give the writer a limited time for the remaining records, then count the unwritten
            # ones as lost.
            last = time.monotonic() + LAST_WRITES_S
            while self._pending and not task.done() and time.monotonic() < last:
                await asyncio.wait([task], timeout=0.01)
            task.cancel()
            with suppress(asyncio.CancelledError):
                await task
            if self._pending:
                self._count_lost(len(self._pending), "the server stops, and the daemon did not take them")
                self._pending.clear()

    async def _write(self, lease: Callable[[], GpuLease]) -> None:
        while True:
            # Clear this before the queue is read, so that a record that arrives in between starts the next round.
            self._wake.clear()
            while self._pending:
                # Records stay in the queue until their outcome is known, so a cancelled write loses none.
                batch = list(islice(self._pending, AT_ONCE))
                undone = await self._undone(batch, lease)
                for _ in batch:
                    self._pending.popleft()
                # Put failed records back to the front in their order, so that numbers ascend in the log.
                self._pending.extendleft(reversed(undone))
                if undone:
                    await asyncio.sleep(RETRY_S)
            await self._wake.wait()

    async def _undone(self, batch: Sequence[dict[str, Any]], lease: Callable[[], GpuLease]) -> list[dict[str, Any]]:
        """Write records in one call. Returns those that must be written again."""
        outcomes: Sequence[GpuLeaseError | None]
        try:
            outcomes = await lease().notes(batch)
        except GpuLeaseError as error:
            # The call failed, so it is unknown which records the daemon wrote: write all of them again.
            outcomes = [error] * len(batch)
        undone = []
        for note, failure in zip(batch, outcomes, strict=True):
            # The daemon will always refuse this record. Subclasses of InvalidRequest mean that the lease has ended:
            # then the decoder acquires another lease, with which the record is written.
            if type(failure) is InvalidRequest:
                self._count_lost(1, str(failure))
            elif failure is None:
                self.written += 1
            else:
                undone.append(note)
                if not self._is_failing:
                    _log.warning("decode records wait for the audit log: %s", failure)
                self._is_failing = True
        if not undone:
            self._is_failing = False
        return undone

    def _count_lost(self, count: int, reason: str) -> None:
        self.lost += count
        _log.error("%d decode records are not in the audit log, %d in all: %s", count, self.lost, reason)


def _text(name: str) -> str:
    """Return a name in the form that records use: truncated, and without unpaired surrogates."""
    return encodable(name[:MAX_NAME_CHARACTERS])
