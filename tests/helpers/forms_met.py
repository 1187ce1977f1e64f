"""Demands that a run of all tests of the embedded driver meets every choice of every instruction form it supports.

It counts what those tests load in the process: that a form was met does not say that its result was looked at, but one
that was never met has no test. So whoever adds a form without a test learns it from the first whole run.
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

# A form's number in the catalogue, one of its slots, and what stood there.
Choice = tuple[int, str, str]


def is_whole(config: pytest.Config) -> bool:
    """Whether a run is of all the driver's tests, and not of some by name."""
    chosen = config.option
    some = chosen.keyword or chosen.deselect or chosen.collectonly or chosen.ignore or getattr(chosen, "lf", False)
    whole = (TESTS, *TESTS.parents)
    return chosen.everything and not some and any(Path(argument).resolve() in whole for argument in config.args)


def choices(number: int, form: Form) -> Iterator[Choice]:
    """All that a form can be asked for; a form without modifiers is one choice, and so is leaving one out."""
    yield number, "", ""
    for name, values, is_optional in form.slots:
        yield from ((number, name, value) for value in ((*values, "") if is_optional else values))


def never_met(forms: Sequence[Form], met: set[Choice]) -> list[str]:
    """What no test has met, one line for each form."""
    lines = []
    for number, form in enumerate(forms):
        missing = [choice for choice in choices(number, form) if choice not in met]
        if missing:
            told = [f"{name} {value or 'left out'}" for _, name, value in missing if name]
            lines.append(f"{form.template}: {'never' if missing[0][1] == '' else ', '.join(told)}")
    return lines


class FormsMet:
    """A plugin of pytest; with several processes each keeps its own account, and the first adds them up."""

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
