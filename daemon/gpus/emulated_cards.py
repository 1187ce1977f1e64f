"""The embedded driver's cards, which are emulated in host memory."""

import os
import uuid
from collections.abc import Mapping, Sequence
from typing import Final

from gpulease.daemon.gpus.source import CardFacts, CardLoad, CardReading, CardsUnavailable
from gpulease.daemon.leases.persisted import CardRow

_NAMESPACE = uuid.UUID("5d2d6ab6-4c7e-5d36-9a70-6770756c6561")


MAX_CARD_BYTES: Final = 512 << 30
"""Maximum memory of a card. A worker can't reserve more address space for one slice."""


ALLOWANCE_BYTES: Final = 1 << 20
"""Bytes that a session may use for modules' variables, such as texts of assertions, when its slice is full. They are in
host memory and not charged to a card."""


CONTEXT_BYTES: Final = 0
"""The card memory that a context takes in addition to its slice: none, because a context is in host memory."""


class EmbeddedCards:
    """Emulated cards. A card's UUID depends only on its index, so it stays the same after a restart.

    Args:
        sizes_bytes: The cards' sizes, in order.
        warning: As in CardSource.

    Raises:
        CardsUnavailable: A card is larger than MAX_CARD_BYTES.
    """

    driver = "cpu"
    allowance_bytes = ALLOWANCE_BYTES
    reserve_bytes = 0
    has_others = False

    def __init__(self, sizes_bytes: Sequence[int], warning: str = "") -> None:
        # Check the sizes now. Otherwise a worker would fail later, when it reserves the addresses.
        self.warning = warning
        for size_bytes in sizes_bytes:
            if size_bytes > MAX_CARD_BYTES:
                raise CardsUnavailable(
                    f"an emulated card must have at most {MAX_CARD_BYTES} bytes, not {size_bytes}",
                    hint="Give a smaller --vram.",
                    status=os.EX_CONFIG,
                )
        self._sizes_bytes = tuple(sizes_bytes)

    def discover(self, rows: Mapping[str, CardRow]) -> list[CardFacts]:
        uuids = [f"GPU-{uuid.uuid5(_NAMESPACE, str(index))}" for index in range(len(self._sizes_bytes))]
        # All cards are in the same memory, so each is a peer of all others.
        return [
            CardFacts(
                own,
                index,
                "embedded CPU card",
                size,
                found_bytes=size,
                peers=tuple(other for other in uuids if other != own),
            )
            for index, (own, size) in enumerate(zip(uuids, self._sizes_bytes, strict=True))
        ]

    def why_no_context(self) -> CardsUnavailable | None:
        return None

    def process_bytes(self, card_uuid: str, pid: int) -> int:
        """Return the card memory of a worker's context."""
        return CONTEXT_BYTES

    def read(self, card_uuid: str) -> CardReading:
        """Return an empty reading: the kernel freed a worker's memory when the worker was reaped."""
        return CardReading(0, {})

    def load(self, card_uuid: str) -> CardLoad:
        return CardLoad()

    def close(self) -> None: ...
