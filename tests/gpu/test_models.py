"""Models on a real card: the scores are right, and after a fault or an endless kernel a model works on a new lease."""

import asyncio

import numpy as np
import pytest

from gpulease.client.serve.models import load_settings
from gpulease.client.serve.models.example.digits import DIGITS, load_tests, load_weights
from gpulease.client.serve.models.model_settings import EXAMPLE
from gpulease.client.serve.rpc import Answer
from gpulease.protocol.rpc import CallErrorCode
from helpers.daemon import Daemon
from helpers.model_rig import ENDLESS, STRAY, code_of, item, obey, right, serving

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("name", ["digits", "digits-small"])
def test_scores_are_the_references(daemon: Daemon, name: str) -> None:
    images, _ = load_tests()

    async def play() -> list[bytes]:
        async with serving(daemon, *load_settings(EXAMPLE).values()) as rig:
            outcomes = await asyncio.gather(*(rig.ask(image.tobytes(), name) for image in images))
            return [outcome.payload for outcome in outcomes if isinstance(outcome, Answer)]

    scores = np.frombuffer(b"".join(asyncio.run(play())), "<f4").reshape(-1, DIGITS)
    wanted = load_weights(name).scores(images)
    np.testing.assert_allclose(scores, wanted, atol=1e-3)
    np.testing.assert_array_equal(scores.argmax(1), wanted.argmax(1))


@pytest.mark.parametrize("what", [STRAY, ENDLESS])
def test_a_model_comes_back(daemon: Daemon, what: int) -> None:
    async def play() -> None:
        async with serving(daemon, obey(max_kernel_secs=0.5)) as rig:
            lease_id = await rig.leased()
            assert code_of(await rig.ask(item(1, what))) is CallErrorCode.KERNEL_FAILED
            assert await rig.ask(item(2)) == right(2)
            assert rig.lease_id() != lease_id

    asyncio.run(play())
