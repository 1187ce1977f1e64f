"""Measures a model server: `python -m tests.lab.models`, on the running daemon or a private one.

Callers are separate processes, each with one request at a time. Their simultaneous requests form a batch.
"""

import http.client
import json
import os
import re
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Final

import click

from gpulease.client.bench.figures import percentile
from gpulease.client.console.private_daemon import private_daemon, running_address
from gpulease.client.serve.models.example.digits import DIGITS, load_tests, load_weights
from gpulease.client.serve.models.model_settings import EXAMPLE
from gpulease.client.serve.rpc import RpcClient
from gpulease.protocol.address import ADDRESS_VARIABLE

MODEL: Final = "digits"
TOLERANCE: Final = 1e-3
START_LIMIT_S: Final = 60.0
SETTLE_S: Final = 0.5

Figures = dict[str, dict[str, float]]


@contextmanager
def _server(address: str, config: Path) -> Iterator[tuple[int, str, int]]:
    """Run a model server in a separate process. Yields its process id, its socket for calls, and its port."""
    with tempfile.TemporaryDirectory(prefix="gpulease-", dir="/tmp") as folder:
        rpc, log_path = f"unix:{folder}/rpc", Path(folder) / "log"
        command = [sys.executable, "-P", "-m", "gpulease.client.cli.__main__", "serve", "models", str(config)]
        with log_path.open("wb") as log:
            process = subprocess.Popen(
                [*command, "--listen", "tcp:127.0.0.1:0", "--rpc", rpc],
                stdout=log,
                stderr=log,
                env=os.environ | {ADDRESS_VARIABLE: address, "PYTHONUNBUFFERED": "1"},
            )
        try:
            until = time.monotonic() + START_LIMIT_S
            while not ((said := log_path.read_text()) and f"{MODEL}: serves on lease" in said):
                if process.poll() is not None or time.monotonic() > until:
                    raise SystemExit(f"the server did not start:\n{said}")
                time.sleep(0.05)
            found = re.search(r"http://127\.0\.0\.1:(\d+)", said)
            assert found
            yield process.pid, rpc, int(found[1])
        finally:
            process.terminate()
            process.wait()


def _rpc_asker(rpc: str, stack: ExitStack) -> Callable[[bytes], bytes]:
    client = stack.enter_context(RpcClient(rpc))
    return lambda image: client.call(1, image).payload


def _http_asker(port: int, stack: ExitStack) -> Callable[[bytes], bytes]:
    connection = http.client.HTTPConnection("127.0.0.1", port)
    connection.connect()
    connection.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    stack.callback(connection.close)

    def ask(image: bytes) -> bytes:
        connection.request("POST", f"/v1/models/{MODEL}/infer", image, {"Content-Type": "application/octet-stream"})
        answer = connection.getresponse()
        data = answer.read()
        if answer.status != 200:
            raise SystemExit(f"{answer.status}: {data.decode(errors='replace')}")
        return data

    return ask


def _asker(where: str, stack: ExitStack) -> Callable[[bytes], bytes]:
    return _rpc_asker(where, stack) if where.startswith("unix:") else _http_asker(int(where), stack)


def _call_for(where: str, seconds: float) -> None:
    """Send requests for `seconds`, and print the duration of each in seconds, as JSON."""
    images, _ = load_tests()
    inputs = [image.tobytes() for image in images]
    took: list[float] = []
    with ExitStack() as stack:
        ask = _asker(where, stack)
        for image in inputs[:50]:
            ask(image)
        began = time.perf_counter()
        while (now := time.perf_counter()) - began < seconds:
            ask(inputs[len(took) % len(inputs)])
            took.append(time.perf_counter() - now)
    print(json.dumps(took))


def _load(where: str, callers: int, seconds: float) -> dict[str, float]:
    command = [sys.executable, __file__, "--caller", where, "--seconds", str(seconds)]
    processes = [subprocess.Popen(command, stdout=subprocess.PIPE) for _ in range(callers)]
    took: list[float] = []
    for process in processes:
        took += json.loads(process.communicate()[0])
    times = {f"p{part}_us": percentile(took, part) * 1e6 for part in (50, 99)}
    return {"per_s": len(took) / seconds} | times


def _right(where: str) -> float:
    """Return the share of test images that the server classifies correctly.

    Raises SystemExit if a score differs from the reference.
    """
    import numpy as np

    images, digits = load_tests()
    wanted = load_weights(MODEL).scores(images)
    with ExitStack() as stack:
        ask = _asker(where, stack)
        answers = b"".join(ask(images[at : at + 20].tobytes()) for at in range(0, len(images), 20))
    scores = np.frombuffer(answers, "<f4").reshape(-1, DIGITS)
    if not np.allclose(scores, wanted, atol=TOLERANCE) or not np.array_equal(scores.argmax(1), wanted.argmax(1)):
        raise SystemExit("the server's scores are not the reference's")
    return float((scores.argmax(1) == digits).mean())


def _cpu_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def model_figures(address: str, seconds: float, callers: tuple[int, ...]) -> dict[str, Any]:
    """Return times and rates, with and without batches."""
    figures: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        together, alone = Path(folder) / "together.toml", Path(folder) / "alone.toml"
        text = re.sub(r'= "([\w-]+\.\w+)"', rf'= "{EXAMPLE.parent}/\1"', EXAMPLE.read_text(encoding="utf-8"))
        together.write_text(text, encoding="utf-8")
        alone.write_text(re.sub(r"max_batch = \d+", "max_batch = 1", text, count=1), encoding="utf-8")
        with _server(address, together) as (pid, rpc, port):
            figures["right"] = {"rpc": _right(rpc), "http": _right(str(port))}
            # Measure the CPU time of an idle server, after it has settled.
            time.sleep(SETTLE_S)
            before = _cpu_s(pid)
            time.sleep(seconds)
            figures["idle cores"] = (_cpu_s(pid) - before) / seconds
            figures["batches"] = _loads(rpc, port, seconds, callers)
        # The same models with a batch size of 1 show the gain from batches.
        with _server(address, alone) as (_, rpc, port):
            figures["no batches"] = _loads(rpc, port, seconds, callers)
    return figures


def _loads(rpc: str, port: int, seconds: float, callers: tuple[int, ...]) -> Figures:
    ways = {"rpc": rpc, "http": str(port)}
    return {
        f"{way}, {count} at a time": _load(where, count, seconds) for way, where in ways.items() for count in callers
    }


@click.command()
@click.option("--driver", default="auto", help="Of a private daemon, if none runs.")
@click.option("--seconds", default=3.0, help="How long each is measured.")
@click.option("--callers", default="1,8,16", help="How many at a time.")
@click.option("--caller", default="", hidden=True)
def main(driver: str, seconds: float, callers: str, caller: str) -> None:
    """Measure the example's model behind a server."""
    if caller:
        _call_for(caller, seconds)
        return
    with ExitStack() as stack:
        address = running_address() or stack.enter_context(private_daemon(driver))
        found = model_figures(address, seconds, tuple(int(count) for count in callers.split(",")))
    click.echo(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
