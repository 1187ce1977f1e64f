"""PTX versions that a driver takes."""

import pytest

from gpulease.client import LoadFailed
from gpulease.client.kernels.toolchain import checked_version, ptx_version_of


@pytest.mark.parametrize(
    ("cuda", "ptx"),
    [(0, None), (11080, None), (12000, 80), (12060, 85), (12080, 87), (12090, 88), (13000, 90), (13020, 92)],
)
def test_a_driver_s_version(cuda: int, ptx: int | None) -> None:
    assert ptx_version_of(cuda) == ptx


def test_a_text_that_is_too_new_names_the_wheels() -> None:
    text = "// made by a compiler\n.version 9.1\n.target sm_80\n"
    for cuda in (0, 13010):
        assert checked_version(text, cuda) == text
    with pytest.raises(LoadFailed, match=r"writes PTX 9\.1, but the card's driver supports at most 9\.0") as caught:
        checked_version(text.encode(), 13000)
    assert caught.value.hint == "Install the compiler's packages for CUDA 13.0"
