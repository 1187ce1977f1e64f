"""The table of features: each feature that the server has or refuses names a test, and that test exists."""

import re
from pathlib import Path

import gpulease.client.decode
from gpulease.client.decode.openai.request_parameters import PARAMETERS, STRUCTURED_OUTPUTS
from gpulease.client.decode.openai.response_request import PARAMETERS as OF_RESPONSES

PAGE = Path(gpulease.client.decode.__path__[0]) / "openai/features.md"
ROOT = Path(__file__).parents[4]
ROW = re.compile(r"\| (?P<feature>.+) \| [^|]+ \| [^|]+ \| (?P<here>\w+) \| (?:`(?P<file>[^`]+)::(?P<test>\w+)` )?\|")


def test_each_feature_that_is_claimed_names_a_test_that_exists() -> None:
    lines = [line for line in PAGE.read_text().splitlines() if line.startswith("| ")][1:]
    rows = [ROW.fullmatch(line) for line in lines]
    assert len({row["feature"] for row in rows if row is not None}) == len(lines) > 40
    for row in rows:
        assert row is not None
        assert row["here"] in ("yes", "refused", "no"), row["feature"]
        # A missing feature has no test; every other has one.
        assert (row["test"] is None) == (row["here"] == "no"), row["feature"]
        if row["test"] is not None:
            found = (ROOT / row["file"]).read_text()
            assert re.search(rf"^def {row['test']}\(", found, re.MULTILINE), row["test"]


def test_each_parameter_of_a_feature_that_is_refused_is_refused_by_its_name() -> None:
    rows = [row for line in PAGE.read_text().splitlines() if (row := ROW.fullmatch(line)) and row["here"] == "refused"]
    names = [name for row in rows for name in re.findall(r"`(?:structured_outputs\.)?([a-z_]+)`", row["feature"])]
    assert len(names) > 12
    for name in names:
        found = PARAMETERS.get(name) or STRUCTURED_OUTPUTS.get(name) or OF_RESPONSES[name]
        assert not found.is_used, name
        assert not found.is_ignored, name
