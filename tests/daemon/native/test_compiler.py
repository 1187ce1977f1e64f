import pytest

from gpulease.daemon.native.compiler import Effort, emit_object, load_object


@pytest.mark.parametrize("effort", Effort)
def test_code_can_be_made_with_every_effort(effort: Effort) -> None:
    assert load_object(emit_object("define void @nothing() { ret void }", effort)).address("nothing")
