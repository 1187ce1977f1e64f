"""`python -m helpers.pasting`: an interactive Python prompt, to which a test pastes blocks of code.

It reads blocks from stdin, one line for each, as a JSON string. It replies to each with a JSON object with two members:
`printed`, the output, and `error`, a traceback or "".
"""

import code
import contextlib
import io
import json
import sys
import traceback
from typing import Any


class Prompt(code.InteractiveConsole):
    """Takes lines like the interactive interpreter: a blank line ends an indented block."""

    def __init__(self) -> None:
        super().__init__({"__name__": "__main__"})
        self.error = ""

    def paste(self, block: str) -> dict[str, str]:
        self.error = ""
        with contextlib.redirect_stdout(io.StringIO()) as printed:
            for line in [*block.splitlines(), ""]:
                is_open = self.push(line)
                if self.error:
                    self.resetbuffer()
                    break
            else:
                if is_open:
                    self.error = "the block ends within a statement"
        return {"printed": printed.getvalue(), "error": self.error}

    def showtraceback(self) -> None:
        self.error = traceback.format_exc()

    def showsyntaxerror(self, filename: str | None = None, **_: Any) -> None:
        self.error = traceback.format_exc()


def main() -> None:
    # Tests read only printed output, not the values of expressions, which the prompt would show.
    sys.displayhook = lambda value: None
    prompt = Prompt()
    for line in sys.stdin:
        print(json.dumps(prompt.paste(json.loads(line))), flush=True)


if __name__ == "__main__":
    main()
