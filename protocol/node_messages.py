"""The bodies of what an operator, or a program of theirs, asks of the node as a whole; see `messages`."""

from dataclasses import dataclass

from gpulease.protocol import limits
from gpulease.protocol.primitives import text, wire


@dataclass(frozen=True, slots=True)
class Metrics:
    """The node's metrics as an HTTP server passes them on: the media type, and the text, which is never cut short."""

    content_type: str = wire(text())
    exposition: str = wire(text(limits.MAX_METRICS_BYTES))
