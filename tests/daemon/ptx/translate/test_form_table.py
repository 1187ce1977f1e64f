from pathlib import Path

from gpulease.daemon.ptx import driver
from gpulease.daemon.ptx.translate.form_table import FAMILIES, supported_table
from gpulease.daemon.ptx.translate.forms import InstructionFamily
from helpers.forms_met import Choice, never_met

README = Path(driver.__file__).parent / "README.md"


def test_the_readme_s_table_is_the_code_s() -> None:
    assert supported_table() in README.read_text()


def test_every_family_names_its_section() -> None:
    assert all(family.section.startswith("9.7") and family.forms for family in FAMILIES)


def test_a_form_applies_to_each_opcode_with_the_family_s_choices_unless_it_has_its_own() -> None:
    family = InstructionFamily("A family", "9.7", type=("u32", "s32"), scope=("cta",))
    family.form("add|sub{.scope}.type", 3, scope=("gpu", "sys"))(lambda t, i, m: None)
    assert [(form.template, form.opcode) for form in family.forms] == [
        ("add{.scope}.type", "add"),
        ("sub{.scope}.type", "sub"),
    ]
    for form in family.forms:
        assert form.slots == (("scope", ("gpu", "sys"), True), ("type", ("u32", "s32"), False))


def test_what_no_test_met_is_told() -> None:
    family = InstructionFamily("A family", "9.7")
    family.form("add{.sat}.type", 3, type=("u32", "s32"))(lambda t, i, m: None)
    family.form("exit", 0)(lambda t, i, m: None)
    met: set[Choice] = {(0, "", ""), (0, "sat", "sat"), (0, "type", "u32")}
    assert never_met(family.forms, met) == ["add{.sat}.type: sat left out, type s32", "exit: never"]
    assert never_met(family.forms, met | {(0, "sat", ""), (0, "type", "s32"), (1, "", "")}) == []
