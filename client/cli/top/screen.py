"""The live view on a terminal, with curses: reads keys, draws lines, and restores the terminal however it ends."""

import codecs
import contextlib
import curses
import locale
import os
import select
import signal
import sys
import termios
import time
from collections.abc import Iterator
from dataclasses import replace
from types import FrameType
from typing import Final

from gpulease.client.cli.top.frame import Line, Style, frame
from gpulease.client.cli.top.sampling import Poller
from gpulease.client.cli.top.view import Quit, Refresh, Revoke, View, press
from gpulease.client.console.tables import fit, width_of
from gpulease.client.errors import InvalidRequest, Unsupported
from gpulease.protocol.address import Address

TICK_S: Final = 1.0
"""Seconds between two drawings if nothing happens: remaining times must count down."""

ESCAPE_MS: Final = 25
"""Milliseconds to wait after Esc, which may begin another key's code."""

MAX_KEYS: Final = 256
"""Maximum number of keys processed between two drawings. Stops pasted text from keeping the screen from being drawn."""

_ENDING: Final = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
_TAKEN: Final = (*_ENDING, signal.SIGTSTP, signal.SIGCONT, signal.SIGWINCH)

_KEYS: Final[dict[int | str, str]] = {
    curses.KEY_UP: "up",
    curses.KEY_DOWN: "down",
    curses.KEY_PPAGE: "pageup",
    curses.KEY_NPAGE: "pagedown",
    curses.KEY_HOME: "home",
    curses.KEY_END: "end",
    curses.KEY_LEFT: "<",
    curses.KEY_RIGHT: ">",
    curses.KEY_BACKSPACE: "backspace",
    curses.KEY_ENTER: "enter",
    "\n": "enter",
    "\r": "enter",
    "\x1b": "esc",
    "\x7f": "backspace",
    "\b": "backspace",
}


def watch(address: Address, every_s: float) -> signal.Signals | None:
    """Show the view until the user leaves; returns the signal that ended it, if any.

    Raises:
        Unsupported: The terminal can't move its cursor.
        InvalidRequest: The input is not a terminal.
    """
    if not sys.stdin.isatty():
        raise InvalidRequest("top reads keys, so its input must be a terminal", "Use --once or --json")
    with contextlib.suppress(locale.Error):
        locale.setlocale(locale.LC_ALL, "")
    try:
        # Check the terminal before curses takes it over: afterwards its errors end the program.
        curses.setupterm()
        if not curses.tigetstr("cup"):
            raise curses.error("its cursor can't be moved")
    except curses.error as error:
        kind = os.environ.get("TERM", "")
        raise Unsupported(
            f"terminal type {kind!r}: {error}", "Set TERM to the terminal's type, or use --once"
        ) from None
    with _Signals() as signals, _screen() as window:
        poller = Poller(address, every_s, signals.wake)
        poller.start()
        try:
            return _Screen(window, signals, poller, address).run(View(every_s))
        finally:
            poller.stop()


class _Signals:
    """Signals, and wake-ups by other threads, as a descriptor for select().

    Handlers are installed before curses starts, which then leaves them alone.
    """

    def __init__(self) -> None:
        self.pending: list[signal.Signals] = []
        self._before: dict[signal.Signals, object] = {}

    def __enter__(self) -> "_Signals":
        # A pipe makes a signal or another thread's call look like input to select().
        self.reader, self._writer = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        for number in _TAKEN:
            # The parent may have set some signals to be ignored, as nohup does.
            if signal.getsignal(number) is not signal.SIG_IGN:
                self._before[number] = signal.signal(number, self._take)
        return self

    def __exit__(self, *_: object) -> None:
        # Restore the program's own handlers.
        for number, handler in self._before.items():
            signal.signal(number, handler)  # type: ignore[arg-type]  # the result of signal.signal
        os.close(self.reader)
        writer, self._writer = self._writer, -1
        os.close(writer)

    def wake(self) -> None:
        """End the wait; callable from any thread. Does nothing after the block's end."""
        with contextlib.suppress(OSError):
            os.write(self._writer, b"\0")

    def wait(self, timeout_s: float) -> bool:
        """Wait for a key, a signal, a wake-up or the timeout; True if there is input."""
        ready, _, _ = select.select([sys.stdin, self.reader], [], [], timeout_s)
        # Empty the pipe: several wake-ups count as one.
        with contextlib.suppress(BlockingIOError):
            while os.read(self.reader, 4096):
                pass
        return sys.stdin in ready

    def stop_here(self) -> None:
        """Stop as ^Z stops any program; returns when the process is continued."""
        # The default action stops the process. Once it continues, install the handler again.
        signal.signal(signal.SIGTSTP, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGTSTP)
        signal.signal(signal.SIGTSTP, self._take)

    def _take(self, number: int, _: FrameType | None) -> None:
        self.pending.append(signal.Signals(number))
        self.wake()


@contextlib.contextmanager
def _screen() -> Iterator[curses.window]:
    window = curses.initscr()
    try:
        # Receive each key at once, without echo; don't block when reading; hide the cursor.
        curses.noecho()
        curses.cbreak()
        curses.set_escdelay(ESCAPE_MS)
        window.keypad(True)
        window.nodelay(True)
        with contextlib.suppress(curses.error):
            curses.curs_set(0)
        yield window
    finally:
        curses.endwin()


def _attributes() -> dict[Style, int]:
    """Return curses' attributes by style: without colours, or with NO_COLOR (no-color.org), only bold and reverse."""
    # Bold and reverse exist on every terminal; colours only add to them.
    looks = {
        Style.PLAIN: curses.A_NORMAL,
        Style.HEAD: curses.A_BOLD,
        Style.CHOSEN: curses.A_REVERSE,
        Style.GOOD: curses.A_NORMAL,
        Style.WARNING: curses.A_BOLD,
        Style.BAD: curses.A_BOLD | curses.A_REVERSE,
        Style.FAINT: curses.A_DIM,
    }
    with contextlib.suppress(curses.error):
        curses.start_color()
        if curses.has_colors() and not os.environ.get("NO_COLOR"):
            curses.use_default_colors()
            colours = {Style.GOOD: curses.COLOR_GREEN, Style.WARNING: curses.COLOR_YELLOW, Style.BAD: curses.COLOR_RED}
            for pair, (style, colour) in enumerate(colours.items(), 1):
                curses.init_pair(pair, colour, -1)
                looks[style] = curses.color_pair(pair) | (curses.A_BOLD if style == Style.BAD else 0)
    return looks


class _Screen:
    def __init__(self, window: curses.window, signals: _Signals, poller: Poller, address: Address) -> None:
        self._window = window
        self._signals = signals
        self._poller = poller
        self._address = address
        self._attributes = _attributes()
        self._decoder = codecs.getincrementaldecoder(window.encoding)("replace")

    def run(self, view: View) -> signal.Signals | None:
        """Run until the user leaves or a signal ends it; returns that signal."""
        self._resize()
        while True:
            # Handle signals first: a resize changes the frame that is drawn below.
            while self._signals.pending:
                number = self._signals.pending.pop(0)
                if number in _ENDING:
                    return number
                self._handle_signal(number)
            notice = self._poller.notice()
            # A notice stays until the next key.
            if notice:
                view = replace(view, notice=notice)
            # Draw in each round, because remaining times count down.
            self._draw(view)
            if not self._signals.wait(TICK_S):
                continue
            keys = self._keys()
            # If the input is ready but has no keys, the terminal may have been closed without a SIGHUP.
            if not keys and not _terminal_exists():
                return signal.SIGHUP
            # Each key changes the view; its effect goes to the poller.
            for key in keys:
                view, effect = press(view, key, self._poller.samples())
                self._poller.pace(view.every_s, is_paused=view.is_paused)
                match effect:
                    case Quit():
                        return None
                    case Refresh():
                        self._poller.refresh()
                    case Revoke(lease_id=lease_id, reason=reason):
                        self._poller.revoke(lease_id, reason)

    def _handle_signal(self, number: signal.Signals) -> None:
        if number == signal.SIGTSTP:
            # Save curses' mode and restore the shell's before stopping, as any full-screen program must.
            curses.def_prog_mode()
            curses.endwin()
            self._signals.stop_here()
        if number in (signal.SIGTSTP, signal.SIGCONT):
            # While the process was stopped, the shell may have changed the terminal's mode.
            curses.reset_prog_mode()
        self._resize()
        self._window.clear()

    def _resize(self) -> None:
        # Ask the terminal: curses uses LINES and COLUMNS, which are as old as the shell's export of them.
        with contextlib.suppress(OSError, curses.error):
            size = os.get_terminal_size(sys.stdout.fileno())
            curses.resizeterm(max(1, size.lines), max(1, size.columns))

    def _keys(self) -> list[str]:
        # Read bytes: for a byte outside the locale's encoding, get_wch returns the same as for the end of the input.
        keys: list[str] = []
        while len(keys) < MAX_KEYS and (code := self._window.getch()) != curses.ERR:
            if code > 0xFF:
                keys += [_KEYS[code]] if code in _KEYS else []
            else:
                keys += [_KEYS.get(character, character) for character in self._decoder.decode(bytes([code]))]
        return keys

    def _draw(self, view: View) -> None:
        height, width = self._window.getmaxyx()
        lines = frame(view, self._poller.samples(), str(self._address), time.monotonic(), width, height)
        # Erase and draw everything: curses sends only what differs.
        self._window.erase()
        for row, line in enumerate(lines):
            self._draw_line(row, line)
        self._window.refresh()

    def _draw_line(self, row: int, line: Line) -> None:
        # curses reports an error after writing the last cell of the screen.
        room = self._window.getmaxyx()[1]
        with contextlib.suppress(curses.error):
            self._window.move(row, 0)
            for text, style in line:
                # Characters that the locale can't encode become escapes, which are longer.
                coding = self._window.encoding
                piece = fit(text.encode(coding, "backslashreplace").decode(coding), room)
                room -= width_of(piece)
                self._window.addstr(piece, self._attributes[style])


def _terminal_exists() -> bool:
    """Return whether the terminal still exists.

    select always reports a closed terminal as ready, and a read returns nothing.
    """
    try:
        termios.tcgetattr(sys.stdin.fileno())
    except termios.error:
        return False
    return True
