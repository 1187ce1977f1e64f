"""Reads a model's tokenizer, and the tokens of prefixes, in a separate process.

    python -m gpulease.client.decode.supervisor.model_texts OUTCOME

Reading a large vocabulary takes seconds, during which no other Python code of the process runs, even if a thread reads
it. In the process of the step loop, this would stop every tenant's tokens. The process receives the model's path and
the prefixes at its standard input, and writes to the descriptor with the number OUTCOME a table of tokens, which a
process can use at once, or the mistake in the model's files. Both are msgpack.
"""

import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict, astuple, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

if __name__ == "__main__":
    from gpulease.imports import begin_imports

    begin_imports()

from gpulease.client.decode.blocked_sighup import sighup_blocked
from gpulease.client.decode.checkpoint import open_model
from gpulease.client.decode.decode_errors import ModelRejected, TextProcessesFailed
from gpulease.client.decode.decode_requests import SharedPrefix
from gpulease.client.decode.text.fork_server import ENVIRONMENT, START_LIMIT_S
from gpulease.client.decode.text.named_prefixes import NamedPrefix, shared_prefixes
from gpulease.client.decode.text.text_jobs import packed, unpacked
from gpulease.imports import end_imports

if TYPE_CHECKING:
    # Needs the extra `decode`.
    from gpulease.client.decode.text.tokenizer import Tokenizer

MODULE: Final = "gpulease.client.decode.supervisor.model_texts"


@dataclass(frozen=True, slots=True)
class ModelTexts:
    """What was read.

    Attributes:
        tokenizer: The model's tokenizer, made of its table.
        prefixes: The prefixes with their tokens.
    """

    tokenizer: "Tokenizer"
    prefixes: tuple[SharedPrefix, ...]


def read_model_texts(path: Path, prefixes: Sequence[NamedPrefix] = (), positions: int = 0) -> ModelTexts:
    """Read a model's texts in a separate process, and wait for the process. Call this in a thread.

    Args:
        path: The model's files.
        prefixes: Prefixes to tokenize.
        positions: Positions of a sequence, which a prefix must fit into.

    Raises ModelRejected for a model without a tokenizer, or with one that is broken or of an unsupported kind, and for
    a prefix as `shared_prefixes` does; TextProcessesFailed if the process fails, or does not end in time.
    """
    from gpulease.client.decode.text.tokenizer import Tokenizer, TokenTable

    outcome_fd = os.memfd_create("texts", os.MFD_CLOEXEC)
    try:
        try:
            with sighup_blocked():
                process = subprocess.Popen(
                    # -P: the current folder must not provide modules of the program.
                    [sys.executable, "-P", "-m", MODULE, str(outcome_fd)],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.DEVNULL,
                    pass_fds=(outcome_fd,),
                    env=os.environ | ENVIRONMENT,
                )
            with process:
                try:
                    process.communicate(
                        packed([str(path), [astuple(prefix) for prefix in prefixes], positions]), START_LIMIT_S
                    )
                except BaseException:
                    process.kill()
                    raise
        except (OSError, subprocess.TimeoutExpired) as error:
            raise TextProcessesFailed(f"{path}: no process could read the tokenizer: {error}") from None
        if process.returncode:
            raise TextProcessesFailed(
                f"{path}: the process that read the tokenizer ended with status {process.returncode}"
            )
        outcome = unpacked(os.pread(outcome_fd, os.fstat(outcome_fd).st_size, 0))
    finally:
        os.close(outcome_fd)
    if "rejected" in outcome:
        raise ModelRejected(outcome["rejected"], outcome["hint"])
    fields = outcome["table"]
    table = TokenTable(**fields | {"added": [(token, name, special) for token, name, special in fields["added"]]})
    shared = tuple(SharedPrefix(name, tuple(tokens)) for name, tokens in outcome["prefixes"])
    return ModelTexts(Tokenizer.of_values(outcome["values"], table), shared)


def _read(path: str, prefixes: list[list[Any]], positions: int) -> dict[str, Any]:
    try:
        checkpoint = open_model(path)
        tokenizer = checkpoint.tokenizer()
        named = [NamedPrefix(name, text, system, tuple(tokens)) for name, text, system, tokens in prefixes]
        shared = shared_prefixes(named, tokenizer, positions) if named else ()
    except ModelRejected as error:
        return {"rejected": error.message, "hint": error.hint}
    return {
        "table": asdict(tokenizer.table()),
        # The table has the text.
        "values": [b"", *tokenizer.values()[1:]],
        "prefixes": [(prefix.name, prefix.token_ids) for prefix in shared],
    }


def main(outcome_fd: int) -> None:
    # A SIGHUP to the whole group means that the server must read its settings again.
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    with open(outcome_fd, "wb") as file:
        file.write(packed(_read(*unpacked(sys.stdin.buffer.read()))))


if __name__ == "__main__":
    end_imports()
    main(int(sys.argv[1]))
