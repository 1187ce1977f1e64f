"""Which of the leases that were acquired for a program it attaches to."""

import json
from pathlib import Path

import pytest

from gpulease.client import GpuSession, InvalidRequest
from gpulease.client.core.assigned_leases import assigned_lease_id


def lease_file(folder: Path, number: int, claim: str, request: str, at: int = 0) -> int:
    lease = {"lease_id": f"{number:032x}", "claim": claim, "request": request, "number": at}
    (folder / f"{number}.json").write_text(json.dumps(lease))
    return number


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.delenv("GPULEASE_LEASE_ID", raising=False)
    monkeypatch.setenv("GPULEASE_LEASES", str(tmp_path))
    return tmp_path


def test_the_only_lease_needs_no_name_and_several_need_one(folder: Path) -> None:
    first = lease_file(folder, 1, "slice", "gpu")
    assert assigned_lease_id(None) == first
    second, third = lease_file(folder, 2, "slice", "gpu", 1), lease_file(folder, 3, "other", "large")
    for name, lease in (
        ("slice/gpu/0", first),
        ("slice/gpu/1", second),
        ("large", third),
        ("other/large", third),
        (f"{third:032x}", third),
    ):
        assert assigned_lease_id(name) == lease
    for unclear in (None, "gpu", "slice/gpu"):
        with pytest.raises(InvalidRequest, match="There are: other/large/0, slice/gpu/0, slice/gpu/1"):
            assigned_lease_id(unclear)
    with pytest.raises(InvalidRequest, match="one lease that is named 'small', not 0"):
        assigned_lease_id("small")


def test_the_variable_that_a_user_sets_comes_first(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lease_file(folder, 1, "slice", "gpu")
    monkeypatch.setenv("GPULEASE_LEASE_ID", f"{7:032x}")
    assert assigned_lease_id(None) == 7
    assert assigned_lease_id("gpu") == 1


@pytest.mark.parametrize("text", ["", "[]", "{", '{"lease_id": 3}', '{"lease_id": "xyz", "claim": "a"}'])
def test_a_file_that_describes_no_lease_is_named(folder: Path, text: str) -> None:
    (folder / "bad.json").write_text(text)
    with pytest.raises(InvalidRequest, match=r"bad\.json does not describe a lease"):
        assigned_lease_id(None)


def test_a_program_without_any_lease_is_told_how_to_get_one(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("GPULEASE_LEASE_ID", "GPULEASE_LEASES"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(InvalidRequest, match="gpulease run --vram"):
        GpuSession.attach(address="unix:/nowhere")
