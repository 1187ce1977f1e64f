"""Whole kernels of nvcc, NVRTC, numba and Triton, and single operations: what a real card gave for the same inputs.

Bit for bit, but where the ISA leaves room: there within the bound that the case's own table states.
"""

from collections import defaultdict
from typing import Any, Final

import numpy as np
import pytest

from gpulease.daemon.ptx.context import CpuContext
from helpers.record.approximations import APPROXIMATIONS, approximation_case, beyond, true_values
from helpers.record.cases import Array, Case, Result, differences, read_record, run, unpacked
from helpers.record.ends import ENDS, End, outcome
from helpers.record.everything import all_cases, ptx_of
from helpers.record.triton import triton_cases, unrecorded_cases

pytestmark = pytest.mark.exhaustive

APPROXIMATE: Final = "approximations"


def by_image() -> dict[str, list[Case]]:
    """The cases of each image: all are run by one test, so that it is compiled once."""
    cases: dict[str, list[Case]] = defaultdict(list)
    for case in all_cases():
        for name in case.images:
            cases[name].append(case)
    return cases


CASES: Final = by_image()


@pytest.fixture(scope="module")
def record() -> dict[str, Any]:
    return read_record()


def recorded(record: dict[str, Any], case: Case, image: str) -> list[Array]:
    """What the card gave."""
    entry = record["cases"][case.name]
    assert entry["fingerprint"] == case.fingerprint, f"{case.name} was recorded of other inputs: record it anew"
    return unpacked(case, entry["results"][image])


def is_near(got: Array, expected: Array, result: Result) -> bool:
    """Within a result's bound of NumPy's, and what that itself may err."""
    bound = result.bound
    return np.allclose(got.astype("f8"), expected, rtol=bound.relative + 2.0**-20, atol=bound.absolute + 2.0**-20)


SLOW = ("atomics", "matrices")
"""Images that are compiled for half a minute; tests of their own try each of their instructions."""


@pytest.mark.parametrize(
    "image",
    [pytest.param(name, marks=[pytest.mark.slow] * (name in SLOW)) for name in CASES if name != APPROXIMATE],
)
def test_an_image_gives_what_the_card_gave(resting: CpuContext, record: dict[str, Any], image: str) -> None:
    module = resting.module_load(ptx_of(image))
    wrong = [
        f"{case.name} {difference}"
        for case in CASES[image]
        for result, ours, theirs in zip(
            case.results, run(resting, module, case), recorded(record, case, image), strict=True
        )
        for difference in differences(result, ours, theirs)
    ]
    resting.module_unload(module)
    assert not wrong, "\n".join(wrong[:20])


def test_approximations_lie_within_the_isa_s_bounds(resting: CpuContext, record: dict[str, Any]) -> None:
    """Both ours and the card's: a bound that the card breaks would be a wrong one."""
    module = resting.module_load(ptx_of(APPROXIMATE))
    wrong = []
    for text, form in APPROXIMATIONS.items():
        case = approximation_case(form)
        true, bound = true_values(form, case)
        (ours,), (theirs,) = run(resting, module, case), recorded(record, case, APPROXIMATE)
        for whose, got in (("ours", ours), ("the card's", theirs)):
            places = np.flatnonzero(beyond(form, got, true, bound))
            wrong += [f"{text} [{at}]: {whose} {got[at]!r}, truly {true[at]!r} +- {bound[at]!r}" for at in places[:3]]
    resting.module_unload(module)
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize(("case", "expected"), list(triton_cases()), ids=lambda value: getattr(value, "name", ""))
def test_the_record_of_triton_s_kernels_is_what_they_say(record: dict[str, Any], case: Case, expected: Array) -> None:
    (theirs,) = recorded(record, case, case.images[0])
    assert is_near(theirs, expected, case.results[0])


@pytest.mark.parametrize(("case", "expected"), list(unrecorded_cases()), ids=lambda value: getattr(value, "name", ""))
def test_triton_s_other_kernels_compute_what_they_say(
    resting: CpuContext, case: Case, expected: tuple[Array, ...]
) -> None:
    module = resting.module_load(ptx_of(case.images[0]))
    for result, got, wanted in zip(case.results, run(resting, module, case), expected, strict=True):
        assert is_near(got, wanted, result)
    resting.module_unload(module)


@pytest.mark.parametrize("end", ENDS.values(), ids=ENDS)
def test_a_launch_ends_as_on_the_card(resting: CpuContext, record: dict[str, Any], end: End) -> None:
    """For the same reason, in the driver's own words; what was printed is the same but for the threads' order."""
    texts: list[str] = []
    resting.printed = lambda kernel, text: texts.append(text)
    ours, card = outcome(resting, end), record["ends"][end.case.kernel]
    assert end.ours in ours
    assert end.card in card["error"]
    assert bool(ours) == bool(card["error"])
    assert sorted("".join(texts).splitlines()) == sorted(card["printed"].splitlines())
