"""`python -m tests.fuzz TARGET [FOLDER...] [-OPTION=...]`: a campaign of one target under atheris, which is libFuzzer.

Inputs found in addition to the seeds are kept in the first folder, by default build/fuzz/TARGET, where the next
campaign continues. Options are libFuzzer's: -max_total_time=60, -runs=100000, -seed=1. To try one input again, name its
file instead of folders.
"""

import importlib
import os
import sys
import tempfile
from hashlib import sha256
from pathlib import Path

from . import TARGETS

INSTRUMENTED = ["gpulease"]


def main() -> None:
    names, options = (
        [word for word in sys.argv[1:] if word[0] != "-"],
        [word for word in sys.argv[1:] if word[0] == "-"],
    )
    if not names or names[0] not in TARGETS:
        sys.exit(f"{__doc__}\nTargets: {', '.join(TARGETS)}")
    name, *places = names
    # Code that is compiled here is not used again, so do not store it.
    os.environ["GPULEASE_CPU_CACHE"] = ""
    import atheris

    with atheris.instrument_imports(include=INSTRUMENTED):
        target = importlib.import_module(f".{name}", __package__)
    if not places:
        folder = Path("build", "fuzz", name)
        folder.mkdir(parents=True, exist_ok=True)
        places = [str(folder)]
    if not any(Path(place).is_file() for place in places):
        seeds = Path(tempfile.mkdtemp(prefix="gpulease-seeds-"))
        for seed in target.seeds():
            (seeds / sha256(seed).hexdigest()[:16]).write_bytes(seed)
        places.append(str(seeds))
    arguments = [sys.argv[0], f"-max_len={target.MAX_BYTES}", "-timeout=60", *options, *places]
    mutate = getattr(target, "mutate", None)
    atheris.Setup(arguments, target.check, **({"custom_mutator": mutate} if mutate else {}))
    atheris.Fuzz()


if __name__ == "__main__":
    main()
