"""What type checkers see of this package: the names that `__init__.py` imports when one of them is first asked for."""

from gpulease.client.sync.public import *  # noqa: F403

__all__: list[str]
