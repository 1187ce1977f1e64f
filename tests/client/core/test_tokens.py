import base64

import pytest

from gpulease.client.core.tokens import Grant, token_of
from gpulease.client.errors import InvalidRequest
from gpulease.protocol.capabilities import Permission
from gpulease.protocol.lease_ids import LeaseId
from gpulease.protocol.limits import MAX_TOKEN_BYTES

LONGEST = b"t" * MAX_TOKEN_BYTES


def test_as_bytes_or_as_text() -> None:
    assert token_of(LONGEST) == token_of(base64.urlsafe_b64encode(LONGEST).decode()) == LONGEST


@pytest.mark.parametrize("token", [LONGEST + b"t", base64.urlsafe_b64encode(LONGEST + b"t").decode(), "no token"])
def test_what_is_none(token: bytes | str) -> None:
    """Whoever is handed others' tokens is told by an error of the library's."""
    with pytest.raises(InvalidRequest, match="a token "):
        token_of(token)


def test_a_grant_names_its_permissions_and_hides_its_token() -> None:
    grant = Grant(b"secret", b"key", LeaseId(16), Permission.MEM_READ | Permission.TASKLET_SUBMIT, 60.0, 0)
    assert repr(grant) == f"<Grant of TASKLET_SUBMIT, MEM_READ on {LeaseId(16)} for 60 s>"
