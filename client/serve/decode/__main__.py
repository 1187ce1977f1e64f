"""`python -m gpulease.client.serve.decode PROMPT`: the command `gpulease decode`, where no scripts are installed."""

import sys

from gpulease.client.cli.start import run

if __name__ == "__main__":
    sys.argv.insert(1, "decode")
    run()
