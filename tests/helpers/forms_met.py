"""Checks that a run of all tests of the embedded driver uses every modifier of every instruction form that it supports.

It records which forms are loaded in the test process. A form that was loaded may still lack a check of its result, but
a form that was never loaded has no test. So if someone adds a form without a test, the first full run fails.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final
from unittest import mock

import pytest

from gpulease.daemon.ptx.parse.syntax import Instruction
from gpulease.daemon.ptx.translate.form_table import FAMILIES
from gpulease.daemon.ptx.translate.forms import Form, Modifiers

TESTS: Final = Path(__file__).parents[1] / "daemon" / "ptx"

# A form's number in the list of forms, the name of one of its modifier slots, and the modifier in that slot.
Choice = tuple[int, str, str]


def is_whole(config: pytest.Config) -> bool:
    """Return whether a run covers all tests of the driver, without a selection by name."""
    chosen = config.option
    some = chosen.keyword or chosen.deselect or chosen.collectonly or chosen.ignore or getattr(chosen, "lf", False)
    whole = (TESTS, *TESTS.parents)
    return chosen.everything and not some and any(Path(argument).resolve() in whole for argument in config.args)


def choices(number: int, form: Form) -> Iterator[Choice]:
    """Yield every modifier of a form. The form itself is a choice, and so is the omission of an optional modifier."""
    yield number, "", ""
    for name, values, is_optional in form.slots:
        yield from ((number, name, value) for value in ((*values, "") if is_optional else values))


def never_met(forms: Sequence[Form], met: set[Choice]) -> list[str]:
    """Return a line for each form with modifiers that no test has used."""
    lines = []
    for number, form in enumerate(forms):
        missing = [choice for choice in choices(number, form) if choice not in met]
        if missing:
            told = [f"{name} {value or 'left out'}" for _, name, value in missing if name]
            lines.append(f"{form.template}: {'never' if missing[0][1] == '' else ', '.join(told)}")
    return lines


class FormsMet:
    """A plugin of pytest. With several test processes, each records its own forms, and the main process merges them."""

    def __init__(self) -> None:
        self.forms: list[Form] = [form for family in FAMILIES for form in family.forms]
        self.met: set[Choice] = set()
        self.missing: list[str] = []
        numbers = {id(form): number for number, form in enumerate(self.forms)}
        match = Form.match

        def met(form: Form, instruction: Instruction) -> Modifiers | None:
            found = match(form, instruction)
            if found is not None and id(form) in numbers:
                number = numbers[id(form)]
                self.met.add((number, "", ""))
                self.met.update((number, name, found.get(name)) for name, _, _ in form.slots)
            return found

        self.patch = mock.patch.object(Form, "match", met)

    def pytest_sessionstart(self) -> None:
        self.patch.start()

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any) -> None:
        self.met |= {tuple(choice) for choice in getattr(node, "workeroutput", {}).get("forms_met", ())}

    def pytest_sessionfinish(self, session: pytest.Session, exitstatus: int) -> None:
        self.patch.stop()
        if hasattr(session.config, "workeroutput"):
            session.config.workeroutput["forms_met"] = [list(choice) for choice in self.met]
        elif exitstatus == pytest.ExitCode.OK:
            self.missing = never_met(self.forms, self.met)
            if self.missing:
                session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        if self.missing:
            terminalreporter.section("instruction forms that no test has met", red=True)
            for line in self.missing:
                terminalreporter.line(line)
