"""Commands that a module of the daemon does: it takes this process's place, since neither side imports the other."""

import os
import sys
from collections.abc import Sequence
from importlib.util import find_spec
from typing import Final, NoReturn

from gpulease.client.cli.endings import CannotStart

_BEGIN: Final = "from gpulease.client.cli.start import run_module_instead; run_module_instead()"


def hand_on(module: str, words: Sequence[str]) -> NoReturn:
    """Run a module with these words instead of this program. Raises CannotStart if no daemon is installed."""
    # The daemon need not be installed where its client is.
    if find_spec(module.rpartition(".")[0]) is None:
        raise CannotStart("no daemon is installed beside this client: pip install '.[daemon]' in gpulease's repository")
    os.execv(sys.executable, [sys.executable, "-P", "-c", _BEGIN, module, *words])
