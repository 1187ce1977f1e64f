import ctypes

import numpy as np
import pytest

from gpulease.client.core.staged_copies import PART_BYTES, Copiers


@pytest.mark.parametrize("count", [0, 1, 3])
def test_each_copy_is_complete_when_its_token_comes(count: int) -> None:
    copiers = Copiers(count)
    rng = np.random.default_rng(count)
    sizes = (1, PART_BYTES, PART_BYTES + 1, 3 * PART_BYTES - 7)
    sources = [rng.integers(1, 255, size, dtype=np.uint8) for size in sizes]
    targets = [np.zeros(len(source) + 1, np.uint8) for source in sources]
    for number, (source, target) in enumerate(zip(sources, targets, strict=True)):
        copiers.copy(target.ctypes.data, source.ctypes.data, len(source), (number,))
    seen = set()
    for _ in sizes:
        (number,) = copiers.done()
        seen.add(number)
        assert (targets[number][:-1] == sources[number]).all()
        assert targets[number][-1] == 0
    assert seen == set(range(len(sizes)))
    copiers.close()


def test_closing_waits_for_what_was_begun() -> None:
    copiers = Copiers(2)
    source, target = (ctypes.c_ubyte * (32 << 20))(), (ctypes.c_ubyte * (32 << 20))()
    source[-1] = 7
    copiers.copy(ctypes.addressof(target), ctypes.addressof(source), len(source), 1)
    threads = list(copiers._threads)
    copiers.close()
    assert target[-1] == 7
    assert not any(thread.is_alive() for thread in threads)
