"""The one printed form of a lease's id."""

import copy
import pickle

import pytest

from gpulease.protocol.lease_ids import LeaseId, lease_id_of

TEXT = "0f3a08a5f1d9537b8bd8fa44fc7492e1"


def test_it_prints_as_32_digits_and_counts_as_a_number() -> None:
    lease_id = lease_id_of(TEXT.upper())
    assert [str(lease_id), repr(lease_id), f"{lease_id}", "%s" % lease_id, f"{lease_id!r}"] == [TEXT] * 5  # noqa: UP031
    assert (f"{lease_id:>40}", f"{lease_id:.8}") == (TEXT.rjust(40), TEXT[:8])
    assert (f"{lease_id:d}", f"{lease_id:032x}", f"{lease_id:x}") == (str(int(TEXT, 16)), TEXT, TEXT.lstrip("0"))
    assert [f"{lease_id:,}", f"{lease_id:+}", f"{lease_id:=40}"] == [
        format(int(TEXT, 16), spec) for spec in (",", "+", "=40")
    ]
    assert lease_id == int(TEXT, 16)
    assert {int(TEXT, 16): "found"}[lease_id] == "found"
    assert lease_id.to_bytes(16, "big") == bytes.fromhex(TEXT)
    for other in (copy.deepcopy(lease_id), pickle.loads(pickle.dumps(lease_id))):
        assert (type(other), str(other)) == (LeaseId, TEXT)


@pytest.mark.parametrize("text", ["", TEXT[:31], TEXT + "0", f"0x{TEXT[2:]}", TEXT[:31] + "g", f" {TEXT[1:]}"])
def test_nothing_else_is_one(text: str) -> None:
    with pytest.raises(ValueError, match="32 hexadecimal digits"):
        lease_id_of(text)
