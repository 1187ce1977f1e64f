"""A terminal for programs that need one: a pty, simulated typing, and the resulting screen."""

import codecs
import fcntl
import os
import pty
import re
import select
import signal
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Sequence
from contextlib import suppress
from types import TracebackType
from typing import Any, Final, Self

from helpers.waiting import PATIENCE_S, wait_until

# A shell runs the program as a job, as it does for a user, so that the program can be stopped while the terminal
# continues.
_LOGIN: Final = "import os, sys; os.login_tty(0); os.execvp(sys.argv[1], sys.argv[1:])"
_SHELL: Final = 'set -m; "$@"; s=$?; while [ $s = 148 ]; do echo STOPPED; read -r _; fg >/dev/null; s=$?; done; exit $s'

_SEQUENCE: Final = re.compile(r"\x1b\[([?>]?)([0-9;]*)([A-Za-z@`])|\x1b[()].|\x1b\][^\x07]*\x07|\x1b[^\[\]()]|[^\x1b]")


class Screen:
    """The contents of a terminal that executes the control sequences that curses uses."""

    def __init__(self, width: int, height: int) -> None:
        self.strange: set[str] = set()
        self.resize(width, height)

    def resize(self, width: int, height: int) -> None:
        self.width, self.height = width, height
        self._rows = [[" "] * width for _ in range(height)]
        self._x = self._y = 0
        self._top, self._end = 0, height
        self._last = " "

    def lines(self) -> list[str]:
        return ["".join(row).rstrip() for row in self._rows]

    def feed(self, text: str) -> str:
        """Show the text. Returns an incomplete control sequence at its end."""
        at = 0
        while at < len(text):
            found = _SEQUENCE.match(text, at)
            if found is None:
                return text[at:]
            at = found.end()
            if found[3]:
                self._control(found[1], [int(part or 0) for part in found[2].split(";")], found[3])
            elif found[0] == "\x1bM":
                self._up()
            elif found[0][0] == "\x1b":
                if found[0][1] not in "()]=>78":
                    self.strange.add(found[0])
            else:
                self._put(found[0])
        return ""

    def _put(self, mark: str) -> None:
        if mark == "\r":
            self._x = 0
        elif mark == "\n":
            self._down()
        elif mark == "\b":
            self._x = max(0, self._x - 1)
        elif mark >= " ":
            self._x = min(self._x, self.width - 1)
            self._rows[self._y][self._x] = self._last = mark
            self._x += 1

    def _down(self) -> None:
        if self._y == self._end - 1:
            self._rows[self._top : self._end] = [*self._rows[self._top + 1 : self._end], [" "] * self.width]
        else:
            self._y = min(self._y + 1, self.height - 1)

    def _up(self) -> None:
        if self._y == self._top:
            self._rows[self._top : self._end] = [[" "] * self.width, *self._rows[self._top : self._end - 1]]
        else:
            self._y = max(0, self._y - 1)

    def _control(self, private: str, numbers: list[int], kind: str) -> None:
        first = numbers[0] or 1
        row = self._rows[self._y]
        match kind:
            case "H":
                column = numbers[1] if len(numbers) > 1 else 1
                self._y, self._x = min(first, self.height) - 1, min(column or 1, self.width) - 1
            case "d":
                self._y = min(first, self.height) - 1
            case "G":
                self._x = min(first, self.width) - 1
            case "A":
                self._y = max(0, self._y - first)
            case "B":
                self._y = min(self.height - 1, self._y + first)
            case "C":
                self._x = min(self.width - 1, self._x + first)
            case "D":
                self._x = max(0, self._x - first)
            case "K":
                begin, end = {0: (self._x, self.width), 1: (0, self._x + 1)}.get(numbers[0], (0, self.width))
                row[begin:end] = " " * (end - begin)
            case "J":
                self._rows[self._y + 1 :] = [[" "] * self.width for _ in range(self.height - self._y - 1)]
                row[self._x :] = " " * (self.width - self._x)
            case "X":
                row[self._x : self._x + first] = " " * min(first, self.width - self._x)
            case "P":
                row[self._x :] = [*row[self._x + first :], *" " * first][: self.width - self._x]
            case "@":
                row[self._x :] = [*" " * first, *row[self._x :]][: self.width - self._x]
            case "b":
                for _ in range(first):
                    self._put(self._last)
            case "r":
                last = numbers[1] if len(numbers) > 1 else 0
                self._top, self._end = first - 1, min(last or self.height, self.height)
                self._x = self._y = 0
            case "m" | "h" | "l" | "t":
                pass
            case _:
                self.strange.add(private + kind)


class Terminal:
    def __init__(self, words: Sequence[str], environment: dict[str, str], size: tuple[int, int] = (100, 30)) -> None:
        self.screen = Screen(*size)
        self._rest = ""
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._fd, self._other = pty.openpty()
        self.resize(*size)
        self.settings = self.settings_now()
        self.process = subprocess.Popen(
            [sys.executable, "-P", "-c", _LOGIN, "bash", "-c", _SHELL, "bash", *words],
            stdin=self._other,
            stdout=self._other,
            stderr=self._other,
            env={"TERM": "xterm-256color"} | environment,
        )

    def resize(self, width: int, height: int) -> None:
        self.screen.resize(width, height)
        fcntl.ioctl(self._other, termios.TIOCSWINSZ, struct.pack("HHHH", height, width, 0, 0))

    def settings_now(self) -> list[Any]:
        return termios.tcgetattr(self._other)

    def press(self, keys: str) -> None:
        os.write(self._fd, keys.encode())

    def signal_job(self, number: signal.Signals) -> None:
        """Send a signal to the program itself, which is the terminal's foreground job."""
        os.killpg(self.job(), number)

    def job(self) -> int:
        """Return the id of the terminal's foreground process group, which is the process id of the group's leader."""
        return os.tcgetpgrp(self._fd)

    def hang_up(self) -> None:
        """Close the terminal, as when a connection breaks."""
        for fd in (self._fd, self._other):
            os.close(fd)
        self._fd = self._other = -1

    def text(self) -> str:
        while select.select([self._fd], [], [], 0)[0]:
            with suppress(OSError):
                data = os.read(self._fd, 65536)
                self._rest = self.screen.feed(self._rest + self._decoder.decode(data))
        return "\n".join(self.screen.lines())

    def wait_for(self, *wanted: str, without: str = "", within_s: float = PATIENCE_S) -> str:
        wait_until(
            lambda: all(part in self.text() for part in wanted) and not (without and without in self.text()),
            f"{wanted} on the screen, without {without!r}",
            within_s,
            seen=lambda: "\n" + self.text(),
        )
        return self.text()

    def wait_for_exit(self) -> int:
        """Wait until the last output is on the screen, and return the exit status as a shell reports it."""
        until = time.monotonic() + PATIENCE_S
        while self.process.poll() is None:
            self.text()
            assert time.monotonic() < until, f"it does not end:\n{self.text()}"
            time.sleep(0.005)
        self.text()
        return self.process.returncode

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        if self.process.poll() is None:
            with suppress(OSError, ValueError):
                self.signal_job(signal.SIGKILL)
            self.process.kill()
        self.process.wait()
        if self._fd >= 0:
            self.hang_up()
