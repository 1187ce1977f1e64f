"""Records of requests in the audit log: their contents, and that each lost one is reported."""

import asyncio
import hashlib
import json
import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpulease.client.aio import GpuLease
from gpulease.client.decode.decode_errors import CompletionReason
from gpulease.client.decode.decode_reports import FinishedRequest
from gpulease.client.decode.decode_requests import SamplingParameters
from gpulease.client.decode.model_config import KvDtype
from gpulease.client.decode.supervisor import decode_audit
from gpulease.client.decode.supervisor.decode_audit import ComputedBy, DecodeAudit, DecodeRecord, TokenDigest, note_of
from gpulease.client.errors import Disconnected, InvalidRequest, LeaseFreed, Unsupported
from gpulease.daemon.record.audit.records import canonical_bytes
from gpulease.protocol.limits import MAX_NOTE_BYTES
from helpers.waiting import PATIENCE_S

BY = ComputedBy("tiny", "ab" * 32, "cd" * 32, packed=True)
SERVER = "0f" * 8
DONE = FinishedRequest(
    tenant_id="ann",
    request_id="request-1",
    prompt=(17, 4),
    emitted=(5, 2**32 - 1),
    sampling=SamplingParameters(0.8, 0.95, 40, 2**64 - 1),
    reason=CompletionReason.REVOKED,
    detail="",
    submitted_at=10.0,
    first_token_at=10.5,
    ended_at=12.25,
    compute_s=0.5,
    gpu_s=0.125,
    replays=1,
    region_id=7,
)


class MadeLease:
    """A lease that stores notes for the audit log, or raises the error that the test sets."""

    def __init__(self, *failures: Exception) -> None:
        self.failures = list(failures)
        self.taken: list[Any] = []

    async def note(self, data: Any) -> None:
        if self.failures:
            raise self.failures.pop(0)
        self.taken.append(data)

    async def notes(self, several: Sequence[Any]) -> list[Exception | None]:
        outcomes = [self.failures.pop(0) if self.failures else None for _ in several]
        self.taken += [data for data, outcome in zip(several, outcomes, strict=True) if outcome is None]
        return outcomes


def of(lease: MadeLease) -> Callable[[], GpuLease]:
    return lambda: cast(GpuLease, lease)


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while not condition():  # noqa: ASYNC110  # nobody tells
            await asyncio.sleep(0.001)


def test_a_record_says_what_was_computed_of_what() -> None:
    note = note_of(DONE, BY, SERVER, 3)
    assert (note["server"], note["number"]) == (SERVER, 3)
    assert (note["request"], note["tenant"], note["region"]) == ("request-1", "ann", f"{7:032x}")
    assert note["prompt"] == {"count": 2, "sha256": hashlib.sha256(bytes.fromhex("1100000004000000")).hexdigest()}
    assert note["output"] == {"count": 2, "sha256": hashlib.sha256(bytes.fromhex("05000000ffffffff")).hexdigest()}
    assert note["sampling"] == {"temperature": "0.8", "top_p": "0.95", "top_k": 40, "seed": str(2**64 - 1)}
    assert (note["compute_us"], note["gpu_us"], note["wall_us"]) == (500_000, 125_000, 2_250_000)
    assert (note["replays"], note["reason"]) == (1, "Revoked")


@given(
    sampling=st.builds(
        SamplingParameters,
        st.just(0.0) | st.floats(1e-3, 100),
        st.floats(0, 1, exclude_min=True),
        st.integers(0, 2**31 - 1),
        st.integers(0, 2**64 - 1),
    ),
    name=st.text(st.characters(exclude_categories=()), max_size=300),
)
def test_a_record_is_canonical_fits_and_is_read_back_whole(sampling: SamplingParameters, name: str) -> None:
    note = note_of(replace(DONE, sampling=sampling, request_id=name, tenant_id=name), BY, SERVER, 2**53 - 1)
    data = canonical_bytes(note, depth=2)
    assert len(data) <= MAX_NOTE_BYTES
    said = DecodeRecord.read(json.loads(data))
    assert (said.sampling, said.by) == (sampling, BY)
    assert said.prompt == TokenDigest.of(DONE.prompt)


def test_a_record_has_the_type_of_keys_and_values_if_it_is_not_bf16() -> None:
    note = note_of(DONE, replace(BY, kv_dtype=KvDtype.FP8), SERVER, 3)
    assert note["model"]["kv_dtype"] == "fp8"
    assert DecodeRecord.read(note).by.kv_dtype is KvDtype.FP8
    assert "kv_dtype" not in note_of(DONE, BY, SERVER, 3)["model"]


@pytest.mark.parametrize(
    "change",
    [
        {"event": "other"},
        {"prompt": {}},
        {"sampling": {"temperature": "warm"}},
        {"model": 1},
        {"model": BY.note()["model"] | {"kv_dtype": "fp4"}},
    ],
)
def test_what_no_decoder_wrote_is_no_record(change: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="it "):
        DecodeRecord.read(note_of(DONE, BY, SERVER, 3) | change)


def test_records_are_kept_while_the_daemon_is_away_and_go_to_the_next_lease(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decode_audit, "RETRY_S", 0.001)
    first, second = MadeLease(), MadeLease()

    async def play() -> None:
        audit, leases = DecodeAudit(BY), [first]
        async with audit.writing(lambda: cast(GpuLease, leases[-1])):
            first.failures = [Disconnected("it is away"), LeaseFreed("the engine went")]
            for number in range(3):
                audit.on_finished(replace(DONE, request_id=str(number)))
            await until(lambda: not first.failures)
            leases.append(second)
            await until(lambda: audit.pending == 0)
        assert (audit.written, audit.lost) == (3, 0)

    asyncio.run(play())
    assert first.taken[0]["event"] == "decode_start"
    assert sorted(note["request"] for note in [*first.taken[1:], *second.taken]) == ["0", "1", "2"]


def test_what_can_t_be_written_is_counted_and_told(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(decode_audit, "MAX_PENDING", 2)
    monkeypatch.setattr(decode_audit, "LAST_WRITES_S", 0.0)
    lease = MadeLease()

    async def play() -> None:
        audit = DecodeAudit(BY)
        async with audit.writing(of(lease)):
            lease.failures = [InvalidRequest("not canonical")]
            audit.on_finished(DONE)
            await until(lambda: audit.lost == 1)
            lease.failures = [Disconnected("it is away")]
            for _ in range(3):
                audit.on_finished(DONE)
        assert (audit.lost, audit.written, audit.pending) == (4, 0, 0)

    with caplog.at_level(logging.ERROR, "gpulease.decode"):
        asyncio.run(play())
    assert [record.levelname for record in caplog.records] == ["ERROR"] * 3


def test_records_are_numbered_and_a_lost_one_leaves_a_gap(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decode_audit, "MAX_PENDING", 2)
    lease = MadeLease()

    async def play() -> None:
        audit = DecodeAudit(BY)
        async with audit.writing(of(lease)):
            for _ in range(3):
                audit.on_finished(DONE)
            await until(lambda: audit.pending == 0)
            audit.on_finished(DONE)
        assert {note["server"] for note in lease.taken} == {audit.server}

    asyncio.run(play())
    assert [note.get("number") for note in lease.taken] == [None, 1, 2, 4]


def test_records_that_are_left_are_written_before_the_end() -> None:
    lease = MadeLease()

    async def play() -> None:
        audit = DecodeAudit(BY)
        async with audit.writing(of(lease)):
            for _ in range(5):
                audit.on_finished(DONE)
        assert (audit.written, audit.lost) == (5, 0)

    asyncio.run(play())


def test_a_daemon_without_an_audit_log_is_refused() -> None:
    async def play() -> None:
        async with DecodeAudit(BY).writing(of(MadeLease(Unsupported("no audit log")))):
            raise AssertionError("it served")

    with pytest.raises(Unsupported, match="no audit log"):
        asyncio.run(play())


def test_a_model_s_digest_is_of_its_files(tmp_path: Path) -> None:
    from gpulease.client.decode import TINY_MODEL, open_model

    for path in TINY_MODEL.iterdir():
        if path.suffix in (".json", ".safetensors"):
            (tmp_path / path.name).write_bytes(path.read_bytes())
    here, there = open_model(TINY_MODEL).sha256(), open_model(tmp_path).sha256()
    with (tmp_path / "model.safetensors").open("r+b") as file:
        file.seek(-1, 2)
        file.write(b"\x7f")
    assert (here == there, here == open_model(tmp_path).sha256()) == (True, False)
