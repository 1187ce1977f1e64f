"""The decode server, called by other projects' clients, unchanged: chats, streams, tools, forms, vectors, errors.

Only langchain-openai is part of the extra `test`. The others take a minute and 400 MB to install, and two of them pin
older versions of OpenAI's client: `pip install '.[clients]'` in an environment of its own brings them all.
"""

import json
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final

import pytest

from gpulease.client.decode import TenantConfig
from helpers.daemon import Daemon, python_environment
from helpers.decode.foreign_clients import POSITIONS, SCENARIOS
from helpers.decode.openai_rig import SETTINGS, OpenAiRig, openai_rig
from helpers.decode.tiny_copies import HERMES_TEMPLATE, MEAN, embedding_model

# So many of ann's sequences are in progress at once in the largest scenario, because a request waits only 0.2 s.
TENANTS: Final = (TenantConfig("ann", 6, 160), TenantConfig("bob", 1, 10, max_waiting=0))
RESUMED_AFTER_S: Final = 0.5


@pytest.fixture(scope="module")
def rig(shared_daemon: Daemon, tmp_path_factory: pytest.TempPathFactory) -> Iterator[OpenAiRig]:
    # The tiny model, with a template that renders tools, a pooling for embeddings, and more positions, because clients
    # add text to a prompt.
    folder = embedding_model(tmp_path_factory.mktemp("model") / "tiny", MEAN)
    change(folder / "tokenizer_config.json", chat_template=HERMES_TEMPLATE, model_max_length=POSITIONS)
    change(folder / "config.json", max_position_embeddings=POSITIONS)
    settings = replace(SETTINGS, positions=POSITIONS)
    with openai_rig(shared_daemon, wait_s=0.2, model=folder, settings=settings, tenants=TENANTS) as running:
        yield running


def change(path: Path, **members: Any) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | members))


@pytest.mark.exhaustive
@pytest.mark.parametrize("package", SCENARIOS)
def test_a_client_works_unchanged(rig: OpenAiRig, package: str) -> None:
    if find_spec(package) is None:
        pytest.skip(f"{package} is not installed: pip install '.[clients]', in an environment of its own")
    # Some packages download files when they are imported; the tests have no network.
    environment = python_environment() | {"LITELLM_LOCAL_MODEL_COST_MAP": "True"}
    command = [sys.executable, "-m", "helpers.decode.foreign_clients", package, rig.url]
    played = 0
    with subprocess.Popen(
        command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        for line in process.stdout:
            match line.strip():
                case "played":
                    played += 1
                case "suspend":
                    # Ann's next request waits for her region, and is refused with a 503.
                    rig.wait_for(rig.decoder.suspend("ann"))
                case "resume":
                    rig.wait_for(rig.decoder.resume("ann"))
                case "resume soon":
                    process.stdin.write("\n")
                    process.stdin.flush()
                    time.sleep(RESUMED_AFTER_S)
                    rig.wait_for(rig.decoder.resume("ann"))
                    continue
                case _:
                    continue
            process.stdin.write("\n")
            process.stdin.flush()
        _, said = process.communicate(timeout=60)
    assert (process.returncode, played) == (0, len(SCENARIOS[package])), said[-4000:]
