"""The embedded driver's cards: as many as the operator asks for, of any size, in host memory."""

import uuid
from collections.abc import Mapping, Sequence
from typing import Final

from gpulease.daemon.gpus.source import EX_CONFIG, CardFacts, CardLoad, CardReading, CardsUnavailable
from gpulease.daemon.leases import KeptCard

_NAMESPACE = uuid.UUID("5d2d6ab6-4c7e-5d36-9a70-6770756c6561")


MAX_CARD_BYTES: Final = 512 << 30
"""More than a worker can reserve address space for in one slice is a typing mistake."""


ALLOWANCE_BYTES: Final = 1 << 20
"""For modules' variables, texts of assertions mostly, in sessions whose slice is full. Host memory, so it is charged to
no pretended card."""


CONTEXT_BYTES: Final = 0
"""What a context costs besides its slice: host memory too."""


class EmbeddedCards:
    """Pretended cards. A card's UUID depends on its index alone, so it survives a restart.

    Args:
        sizes_bytes: One card for each, in order.

    Raises:
        CardsUnavailable: One is larger than can be pretended.
    """

    driver = "cpu"
    allowance_bytes = ALLOWANCE_BYTES
    reserve_bytes = 0
    has_others = False

    def __init__(self, sizes_bytes: Sequence[int]) -> None:
        for size_bytes in sizes_bytes:
            if size_bytes > MAX_CARD_BYTES:
                raise CardsUnavailable(
                    f"an embedded card of {size_bytes} bytes; at most {MAX_CARD_BYTES} can be pretended",
                    hint="Give a smaller --vram.",
                    status=EX_CONFIG,
                )
        self._sizes_bytes = tuple(sizes_bytes)

    def discover(self, known: Mapping[str, KeptCard]) -> list[CardFacts]:
        """The cards asked for, each as large as it is to be now."""
        return [
            CardFacts(f"GPU-{uuid.uuid5(_NAMESPACE, str(index))}", index, "embedded CPU card", size, found_bytes=size)
            for index, size in enumerate(self._sizes_bytes)
        ]

    def why_no_context(self) -> CardsUnavailable | None:
        """There is no driver that could be broken."""
        return None

    def process_bytes(self, card_uuid: str, pid: int) -> int:
        """What every worker holds of its card, as far as is pretended."""
        return CONTEXT_BYTES

    def read(self, card_uuid: str) -> CardReading:
        """A session's memory is its worker's anonymous memory: the kernel had it back when the worker was reaped."""
        return CardReading(0, {})

    def load(self, card_uuid: str) -> CardLoad:
        """Unknown: nothing counts how busy a pretended card is."""
        return CardLoad()

    def close(self) -> None:
        """There is nothing open."""
