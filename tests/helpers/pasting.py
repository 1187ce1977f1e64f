"""A Python prompt that blocks of code are pasted into; a process of its own: `python -m helpers.pasting`.

It reads a block a line, as a JSON string, and answers each by a JSON object: `printed`, and `error`, a traceback or "".
"""

import code
import contextlib
import io
import json
import sys
import traceback
from typing import Any


class Prompt(code.InteractiveConsole):
    """Takes lines as the interactive interpreter does: a blank line ends what is indented."""

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
    # The prompt shows values of expressions; a test reads what is printed.
    sys.displayhook = lambda value: None
    prompt = Prompt()
    for line in sys.stdin:
        print(json.dumps(prompt.paste(json.loads(line))), flush=True)


if __name__ == "__main__":
    main()
