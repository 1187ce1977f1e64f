"""What is asked of the node as a whole, for programs that watch it: METRICS and HEALTH, of one control connection."""

from collections.abc import Callable

from gpulease.daemon.broker.health import Health
from gpulease.daemon.broker.metrics import NodeMetrics
from gpulease.daemon.broker.peers import Peer
from gpulease.daemon.broker.refusal import Refusal
from gpulease.protocol.failures import Failure
from gpulease.protocol.messages import Metrics, Report
from gpulease.protocol.opcodes import Status


class NodeDesk:
    """Takes these requests; whether somebody is an operator was looked at before."""

    def __init__(self, peer: Peer, metrics: NodeMetrics, health: Health) -> None:
        self._peer = peer
        self._metrics = metrics
        self._health = health
        self._is_scraped = False

    def scrape(self, answer: Callable[[Metrics | Failure], None]) -> None:
        """METRICS. Raises Refusal: one text at a time, so that who never reads has no more than one waiting."""
        if self._is_scraped:
            raise Refusal(Failure(Status.BUSY, "this connection's METRICS is being answered", hint="Ask one by one."))
        self._is_scraped = True

        def tell(result: Metrics | Failure) -> None:
            self._is_scraped = False
            answer(result)

        self._metrics.ask(tell)

    def health(self) -> Report:
        """HEALTH. Raises Refusal."""
        if self._peer.is_relayed:
            raise Refusal(Failure(Status.DENIED, "HEALTH is for peers on the daemon's host", hint="Ask there."))
        return Report(self._health.report())
