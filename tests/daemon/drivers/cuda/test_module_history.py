"""Which histories of loads and unloads leave variables where another process would have them, too."""

import pytest

from gpulease.daemon.drivers.cuda.module_history import MAX_MODULES_BYTES, ModuleHistory

MIB = 1 << 20


def why_after(*steps: str, size_bytes: int = 4096) -> str:
    """Return the reason after loads and unloads.

    "+a" loads a module, "+A" one with variables, "+p" and "+P" one that prints; "-a" unloads it; "s" creates a stream.
    """
    history, numbers = ModuleHistory(), dict[str, int]()
    for step in steps:
        if step == "s":
            history.add_stream()
        elif step[0] == "+":
            numbers[step[1]] = history.add(size_bytes, has_variables=step[1].isupper(), calls_driver=step[1] in "pP")
        else:
            history.remove(numbers.pop(step[1]))
    return history.why_elsewhere()


@pytest.mark.parametrize(
    "steps",
    [
        "",
        "+A +B +C",
        # The last one is gone, as if it had never been loaded.
        "+A +B -B +C",
        "+A +B +C -C -B +D",
        # A gap is filled up once everything after it is gone.
        "+A +B +C -B -C +D",
        "+A +B -A -B +C",
        # Where a module without variables lies does not matter.
        "+A +b +c -b",
        "+a +b -a +c",
        "+A s +b",
        "+A s s -A +b",
        "+P +A",
        "+A +p -p",
        "+p -p +a",
    ],
)
def test_variables_are_where_another_process_has_them(steps: str) -> None:
    assert why_after(*steps.split()) == ""


@pytest.mark.parametrize(
    "steps", ["+A +B -A", "+a +B -a", "+A +B -A +C", "+A +B +C -B", "+A +B +C +D -B -D", "+A +B +C -A -C +D -D"]
)
def test_a_gap_before_a_variable_moves_it(steps: str) -> None:
    assert "unloaded" in why_after(*steps.split())


@pytest.mark.parametrize("steps", ["s +A", "+A s +B", "+A s -A +B"])
def test_a_stream_before_a_variable_moves_it(steps: str) -> None:
    """Another process creates the streams after all modules."""
    assert "stream" in why_after(*steps.split())


@pytest.mark.parametrize("steps", ["+p -p +A", "+A +p -p +B", "+P -P +A"])
def test_the_print_buffer_of_a_module_that_is_gone_moves_what_came_after_it(steps: str) -> None:
    assert "prints" in why_after(*steps.split())


def test_variables_beyond_the_addresses_that_a_context_begins_with_may_move() -> None:
    half_bytes = MAX_MODULES_BYTES // 2
    assert why_after("+A", "+b", size_bytes=half_bytes) == ""
    assert "at most" in why_after("+A", "+b", size_bytes=half_bytes + 1)
    # One that was loaded meanwhile may lie beyond them, whatever is unloaded now.
    assert "at most" in why_after("+a", "+b", "-b", "+C", size_bytes=half_bytes + 1)
    assert why_after("+a", "+b", "-b", "-a", "+C", size_bytes=half_bytes + 1) == ""
    assert why_after("+a", "+b", size_bytes=half_bytes + 1) == ""
