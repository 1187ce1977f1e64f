import pytest

from gpulease.daemon.drivers.cuda import whole_program
from gpulease.daemon.drivers.cuda.whole_program import architecture_of, compile_whole

HEAD = b"// .target sm_90a\n.version 8.0\n"


@pytest.mark.parametrize(
    ("target", "capability", "architecture"),
    [
        (b".target sm_75", (9, 0), b"sm_90"),
        (b" \t.target sm_80, texmode_independent", (8, 6), b"sm_86"),
        (b".target sm_90a", (9, 0), b"sm_90a"),
        (b".target sm_100f", (10, 3), b"sm_103f"),
        (b".target sm_80", (12, 1), b"sm_121"),
    ],
)
def test_the_card_s_architecture_with_the_features_that_the_ptx_needs(
    target: bytes, capability: tuple[int, int], architecture: bytes
) -> None:
    assert architecture_of(HEAD + target + b"\n.address_size 64\n", capability) == architecture


@pytest.mark.parametrize(
    "rest",
    [
        b"",
        b".target sm_75, debug\n",
        b".target sm_75\n.extern .global .align 4 .u32 count;\n",
        b".target sm_75\n.extern\n.const .b8 weights[32];\n",
    ],
)
def test_what_the_linker_compiles(rest: bytes) -> None:
    assert architecture_of(HEAD + rest, (9, 0)) is None


def test_functions_of_the_driver_and_dynamic_shared_memory_are_no_reason_to_link() -> None:
    ptx = HEAD + b".target sm_75\n.extern .func malloc(.param .b64 a);\n.extern .shared .b8 rows[];\n"
    assert architecture_of(ptx, (7, 5)) == b"sm_75"


@pytest.mark.parametrize(
    ("library", "driver_version", "reason"),
    [("libgpulease-missing.so.1", 1010, "libgpulease-missing.so.1"), ("libc.so.6", 1020, "nvPTXCompilerCreate")],
)
def test_without_the_driver_s_compiler_the_linker_compiles_and_the_log_has_the_reason_once(
    library: str,
    driver_version: int,
    reason: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(whole_program, "LIBRARY", library)
    for _ in range(2):
        assert compile_whole(HEAD + b".target sm_75\n", (9, 0), driver_version) is None
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("PTX is compiled as relocatable code")
    assert reason in line
