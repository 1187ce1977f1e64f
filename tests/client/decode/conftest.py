import asyncio
from collections.abc import Iterator

import pytest

from gpulease.client.decode.checkpoint import RandomCheckpoint
from gpulease.client.decode.engine.forward_pass import StepLimits
from helpers.daemon import Daemon
from helpers.decode.decoder_rig import Outputs, one_by_one, opened
from helpers.decode.engine_rig import RunningRig, running
from helpers.decode.random_models import TINY

TINY_LIMITS = StepLimits(max_rows=16, tables=6, positions=160)


@pytest.fixture(scope="module")
def tiny(shared_daemon: Daemon) -> Iterator[RunningRig]:
    """Yield an engine for all tests of a file.

    A test must leave no steps in progress; it may leave anything in the pools.
    """
    with running(shared_daemon.address, RandomCheckpoint(TINY, 1), TINY_LIMITS) as rig:
        yield rig


@pytest.fixture(scope="session")
def alone(shared_daemon: Daemon) -> Outputs:
    """Return the decoder rig's outputs, each computed with no other request in progress."""

    async def part() -> Outputs:
        async with opened(shared_daemon) as decoder:
            return await one_by_one(decoder)

    return asyncio.run(part())
