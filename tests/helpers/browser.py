"""A headless Chromium, controlled over HTTP (W3C WebDriver, with chromedriver)."""

import base64
import shutil
import signal
import socket
import subprocess
import tempfile
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self

import httpx

from helpers.processes import descendants, is_running
from helpers.waiting import PATIENCE_S, wait_until

START_LIMIT_S: Final = 120.0

ARGUMENTS: Final = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--disable-dev-shm-usage",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--disable-extensions",
    "--force-color-profile=srgb",
)


def lacks_browser() -> str:
    """Return why no browser can run here; "" if one can."""
    missing = [name for name in ("chromium", "chromedriver") if shutil.which(name) is None]
    return f"{' and '.join(missing)} not installed" if missing else ""


class Browser:
    """One browser with one page. When it is closed, all its processes must have ended."""

    def __init__(self, width: int = 1280, height: int = 900) -> None:
        self._folder = tempfile.mkdtemp(prefix="gpul-web-", dir="/tmp")
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        self._process = subprocess.Popen(
            ["chromedriver", f"--port={port}", "--log-level=OFF"],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        # Use one HTTP client for all commands. It loads no certificates, because that takes longer than a command.
        self._http = httpx.Client(timeout=START_LIMIT_S, trust_env=False, verify=False)
        self._root = f"http://127.0.0.1:{port}"
        try:
            wait_until(self._is_ready, "chromedriver listens", START_LIMIT_S)
            arguments = [*ARGUMENTS, f"--window-size={width},{height}", f"--user-data-dir={self._folder}"]
            options = {"binary": shutil.which("chromium"), "args": arguments}
            wanted = {"browserName": "chrome", "goog:chromeOptions": options, "goog:loggingPrefs": {"browser": "ALL"}}
            found = self._ask("POST", "/session", {"capabilities": {"alwaysMatch": wanted}})
        except BaseException:
            self._end()
            raise
        self._root += f"/session/{found['sessionId']}"

    @property
    def pid(self) -> int:
        """The process id of chromedriver, which is the ancestor of the browser's processes."""
        return self._process.pid

    # --- the page ---

    def open(self, url: str) -> None:
        """Open a URL, and wait until the page is loaded."""
        self._ask("POST", "/url", {"url": url})

    def run(self, script: str, *arguments: Any) -> Any:
        """Run a script in the page. Returns the value of its `return` statement."""
        return self._ask("POST", "/execute/sync", {"script": script, "args": list(arguments)})

    def text(self, selector: str) -> str:
        found = self.run("return document.querySelector(arguments[0])?.innerText ?? ''", selector)
        return str(found)

    def texts(self, selector: str) -> list[str]:
        """Return the visible texts of all matching elements."""
        script = "return [...document.querySelectorAll(arguments[0])].map(one => one.innerText)"
        return [str(text) for text in self.run(script, selector)]

    def wait_for(self, selector: str, text: str, within_s: float = PATIENCE_S) -> None:
        """Wait until the visible text of the element contains `text`."""
        what = f"{text!r} in {selector}"
        wait_until(lambda: text in self.text(selector), what, within_s, seen=lambda: self.text("body"))

    def press(self, keys: str) -> None:
        """Press keys in the element that has the focus."""
        pressed = [
            step for key in keys for step in ({"type": "keyDown", "value": key}, {"type": "keyUp", "value": key})
        ]
        self._ask("POST", "/actions", {"actions": [{"type": "key", "id": "keyboard", "actions": pressed}]})

    def complaints(self) -> list[str]:
        """Return errors and warnings in the browser's console since the last call, including violations of a policy."""
        found = self._ask("POST", "/se/log", {"type": "browser"})
        return [entry["message"] for entry in found if entry["level"] in ("SEVERE", "WARNING")]

    def devtools(self, command: str, **parameters: Any) -> Any:
        return self._ask("POST", "/goog/cdp/execute", {"cmd": command, "params": parameters})

    def screenshot(self, path: Path) -> None:
        path.write_bytes(base64.b64decode(self._ask("GET", "/screenshot", None)))

    # --- its end ---

    def close(self) -> None:
        """Close the browser. Fails if one of its processes does not end."""
        pids = [info.pid for info in descendants(self._process.pid)]
        try:
            self._ask("DELETE", "", None)
            wait_until(lambda: not [pid for pid in pids if is_running(pid)], "the browser is gone")
        finally:
            self._end()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        self.close()

    def _end(self) -> None:
        self._http.close()
        self._process.send_signal(signal.SIGTERM)
        self._process.wait()
        shutil.rmtree(self._folder, ignore_errors=True)

    def _is_ready(self) -> bool:
        try:
            return bool(self._ask("GET", "/status", None)["ready"])
        except httpx.TransportError:
            return False

    def _ask(self, method: str, path: str, body: Any) -> Any:
        answer = self._http.request(method, self._root + path, json=body)
        value = answer.json()["value"]
        assert answer.status_code == 200, value
        return value
