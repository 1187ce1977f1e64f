"""The documents name what is there: tests that show a claim, folders of the tree, files of the architecture."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()
DOCUMENTS = [*(ROOT / "client").rglob("*.md"), *(ROOT / "daemon").rglob("*.md"), *(ROOT / "protocol").rglob("*.md")]
DOCUMENTS += [ROOT / "README.md", ROOT / "vectors" / "README.md", *(ROOT / ".github").glob("*.md")]


def test_tests_that_show_a_claim_exist() -> None:
    lines = (ROOT / "daemon/manual/security.md").read_text().splitlines()
    rows = [line for line in lines if line.startswith("| ") and not line.endswith("| shown by |")]
    assert len(rows) > 20
    for row in rows:
        names = re.findall(r"`([a-z_/]+)`", row.rstrip("| ").rpartition("|")[2])
        assert names, row
        for name in names:
            assert (ROOT / "tests" / name).is_dir() or (ROOT / "tests" / f"{name}.py").is_file(), name


def test_the_tree_is_as_it_is_told() -> None:
    section = README.partition("\n## The tree\n")[2].partition("\n## ")[0]
    names = re.findall(r"^\| `([a-z_/]+/)` \|", section, flags=re.MULTILINE)
    assert len(names) > 10
    for name in names:
        assert (ROOT / name).is_dir(), name


@pytest.mark.parametrize("name", ["daemon/ARCHITECTURE.md", ".github/CONTRIBUTING.md"])
def test_named_files_exist(name: str) -> None:
    path = ROOT / name
    if not path.exists():
        pytest.skip("an sdist has no hidden folders")
    named = re.findall(r"`((?:client|daemon|protocol|tests|systemd|vectors)/[\w/.]+)`", path.read_text())
    assert named
    assert [file for file in named if not (ROOT / file).exists()] == []


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_links_lead_somewhere(path: Path) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", path.read_text()):
        file, _, anchor = target.partition("#")
        if file.startswith("http"):
            continue
        there = path.parent / file if file else path
        assert there.exists(), target
        if anchor and there.suffix == ".md":
            heads = re.findall(r"^#+ (.*)$", there.read_text(), flags=re.MULTILINE)
            anchors = {re.sub(r"[^\w -]", "", head.lower()).replace(" ", "-") for head in heads}
            assert anchor in anchors, target
