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
    """Renew a lease of a minute after some hundredths of a second, so that it does not end even on a slow host."""
    monkeypatch.setattr("gpulease.client.core.lease.RENEW_AT", 1e-3)


@pytest.fixture(params=["blocking", "asyncio"])
def run(request: pytest.FixtureRequest, peer: ScriptedPeer) -> Callable[[Scenario], None]:
    """Return a function that runs a scenario with one API. Tests with this fixture run with both APIs."""
    face = Face(request.param, peer)
    return lambda scenario: play(scenario, face)


@pytest.fixture(params=["blocking", "asyncio", "blocking, ring", "asyncio, ring"])
def run_over_both(
    request: pytest.FixtureRequest, peer: ScriptedPeer, monkeypatch: pytest.MonkeyPatch
) -> Callable[[Scenario], None]:
    """Like `run`, and once more with frames in shared memory. The client spins, however few cores there are."""
    name, _, ring = request.param.partition(", ")
    peer.gives_rings = bool(ring)
    monkeypatch.setattr("gpulease.client.transport.spin_policy._HAS_CORES", True)
    face = Face(name, peer)
    return lambda scenario: play(scenario, face)
