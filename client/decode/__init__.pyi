"""This package as type checkers see it: the names that `__init__.py` imports when one of them is first accessed."""

from gpulease.client.decode.supervisor.public import *  # noqa: F403

__all__: list[str]
