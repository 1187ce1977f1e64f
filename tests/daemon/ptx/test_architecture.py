"""The embedded driver refuses what a card of its architecture refuses, and says both versions."""

import pytest

from gpulease.daemon.config.settings import Config, ConfigError, load_config
from gpulease.daemon.drivers.interface import ImageRejected
from gpulease.daemon.ptx.architecture import Architecture, parse_architecture
from gpulease.daemon.ptx.context import CpuContext
from gpulease.daemon.zygote.driver_registry import driver_named

BODY = "\n.address_size 64\n.visible .entry k() { ret; }"


def ptx(version: str, target: str) -> bytes:
    return f".version {version}\n.target {target}{BODY}".encode()


@pytest.mark.parametrize(
    ("number", "version", "target", "said"),
    [
        (90, "8.7", "sm_100", "the image is for sm_100, this device is sm_90"),
        (90, "8.7", "sm_999", "the image is for sm_999, this device is sm_90"),
        (80, "8.0", "sm_86, debug", "the image is for sm_86, this device is sm_80"),
        (90, "99.0", "sm_90", r"the image is PTX 99\.0, this driver supports PTX up to 9\.5"),
        (90, "9.10", "sm_90", r"the image is PTX 9\.10, this driver supports PTX up to 9\.5"),
        (100, "8.0", "sm_90a", "the image is for sm_90a, which runs on sm_90 alone; this device is sm_100"),
        (120, "8.8", "sm_100f", "the image is for sm_100f, which runs on that family alone; this device is sm_120"),
        (90, "8.0", "sm_9000", "the target must be an architecture like sm_90, not 'sm_9000'; this device is sm_90"),
    ],
)
def test_an_image_for_a_newer_or_another_device_is_refused(number: int, version: str, target: str, said: str) -> None:
    context = CpuContext(1 << 20, architecture=Architecture(number))
    try:
        with pytest.raises(ImageRejected, match=said) as caught:
            context.module_load(ptx(version, target))
        assert (caught.value.line, f"-arch=sm_{number}" in caught.value.hint) == (2, True)
    finally:
        context.close()


@pytest.mark.parametrize(
    ("number", "target"), [(90, "sm_90"), (90, "sm_90a"), (90, "sm_75, debug"), (103, "sm_100f"), (120, "sm_90")]
)
def test_an_image_for_this_device_or_an_earlier_one_loads(number: int, target: str) -> None:
    context = CpuContext(1 << 20, architecture=Architecture(number))
    try:
        assert set(context.module_load(ptx("9.5", target)).kernels) == {"k"}
    finally:
        context.close()


def test_what_one_device_compiled_does_not_load_on_an_earlier_one() -> None:
    newer, older = (driver_named(name).open_context("", 1 << 20) for name in ("cpu", "cpu:sm_80"))
    try:
        newer.module_load(ptx("8.0", "sm_89"))
        with pytest.raises(ImageRejected, match="the image is for sm_89, this device is sm_80"):
            older.module_load(ptx("8.0", "sm_89"))
    finally:
        newer.close()
        older.close()


def test_a_recycled_context_has_the_same_architecture() -> None:
    driver = driver_named("cpu:sm_80")
    context = driver.recycle(driver.rewind(driver.open_context("", 1 << 20))(1 << 20))(1 << 20)
    try:
        with pytest.raises(ImageRejected, match="this device is sm_80"):
            context.module_load(ptx("8.0", "sm_86"))
    finally:
        context.close()


def test_the_operator_says_which() -> None:
    assert Config().driver_of_workers("cpu") == "cpu"
    assert load_config(None, {"arch": "sm_80"}).driver_of_workers("cpu") == "cpu:sm_80"
    assert load_config(None, {"arch": "sm_80"}).driver_of_workers("cuda") == "cuda"
    with pytest.raises(ConfigError, match="a card's architecture can't be chosen"):
        load_config(None, {"arch": "sm_80", "driver": "cuda"})


@pytest.mark.parametrize("text", ["sm_42", "sm_90a", "90", "compute_90", "sm_999", ""])
def test_what_no_card_has_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="the architecture must be one of"):
        parse_architecture(text)
