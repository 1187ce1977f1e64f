"""`gpulease verify` on a real card: its output has the chosen rows and claims, and its exit status is right."""

import json

import pytest
from click.testing import CliRunner

from gpulease.client.cli.verify import verify
from helpers.nvml import Cards

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize(("only", "count"), [("address", 3), ("launch gate", 1), ("a submit", 1)])
def test_rows_of_the_matrix(cards: Cards, only: str, count: int) -> None:
    used = cards.used_bytes()
    done = CliRunner().invoke(verify, ["--driver", "cuda", "--only", only, "--json"])
    assert done.exit_code == 0, done.output
    report = json.loads(done.stdout)
    assert len(report["faults"] + report["claims"]) == count
    assert all(row["more_mib"] <= 0 and row["told"]["error"] == "SyncFailed" for row in report["faults"])
    cards.check_back_to(used)
