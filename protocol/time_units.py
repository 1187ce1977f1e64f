"""Integers that convert one unit of time into another."""

from typing import Final

NS_PER_US: Final = 1_000

NS_PER_MS: Final = 1_000_000

NS_PER_S: Final = 1_000_000_000

NS_PER_MINUTE: Final = 60 * NS_PER_S

US_PER_MS: Final = 1_000

US_PER_S: Final = 1_000_000

MS_PER_S: Final = 1_000
