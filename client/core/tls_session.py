"""A session's channel where there is TLS under it; see `gathering` and `tls`."""

from collections import deque

from gpulease.client.core import tls
from gpulease.client.core.channel import Channel
from gpulease.client.core.gathering import GatheringChannel
from gpulease.client.core.patience import Patience


class TlsGatheringChannel(GatheringChannel):
    """See GatheringChannel. What left the outbox may wait in the stream: then there is something unsent still."""

    def __init__(self, channel: Channel, patience: Patience) -> None:
        """Args: channel: A TlsChannel."""
        if not isinstance(channel, tls.TlsChannel):
            raise TypeError(f"{channel!r} is no TLS connection's")
        self.stream = channel.stream
        super().__init__(channel, patience)

    @property
    def has_unsent(self) -> bool:  # type: ignore[override]  # read only, here as there
        """See Channel."""
        return bool(self._outbox.data) or self.stream.has_unsent

    def push(self, parts: deque[memoryview]) -> bool:
        """See Channel."""
        with self._lock:
            if parts or self._outbox.data:
                return super().push(parts)
            return tls.flush_for(self, self.stream)

    def doze(self, *, for_room: bool) -> bool:
        """See Channel."""
        return tls.can_doze(self.stream, for_room=for_room)

    def after_fork(self) -> None:
        """See GatheringChannel."""
        super().after_fork()
        self.stream.disown()

    def _receive_into(self, buffer: memoryview) -> int:
        return tls.receive_explained(self, self.stream, buffer)

    def _put_first(self, frame: bytes | memoryview) -> None:
        super()._put_first(frame)
        self._have_rest_sent()

    def _have_rest_sent(self) -> None:
        if self.stream.has_unsent:
            self._notice()
        else:
            super()._have_rest_sent()

    def _flush(self) -> bool:
        return super()._flush() and (not self.stream.has_unsent or self.stream.flush())
