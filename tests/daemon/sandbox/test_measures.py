import pytest

from gpulease.daemon.sandbox.measures import Measure, SandboxSettings


@pytest.mark.parametrize(
    "settings",
    [SandboxSettings(), SandboxSettings(True, "gpulease", frozenset({Measure.SYSCALLS, Measure.SCOPE}))],
)
def test_settings_come_through_a_command_line(settings: SandboxSettings) -> None:
    assert SandboxSettings.from_text(settings.to_text()) == settings
