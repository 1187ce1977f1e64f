from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from helpers.client_faces import Face, Scenario, play
from helpers.scripted_peer import ScriptedPeer, scripted_peer


@pytest.fixture
def peer(tmp_path: Path) -> Iterator[ScriptedPeer]:
    with scripted_peer(tmp_path / "s") as peer:
        yield peer


@pytest.fixture
def renewed_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """A lease of a minute is renewed after some hundredths of a second, so that none ends however slow the host is."""
    monkeypatch.setattr("gpulease.client.core.lease.RENEW_AT", 1e-3)


@pytest.fixture(params=["blocking", "asyncio"])
def run(request: pytest.FixtureRequest, peer: ScriptedPeer) -> Callable[[Scenario], None]:
    """Plays a scenario on one face; every test that takes this runs on both."""
    face = Face(request.param, peer)
    return lambda scenario: play(scenario, face)


@pytest.fixture(params=["blocking", "asyncio", "blocking, ring", "asyncio, ring"])
def run_over_both(
    request: pytest.FixtureRequest, peer: ScriptedPeer, monkeypatch: pytest.MonkeyPatch
) -> Callable[[Scenario], None]:
    """The same, and once more with the frames in shared memory, by a client that spins however few cores there are."""
    name, _, ring = request.param.partition(", ")
    peer.gives_rings = bool(ring)
    monkeypatch.setattr("gpulease.client.transport.spin_policy._HAS_CORES", True)
    face = Face(name, peer)
    return lambda scenario: play(scenario, face)
