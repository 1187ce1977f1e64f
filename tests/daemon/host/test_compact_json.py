"""Both encoders write the same bytes: audit logs of hosts with and without msgspec are verified by one rule."""

import sys
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpulease.daemon.host.compact_json import compact_encoder

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**64) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text("abzABZ_09"), inner, max_size=4),
    max_leaves=8,
)


@pytest.mark.parametrize("sorts_keys", [False, True])
@given(VALUES)
def test_bytes_do_not_depend_on_the_encoder(sorts_keys: bool, value: Any) -> None:
    fast = compact_encoder(sorts_keys=sorts_keys)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "msgspec", None)
        slow = compact_encoder(sorts_keys=sorts_keys)
    try:
        expected = slow(value)
    except UnicodeEncodeError:
        with pytest.raises(UnicodeEncodeError):
            fast(value)
    else:
        assert fast(value) == expected


def test_other_objects_become_their_text() -> None:
    assert compact_encoder()({"at": ValueError("why")}) == b'{"at":"why"}'
