"""Numbers on a command line."""

import math
from typing import Any

import click


class NumberRange(click.FloatRange):
    """Like FloatRange, but refuses infinity and nan, which FloatRange accepts whatever its bounds are."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        number = float(super().convert(value, param, ctx))
        if not math.isfinite(number):
            self.fail(f"{value} is not a finite number.", param, ctx)
        return number
