"""`python -m helpers.faulty_driver FLAG ARGUMENTS...`: `gpulease-dra` on a disk that hangs while file FLAG exists."""

import sys
from pathlib import Path

from gpulease.client.integrations.kubernetes.__main__ import run
from helpers.faulty_daemon import hang_syncs

if __name__ == "__main__":
    hang_syncs(Path(sys.argv.pop(1)), "fsync")
    run()
