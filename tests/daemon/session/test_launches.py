from dataclasses import dataclass, replace

import pytest

from gpulease.daemon.drivers.interface import Figures, Parameter
from gpulease.daemon.session.launches import MAX_PLANS, Plan, Planner
from gpulease.daemon.session.ledger import Ledger
from gpulease.protocol.codec import build_body
from gpulease.protocol.errors import BodyError
from gpulease.protocol.failures import Refused
from gpulease.protocol.messages import Launch
from gpulease.protocol.opcodes import Status
from helpers.session_rig import MadeModule


@dataclass
class MadeKernel:
    """A kernel of any shape, with the attributes that the planner reads."""

    name: str
    parameters: tuple[Parameter, ...]
    parameter_bytes: int
    max_threads_per_block: int = 1024
    kept_bytes: int = 0
    is_due: bool = False

    def figures(self) -> Figures:
        return Figures(0, 0)


def kernel_of(*parameters: tuple[int, int], name: str = "k", parameter_bytes: int | None = None) -> MadeKernel:
    places = tuple(Parameter(offset, size) for offset, size in parameters)
    end = max((place.offset + place.size for place in places), default=0)
    return MadeKernel(name, places, end if parameter_bytes is None else parameter_bytes)


def planner_for(*kernels: MadeKernel) -> tuple[Planner, Ledger, Launch]:
    ledger = Ledger(1 << 20)
    number = ledger.add_module(MadeModule({kernel.name: kernel for kernel in kernels}), 10)
    sizes = tuple(place.size for place in kernels[0].parameters)
    args = bytes(range(1, 1 + sum(sizes)))
    return (
        Planner(ledger, 7, lambda kernel, threads: None),
        ledger,
        Launch(number, kernels[0].name, 2, 1, 1, 32, 1, 1, 0, args, sizes),
    )


def plan_of(planner: Planner, launch: Launch) -> tuple[Plan, bytes]:
    return planner.plan(memoryview(build_body(launch)))


def test_local_memory_is_charged_once_and_must_fit() -> None:
    planner, ledger, launch = planner_for(replace(kernel_of((0, 8)), kept_bytes=1 << 19))
    plan_of(planner, launch)
    assert planner.has_new_kernel
    plan_of(planner, replace(launch, grid_x=9))
    assert ledger.charged_bytes == 1 << 19
    planner, ledger, launch = planner_for(replace(kernel_of((0, 8)), kept_bytes=(1 << 20) + 1))
    with pytest.raises(Refused, match="local memory") as caught:
        plan_of(planner, launch)
    assert caught.value.failure.status is Status.LAUNCH_FAILED
    assert caught.value.failure.kernel == "k"
    assert caught.value.failure.hint
    assert ledger.charged_bytes == 0
    assert not planner.has_new_kernel


def test_a_refused_launch_gives_its_charge_back() -> None:
    planner, ledger, launch = planner_for(
        replace(kernel_of((0, 8)), kept_bytes=1 << 19), replace(kernel_of((0, 8), name="small"), kept_bytes=1 << 18)
    )
    small = replace(launch, kernel="small")
    plan_of(planner, small)
    for _ in range(2):
        plan_of(planner, launch)
        assert ledger.charged_bytes == 1 << 19
        planner.refused()
        # What an earlier launch took stays taken, and nothing is expected that was not charged.
        assert ledger.charged_bytes == 1 << 18
        assert planner.expected is None
    plan_of(planner, launch)
    plan_of(planner, launch)
    planner.refused()
    assert ledger.charged_bytes == 1 << 19


def test_arguments_without_gaps_go_as_they_are() -> None:
    planner, _, launch = planner_for(kernel_of((0, 8), (8, 4), (12, 4)))
    plan, args = plan_of(planner, launch)
    assert plan.moves is None
    assert plan.lay_out(args) is args
    assert args == launch.args
    assert (plan.grid, plan.block, plan.shared_bytes) == ((2, 1, 1), (32, 1, 1), 0)


@pytest.mark.parametrize(
    ("kernel", "expected"),
    [
        (kernel_of((0, 4), (8, 8)), bytes([1, 2, 3, 4, 0, 0, 0, 0, 5, 6, 7, 8, 9, 10, 11, 12])),
        (kernel_of((0, 1), (2, 2), (4, 1), (8, 8)), bytes([1, 0, 2, 3, 4, 0, 0, 0, *range(5, 13)])),
        (kernel_of((0, 8), (8, 4), parameter_bytes=16), bytes([*range(1, 13), 0, 0, 0, 0])),
        (kernel_of((0, 3), (4, 4)), bytes([1, 2, 3, 0, 4, 5, 6, 7])),
    ],
)
def test_arguments_with_gaps_are_laid_out(kernel: MadeKernel, expected: bytes) -> None:
    planner, _, launch = planner_for(kernel)
    plan, args = plan_of(planner, launch)
    assert plan.lay_out(args) == expected


def test_a_kernel_without_parameters() -> None:
    planner, _, launch = planner_for(kernel_of())
    plan, args = plan_of(planner, launch)
    assert plan.lay_out(args) == b""


def test_a_plan_is_made_once_for_all_argument_bytes() -> None:
    planner, _, launch = planner_for(kernel_of((0, 8)))
    first, _ = plan_of(planner, launch)
    second, args = plan_of(planner, replace(launch, args=bytes(8)))
    assert second is first
    assert args == bytes(8)
    other, _ = plan_of(planner, replace(launch, grid_x=3))
    assert other is not first


@pytest.mark.exhaustive
def test_the_number_of_plans_is_bounded() -> None:
    planner, _, launch = planner_for(kernel_of((0, 8)))
    for number in range(1, MAX_PLANS + 50):
        plan_of(planner, replace(launch, grid_x=number))
        assert len(planner._plans) <= MAX_PLANS
    assert plan_of(planner, launch)[0].grid == (2, 1, 1)


def test_an_unloaded_modules_plans_are_gone() -> None:
    planner, ledger, launch = planner_for(kernel_of((0, 8)))
    plan_of(planner, launch)
    planner.forget()
    ledger.remove_module(launch.module)
    with pytest.raises(Refused) as caught:
        plan_of(planner, launch)
    assert caught.value.failure.status is Status.INVALID_HANDLE


def test_refusals_are_not_remembered_as_plans() -> None:
    planner, _, launch = planner_for(kernel_of((0, 8)))
    for _ in range(3):
        with pytest.raises(Refused):
            plan_of(planner, replace(launch, kernel="no_such"))
    assert not planner._plans


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"kernel": "other"}, "no kernel 'other'"),
        ({"args": bytes(7)}, "the arguments must have 8 bytes, the sum of their sizes, not 7"),
        ({"args": bytes(9)}, "must have 8 bytes, the sum of their sizes, not 9"),
        ({"arg_sizes": (4, 4)}, r"takes arguments of \[8\] bytes, not \[4, 4\]"),
        ({"arg_sizes": ()}, r"takes arguments of \[8\] bytes, not \[\]"),
        ({"grid_x": 0}, "at least 1 in every dimension"),
        ({"grid_z": 0}, "at least 1 in every dimension"),
        ({"block_y": 0}, "at least 1 in every dimension"),
        ({"block_x": 1025}, "a block of 1025 threads was requested; at most 1024 fit"),
        ({"block_x": 2**31, "block_y": 2**31, "block_z": 4}, "threads was requested"),
    ],
)
def test_impossible_launches_are_refused(wrong: dict[str, object], said: str) -> None:
    planner, _, launch = planner_for(kernel_of((0, 8)))
    with pytest.raises(Refused, match=said) as caught:
        plan_of(planner, replace(launch, **wrong))  # type: ignore[arg-type]
    assert caught.value.failure.status is Status.LAUNCH_FAILED


def test_the_kernels_own_limit_of_threads() -> None:
    kernel = kernel_of((0, 8))
    kernel.max_threads_per_block = 64
    planner, _, launch = planner_for(kernel)
    plan_of(planner, replace(launch, block_x=64))
    with pytest.raises(Refused, match="a block of 65 threads was requested; at most 64"):
        plan_of(planner, replace(launch, block_x=65))


@pytest.mark.exhaustive
@pytest.mark.parametrize("cut", range(1, 60))
def test_payloads_cut_short(cut: int) -> None:
    planner, _, launch = planner_for(kernel_of((0, 8)))
    payload = build_body(launch)
    with pytest.raises((BodyError, Refused)):
        planner.plan(memoryview(payload[:-cut]))
