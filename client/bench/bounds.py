"""Bounds of the figures that users are promised, and whether a run keeps them. Pure: `check` measures.

The file bounds.toml has a table for each promise. For each driver, it names the figure in a run's report that counts,
and its bound:

- `figure`: its path in the report, keys joined by dots. The first key is the part of the run that measures it.
- `of` and `beside`: a divisor's path, and its short name. The bound then applies to `figure / of`, which does not
  depend on how fast the host or card is. PART.host.NAME is a floor of `host_floors`, measured with that part.
- `at_most` or `at_least`: the bound.
- `goal`: a better value that is not reached yet.
- `needs`: a property that a host may lack. On such a host the row is left out; any other missing figure is a missed
  bound.
"""

import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.resources import files
from typing import Any, Final

DRIVERS: Final = ("cuda", "cpu")

FALL: Final = 1.25
"""A value that is worse than an earlier one by this factor is reported as a regression. Values of two runs on the same
kind of card differ by a few tenths."""

AGAIN: Final = "again"
"""Key of the report's parts that were measured a second time, because they missed a bound."""

HOST: Final = "host"
"""Key of the host's floors in a part."""

_UNITS_S: Final = {"us": 1e-6, "ms": 1e-3}
_KEYS: Final = frozenset({"figure", "of", "beside", "at_most", "at_least", "goal", "needs"})


@dataclass(frozen=True, slots=True)
class Bound:
    """One promise on one driver.

    Attributes:
        name: The name of its table.
        text: The title of its row.
        unit: The unit of the value; "x" for a ratio.
        figure_unit: The unit of the figure.
        figure: Path of the figure in the report.
        of: Path of the divisor in the report; "" if the value is the figure itself.
        beside: Short name of `of`.
        limit: The bound.
        is_least: True if the value must be at least the bound, such as a rate; False if at most.
        goal: A better bound that is not reached yet; None if there is none.
        needs: What the host may lack; "" for nothing.
    """

    name: str
    text: str
    unit: str
    figure_unit: str
    figure: str
    of: str
    beside: str
    limit: float
    is_least: bool
    goal: float | None
    needs: str

    @property
    def part(self) -> str:
        """The part of a run that measures this figure."""
        return self.figure.partition(".")[0]

    @property
    def floor(self) -> str:
        """The host's floor by which the figure is divided; "" if it is divided by another figure or by none."""
        _, key, name = (*self.of.split(".", 2), "", "", "")[:3]
        return name if key == HOST else ""

    @property
    def aim(self) -> float:
        """The value to aim for: the goal if there is one, else the bound itself."""
        return self.limit if self.goal is None else self.goal

    @property
    def aim_text(self) -> str:
        """The aim as a cell of a table, with its direction and divisor: "<= 0.5 of C"."""
        return f"{'>=' if self.is_least else '<='} {self.aim:g}{f' of {self.beside}' if self.of else ''}"

    def value(self, figure: float | None, divisor: float | None) -> float | None:
        """The bounded value: the figure, or its ratio to the divisor; None if one of them is missing."""
        if figure is None or not self.of:
            return figure
        return figure * _unit_s(self.figure) / (divisor * _unit_s(self.of)) if divisor else None

    def holds(self, value: float, limit: float) -> bool:
        """True if a value keeps a limit in this bound's direction."""
        return value >= limit if self.is_least else value <= limit


def _unit_s(path: str) -> float:
    """Return a figure's unit in seconds, from the end of its path; 1 if that names no unit of time."""
    return _UNITS_S.get(path.replace(".", "_").rpartition("_")[2], 1.0)


@dataclass(frozen=True, slots=True)
class BoundOutcome:
    """A bound, and the value that was measured for it, if any.

    Attributes:
        bound: The bound.
        figure: What was measured; None if it is missing.
        divisor: The measured divisor; None if it is missing, or if the bound is not a ratio.
        value: The bounded value: of two measurements, the better one.
        is_kept: False if the value is beyond the bound, or missing although the host lacks nothing; None if left out.
        first_value: The value that missed the bound at first, if the part was measured again.
    """

    bound: Bound
    figure: float | None
    divisor: float | None
    value: float | None
    is_kept: bool | None
    first_value: float | None = None

    @property
    def has_reached_goal(self) -> bool | None:
        """Whether the value reaches the goal; None without a goal or a value."""
        goal = self.bound.goal
        return None if goal is None or self.value is None else self.bound.holds(self.value, goal)


def load_bounds(driver: str) -> list[Bound]:
    """The bounds of a driver, in the file's order."""
    return parse_bounds(files("gpulease.client.bench").joinpath("bounds.toml").read_text(encoding="utf-8"), driver)


def parse_bounds(text: str, driver: str) -> list[Bound]:
    """A driver's bounds from a file's text. Raises ValueError, naming the table, for an invalid one."""
    return [
        _bound(name, promise, promise[driver]) for name, promise in tomllib.loads(text).items() if driver in promise
    ]


def _bound(name: str, promise: Mapping[str, Any], row: Mapping[str, Any]) -> Bound:
    # Step 1: the file's form: known keys, and exactly one limit.
    if unknown := set(row) - _KEYS or set(promise) - {"text", "unit", *DRIVERS}:
        raise ValueError(f"{name}: {', '.join(sorted(unknown))} must be one of {', '.join(sorted(_KEYS))}")
    limits = [key for key in ("at_most", "at_least") if key in row]
    if len(limits) != 1:
        raise ValueError(f"{name}: it must have either at_most or at_least")
    is_least, limit, goal = limits == ["at_least"], float(row[limits[0]]), row.get("goal")
    # Step 2: make the bound. A ratio has the unit "x".
    unit = "x" if "of" in row else str(promise["unit"])
    bound = Bound(
        name,
        str(promise["text"]),
        unit,
        str(promise["unit"]),
        str(row["figure"]),
        str(row.get("of", "")),
        str(row["beside"]) if "of" in row else "",
        limit,
        is_least,
        None if goal is None else float(goal),
        str(row.get("needs", "")),
    )
    # Step 3: the goal must be stricter than the bound, or it would already be promised.
    if bound.goal is not None and not bound.holds(bound.goal, limit):
        raise ValueError(f"{name}: its goal of {bound.goal:g} must be better than its bound of {limit:g}")
    return bound


def flat(report: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, float]]:
    """Yield the path and the value of each number in a nested report."""
    for key, value in report.items():
        # Nested tables become one path, such as "decode.step.8.ms".
        if isinstance(value, Mapping):
            yield from flat(value, f"{prefix}{key}.")
        elif isinstance(value, int | float) and not isinstance(value, bool):
            yield f"{prefix}{key}", float(value)


def floors_of(part: str, bounds: Sequence[Bound]) -> set[str]:
    """Return the names of the host's floors by which a part's bounds divide."""
    return {bound.floor for bound in bounds if bound.part == part and bound.floor}


def outcomes(bounds: Sequence[Bound], report: Mapping[str, Any]) -> list[BoundOutcome]:
    """The outcome of each bound in a report, in the bounds' order.

    If a missed bound's part was measured again, the better value counts.
    """
    figures = dict(flat({name: part for name, part in report.items() if name != AGAIN}))
    again: Mapping[str, Any] = report.get(AGAIN, {})
    # If a ratio's divisor belongs to another part, use that part's figures even if it was measured only once.
    later = figures | dict(flat(again))
    results = []
    for bound in bounds:
        outcome = _outcome(bound, figures)
        if outcome.is_kept is False and outcome.value is not None and bound.part in again:
            outcome = _better(outcome, _outcome(bound, later))
        results.append(outcome)
    return results


def keeps_bounds(driver: str, report: Mapping[str, Any]) -> bool:
    """True if a part of a run, such as its regions, keeps each bound for which it has figures."""
    return all(outcome.is_kept for outcome in outcomes(load_bounds(driver), report) if outcome.value is not None)


def _outcome(bound: Bound, figures: Mapping[str, float]) -> BoundOutcome:
    figure, divisor = figures.get(bound.figure), figures.get(bound.of)
    value = bound.value(figure, divisor)
    # Leave out a figure that the host can't have. Any other figure that is missing counts as a missed bound.
    if value is None:
        return BoundOutcome(bound, figure, divisor, None, None if bound.needs else False)
    return BoundOutcome(bound, figure, divisor, value, bound.holds(value, bound.limit))


def _better(first: BoundOutcome, second: BoundOutcome) -> BoundOutcome:
    if first.value is None or second.value is None:
        return first
    is_better = second.bound.holds(second.value, first.value)
    return replace(second if is_better else first, first_value=first.value)


def has_fallen(bound: Bound, value: float, earlier: float) -> bool:
    """True if a value is worse than an earlier one by FALL or more."""
    return value * FALL <= earlier if bound.is_least else value >= earlier * FALL
