"""The cards that CUDA_VISIBLE_DEVICES permits (CUDA C++ Programming Guide, "CUDA Environment Variables").

NVML ignores the variable and lists all cards of the host. CUDA stops reading the variable at the first entry that names
no card. Here such an entry is an error, because an operator might not notice that the node has too few cards.
"""

import os
from collections.abc import Sequence
from typing import Final, NamedTuple

from gpulease.daemon.gpus.source import CardsUnavailable

VARIABLE: Final = "CUDA_VISIBLE_DEVICES"
ORDER_VARIABLE: Final = "CUDA_DEVICE_ORDER"

_NVML_ORDER: Final = "PCI_BUS_ID"
"""The value of CUDA_DEVICE_ORDER for which CUDA, NVML and nvidia-smi number the cards alike."""


class HostCard(NamedTuple):
    """A card, as NVML lists it."""

    uuid: str
    name: str


def visible_cards(cards: Sequence[HostCard], environment: dict[str, str]) -> list[int]:
    """Return the cards that the daemon may use, as indexes into `cards`, in the variable's order.

    Raises CardsUnavailable.
    """
    value = environment.get(VARIABLE)
    if value is None:
        return list(range(len(cards)))
    entries = [entry.strip() for entry in value.split(",")]
    numbers = [_number_of(entry, value, cards, environment) for entry in entries]
    if len(set(numbers)) < len(numbers):
        raise _unusable(value, "it names a card twice")
    return numbers


def _number_of(entry: str, value: str, cards: Sequence[HostCard], environment: dict[str, str]) -> int:
    if entry.isascii() and entry.isdecimal():
        # By default, CUDA gives the fastest card the number 0. A number is unambiguous only if CUDA uses NVML's order,
        # or if all cards are of one model.
        is_certain = environment.get(ORDER_VARIABLE) == _NVML_ORDER or len({card.name for card in cards}) == 1
        if not is_certain:
            raise _unusable(
                value,
                "CUDA may number these different cards in another order than nvidia-smi, unless "
                f"{ORDER_VARIABLE} is set",
            )
        if int(entry) < len(cards):
            return int(entry)
    # CUDA accepts the beginning of a UUID if only one card's UUID begins so.
    found = [number for number, card in enumerate(cards) if card.uuid.startswith(entry) and entry.startswith("GPU-")]
    if len(found) == 1:
        return found[0]
    why = f"{entry!r} names several cards" if found else f"{entry!r} names none of the host's {len(cards)} cards"
    raise _unusable(value, why)


def _unusable(value: str, why: str) -> CardsUnavailable:
    return CardsUnavailable(
        f"{VARIABLE} is {value!r}, but {why}",
        hint=f"Unset it to lease all cards, or list UUIDs, or with {ORDER_VARIABLE}={_NVML_ORDER} the numbers "
        "that nvidia-smi shows.",
        status=os.EX_CONFIG,
    )
