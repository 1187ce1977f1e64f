import pytest

from gpulease.daemon.ptx.parse.parser import parse
from gpulease.daemon.ptx.translate import liveness
from gpulease.daemon.ptx.translate.form_table import find_form
from gpulease.daemon.ptx.translate.liveness import TooComplex, count_merges, effect_of, live_after


def live_names(body: str) -> dict[int, set[str]]:
    """The registers live behind each barrier of a body."""
    head = ".version 8.0 .target sm_75 .entry k() { .reg .b32 %a, %b, %c; .reg .pred %p, %q;"
    function = parse(head + body + "}").functions[0]
    body_ = function.instructions
    effects = [effect_of(i, writes_first=find_form(i, "k")[0].writes) for i in body_]
    wanted = {k for k, i in enumerate(body_) if i.opcode == "bar"}
    found = live_after(body_, effects, wanted)
    return {k: {r.name for r in function.registers if live >> r.index & 1} for k, live in found.items()}


def merges(body: str, *, waits: bool = False) -> int:
    head = ".version 8.0 .target sm_75 .entry k() { .reg .b32 %a, %b, %c; .reg .pred %p, %q;"
    instructions = parse(head + body + "}").functions[0].instructions
    effects = [effect_of(i, writes_first=find_form(i, "k")[0].writes) for i in instructions]
    return count_merges(instructions, effects, waits=waits)


def test_only_what_is_read_later_is_live() -> None:
    assert live_names("mov.b32 %a, 1; mov.b32 %b, 2; bar.sync 0; mov.b32 %b, %a; st.shared.b32 [%c], %b;") == {
        2: {"%a", "%c"}
    }


def test_around_a_loop() -> None:
    assert live_names("L: bar.sync 0; add.u32 %a, %a, 1; setp.lt.u32 %p, %a, %b; @%p bra L; ret;") == {0: {"%a", "%b"}}


def test_a_guarded_write_may_not_happen() -> None:
    assert live_names("bar.sync 0; @%p mov.b32 %a, 1; st.shared.b32 [0], %a;") == {0: {"%a", "%p"}}


def test_work_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(liveness, "MAX_LIVENESS_VISITS", 2)
    with pytest.raises(TooComplex):
        live_names("L: bar.sync 0; @%p bra L; @%q bra M; N: bra N; M: ret;")
    monkeypatch.setattr(liveness, "MAX_LIVENESS_BITS", 1)
    with pytest.raises(TooComplex):
        live_names("L: bar.sync 0; @%p bra L;")


@pytest.mark.parametrize(
    ("body", "waits", "expected"),
    [
        ("mov.b32 %a, 1; mov.b32 %b, 2; L: add.u32 %c, %a, %b; setp.lt.u32 %p, %a, %c; @%p bra L;", False, 0),
        ("mov.b32 %a, 1; mov.b32 %b, 2; L: add.u32 %c, %a, %b; setp.lt.u32 %p, %a, %c; @%p bra L;", True, 2),
        ("mov.b32 %a, 1; mov.b32 %b, 2; L: add.u32 %a, %a, %b; setp.lt.u32 %p, %a, %b; @%p bra L;", False, 1),
        ("mov.b32 %b, 2; L: add.u32 %a, %a, %b; setp.lt.u32 %p, %a, %b; @%p bra L;", False, 1),
        ("@%p mov.b32 %a, 1; L: setp.lt.u32 %p, %a, 5; @%p bra L;", False, 1),
        ("mov.b32 %a, 1; @%q bra L; M: bra N; L: mov.b32 %a, 3; N: st.shared.b32 [0], %a;", False, 1),
    ],
)
def test_merges_are_counted(monkeypatch: pytest.MonkeyPatch, body: str, waits: bool, expected: int) -> None:
    monkeypatch.setattr(liveness, "MAX_MERGES", 0)
    assert merges(body, waits=waits) == expected
