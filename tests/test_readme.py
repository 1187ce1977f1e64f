"""What the README names is there: the tests that show a claim, the folders of the tree."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()


def section(title: str) -> str:
    return README.partition(f"\n## {title}\n")[2].partition("\n## ")[0]


def test_what_shows_a_claim_is_there() -> None:
    rows = [line for line in section("Security, and its limits").splitlines() if line.startswith("| ")][1:]
    assert len(rows) > 20
    for row in rows:
        names = re.findall(r"`([a-z_/]+)`", row.rstrip("| ").rpartition("|")[2])
        assert names, row
        for name in names:
            assert (ROOT / "tests" / name).is_dir() or (ROOT / "tests" / f"{name}.py").is_file(), name


def test_the_tree_is_as_it_is_told() -> None:
    names = re.findall(r"^\| `([a-z_/]+/)` \|", section("The tree"), flags=re.MULTILINE)
    assert len(names) > 10
    for name in names:
        assert (ROOT / name).is_dir(), name
