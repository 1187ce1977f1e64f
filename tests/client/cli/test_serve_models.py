"""`gpulease serve decode` with many models: it serves before any is loaded, reloads by SIGHUP, and stops."""

import asyncio
import contextlib
import hashlib
import os
import signal
import subprocess
import sys
from pathlib import Path

import httpx
import pytest

from gpulease.client.cli.serve_models import pool_reload
from gpulease.client.cli.settings_reload import SettingsReload
from gpulease.client.decode import TINY_MODEL
from gpulease.client.decode.openai.decode_settings import load_decode_settings
from gpulease.client.decode.supervisor.background_tasks import BackgroundTasks
from gpulease.client.decode.supervisor.model_pool import ModelPool
from gpulease.client.errors import InvalidRequest
from helpers.daemon import Daemon, python_environment
from helpers.waiting import wait_until

DIGEST = "ab" * 32
POOL = '[pool]\nmemory = "1GiB"\n[engine]\nmax_rows = 8\npositions = 96\n'
TENANTS = f'[tenants.ann]\nkey_sha256 = "{DIGEST}"\nmax_concurrent = 2\nmax_blocks = 12\n'


def text(*models: str, pool: str = POOL) -> str:
    return pool + "".join(f'[models.{name}]\nmodel = "{TINY_MODEL}"\n' for name in models) + TENANTS


def test_a_reload_serves_the_file_s_models_and_a_mistake_changes_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "decode.toml"
    path.write_text(text("a", "b"))
    settings = load_decode_settings(path)
    assert settings.pool is not None
    handler = signal.getsignal(signal.SIGHUP)

    async def part() -> None:
        assert settings.pool is not None
        # No model is loaded, so it needs no daemon.
        pool = ModelPool(settings.models, settings.pool.limits(), address="unix:/nowhere")
        async with pool.serving():
            tasks = BackgroundTasks()
            with contextlib.closing(SettingsReload(path, tasks)) as reloading:
                # While models are loaded, a signal neither ends the process nor is lost.
                os.kill(os.getpid(), signal.SIGHUP)
                await asyncio.sleep(0)
                assert "reloaded" not in caplog.text
                reloading.begin(pool_reload(pool, path, settings))
                async with asyncio.timeout(30):
                    while "the settings were reloaded: a, b" not in caplog.text:  # noqa: ASYNC110  # the log has no event
                        await asyncio.sleep(0.01)
                for changed, served, mistake in (
                    (text("b", "c"), ["b", "c"], ""),
                    ("[pool]\nmemory = 5\n", ["b", "c"], "pool.memory must be"),
                    # The form of a server with one model names none here, and must not unload them all.
                    (f'model = "{TINY_MODEL}"\n{TENANTS}', ["b", "c"], " must have [pool] and [models.NAME]"),
                    (text("d"), ["d"], ""),
                ):
                    path.write_text(changed)
                    caplog.clear()
                    os.kill(os.getpid(), signal.SIGHUP)
                    async with asyncio.timeout(30):
                        while "reloaded" not in caplog.text:  # noqa: ASYNC110  # the log has no event
                            await asyncio.sleep(0.01)
                    assert list(pool.specs) == list(pool.residency.models) == served
                    assert ("not reloaded" in caplog.text) is bool(mistake)
                    assert mistake in caplog.text
            await tasks.stop()

    with caplog.at_level("INFO", "gpulease.decode"):
        asyncio.run(part())
    assert signal.getsignal(signal.SIGHUP) == handler


def test_models_that_are_larger_than_the_card_s_memory_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "decode.toml"
    path.write_text(text("a", pool='[pool]\nmemory = "10MiB"\n'))
    settings = load_decode_settings(path)

    async def part() -> None:
        assert settings.pool is not None
        async with ModelPool(settings.models, settings.pool.limits()).serving():
            raise AssertionError

    with pytest.raises(InvalidRequest, match=r"model a takes .* bytes, more than the models' 10,485,760"):
        asyncio.run(part())


def test_the_server_lists_its_models_before_any_is_loaded_and_ends_by_a_signal(
    shared_daemon: Daemon, tmp_path: Path
) -> None:
    path, sock = tmp_path / "decode.toml", tmp_path / "s"
    path.write_text(f'address = "{shared_daemon.address}"\nhttp_processes = 0\n' + text("a", "b"))
    key = "0123456789abcdef"
    path.write_text(path.read_text().replace(DIGEST, hashlib.sha256(key.encode()).hexdigest()))
    command = [
        sys.executable,
        "-P",
        "-m",
        "gpulease.client.cli",
        "serve",
        "decode",
        str(path),
        "--listen",
        f"unix:{sock}",
    ]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=python_environment()) as process:
        try:
            wait_until(sock.exists, "the socket")
            transport = httpx.HTTPTransport(uds=str(sock))
            with httpx.Client(transport=transport, base_url="http://localhost", timeout=60) as http:
                listed = http.get("/v1/models", headers={"Authorization": f"Bearer {key}"}).json()["data"]
            assert [(one["id"], one["gpulease"]["state"]) for one in listed] == [("a", "unloaded"), ("b", "unloaded")]
        finally:
            process.send_signal(signal.SIGTERM)
            said, _ = process.communicate(timeout=60)
    assert (process.returncode, "serves a, b to ann" in said, "decode has stopped" in said) == (0, True, True)
