"""Who gets which card: pure functions over the accounts of the cards."""

from collections.abc import Iterable, Sequence

from gpulease.daemon.core.cards import CardAccount
from gpulease.daemon.core.leases import ALONE
from gpulease.protocol.opcodes import Exclusivity


def select(accounts: Sequence[CardAccount], selector: str | None) -> tuple[CardAccount, ...]:
    """The cards a selector names: all of them for None, none if it is unknown."""
    if selector is None:
        return tuple(accounts)
    return tuple(account for account in accounts if account.card.answers_to(selector))


def suits(account: CardAccount, exclusivity: Exclusivity) -> bool:
    """Whether the card is of the kind the exclusivity class speaks of."""
    return exclusivity is not Exclusivity.PARTITION_EXCLUSIVE or account.card.is_partition


def could_ever_hold(account: CardAccount, size_bytes: int, contexts: int = 1) -> bool:
    """Whether the request would fit if the card were empty."""
    return account.charge_bytes(size_bytes, contexts) <= account.card.capacity_bytes


def fits_now(account: CardAccount, size_bytes: int, exclusivity: Exclusivity, contexts: int = 1) -> bool:
    """Whether the card has the bytes free and nobody on it, or to come, wants it alone."""
    if account.exclusive_leases or (exclusivity in ALONE and account.leases):
        return False
    return account.charge_bytes(size_bytes, contexts) <= account.free_bytes


def choose(
    candidates: Iterable[CardAccount], size_bytes: int, exclusivity: Exclusivity, contexts: int = 1
) -> CardAccount | None:
    """The card with the most free bytes among those that fit now (a tie: the lowest index), None if none does."""
    fitting = [account for account in candidates if fits_now(account, size_bytes, exclusivity, contexts)]
    return min(fitting, key=lambda account: (-account.free_bytes, account.card.index), default=None)


def largest_slice_bytes(candidates: Iterable[CardAccount], contexts: int = 1) -> int:
    """The most that any of the cards could ever give one tenant, for so many contexts."""
    return max((_less(a.card.largest_slice_bytes, a, contexts) for a in candidates), default=0)


def available_bytes(candidates: Iterable[CardAccount], contexts: int = 1) -> int:
    """The most that any of the cards could give one tenant now, for so many contexts."""
    return max((_less(a.available_bytes, a, contexts) for a in candidates), default=0)


def _less(slice_bytes: int, account: CardAccount, contexts: int) -> int:
    """What is left of a slice once the contexts beside its first are charged."""
    return max(0, slice_bytes - (contexts - 1) * account.card.overhead_bytes)
