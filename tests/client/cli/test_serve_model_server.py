"""`gpulease serve models`: its refusals before it serves; tests/behaviour has the serving."""

import pytest
from click.testing import CliRunner

from gpulease.client.cli.__main__ import main
from gpulease.client.serve.models.model_settings import EXAMPLE


@pytest.mark.parametrize(
    ("words", "status", "said"),
    [
        ([], 2, "give the models"),
        (["nowhere.toml"], 1, "nowhere.toml"),
        ([str(EXAMPLE), "--listen", "tcp:0.0.0.0:80"], 1, "where only this host can connect"),
        ([str(EXAMPLE), "--rpc", "tcp:127.0.0.1:0"], 1, "memory can only be shared on one host"),
    ],
)
def test_what_it_refuses(words: list[str], status: int, said: str) -> None:
    done = CliRunner().invoke(main, ["serve", "models", *words], env={"GPULEASE_ADDRESS": "unix:/nowhere"})
    assert (done.exit_code, said in done.output) == (status, True), done.output
