from pathlib import Path

from gpulease.daemon.drivers.cpu import driver
from gpulease.daemon.drivers.cpu.translate.catalogue import FAMILIES, supported_table

README = Path(driver.__file__).parent / "README.md"


def test_the_readme_s_table_is_the_code_s() -> None:
    assert supported_table() in README.read_text()


def test_every_family_names_its_section() -> None:
    assert all(family.section.startswith("9.7") and family.forms for family in FAMILIES)
