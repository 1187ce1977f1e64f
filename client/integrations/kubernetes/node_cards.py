"""Reads the daemon's cards for the cluster: the memory that claims may hold, and each card's problems."""

from collections.abc import Callable, Collection, Mapping
from typing import Any, Final

from gpulease.client.console.reports import cards_of, health_of, leases_of
from gpulease.client.errors import GpuLeaseError
from gpulease.client.integrations.kubernetes.kubelet_plugin import DeviceHealth
from gpulease.client.integrations.kubernetes.resource_pool import PublishedCard, Trouble, device_name
from gpulease.client.sync.driver import ask
from gpulease.protocol import Opcode
from gpulease.protocol.messages import Empty, Inventory
from gpulease.protocol.opcodes import InventoryFlag

_ATTEMPTS: Final = 3
"""Number of tries to read the cards while no lease is granted or ended."""


class NodeCards:
    """Reads the cards of one daemon."""

    def __init__(self, address: str, lease_ids: Callable[[], Collection[str]]) -> None:
        """Prepare to read.

        Args:
            address: The daemon's address.
            lease_ids: Returns the ids of the leases of this node's claims, as in reports.
        """
        self._address, self._lease_ids = address, lease_ids
        self._last: list[PublishedCard] | None = None

    def read(self) -> list[PublishedCard]:
        """Return the cards. If the daemon does not answer, returns the last known cards, marked as unreachable.

        Raises GpuLeaseError if the daemon has never answered.
        """
        try:
            self._last = self._read()
            return self._last
        except GpuLeaseError:
            if self._last is None:
                raise
            return [
                PublishedCard(card.uuid, card.product, card.driver, 0, (Trouble.UNREACHABLE,)) for card in self._last
            ]

    def health(self, pool: str) -> list[DeviceHealth]:
        """Return the cards' health, as devices of a pool; [] if the daemon has never answered."""
        try:
            cards = self.read()
        except GpuLeaseError:
            return []
        return [_health(card, pool) for card in cards]

    def _read(self) -> list[PublishedCard]:
        # Read the leases before and after the cards. A lease that is granted in between would be missing in both the
        # free and the held bytes.
        leases = self._leases()
        for _ in range(_ATTEMPTS):
            inventory = ask(Opcode.GET_INVENTORY, Empty(), self._address)
            before, leases = leases, self._leases()
            if [lease["lease_id"] for lease in before] == [lease["lease_id"] for lease in leases]:
                break
        own_leases = self._lease_ids()
        leased_bytes: dict[str, int] = {}
        for lease in leases:
            # A fenced lease's bytes can't be leased again.
            if lease["lease_id"] in own_leases and lease["state"] != "fenced":
                card = str(lease.get("card_uuid") or "")
                leased_bytes[card] = leased_bytes.get(card, 0) + int(lease["size_bytes"])
        is_ready, checks = health_of(ask(Opcode.HEALTH, Empty(), self._address).report)
        # The inventory describes single cards, so ignore the checks that depend on them.
        is_sick = not is_ready and any(
            not check["ok"] for check in checks if check["check"] not in ("not_draining", "capacity")
        )
        return [
            _card(card_report, flags, leased_bytes, is_sick=is_sick) for card_report, flags in _with_flags(inventory)
        ]

    def _leases(self) -> list[dict[str, Any]]:
        return leases_of(ask(Opcode.LEASE_LIST_ACTIVE, Empty(), self._address).report)


def _health(card: PublishedCard, pool: str) -> DeviceHealth:
    reasons = ", ".join(trouble.value for trouble in card.troubles)
    is_healthy = None if Trouble.UNREACHABLE in card.troubles else not any(seen.is_unhealthy for seen in card.troubles)
    return DeviceHealth(pool, device_name(card.uuid), is_healthy, reasons)


def _with_flags(inventory: Inventory) -> list[tuple[Mapping[str, Any], int]]:
    return list(zip(cards_of(inventory), (entry.flags for entry in inventory.entries), strict=True))


def _card(report: Mapping[str, Any], flags: int, leased_bytes: Mapping[str, int], *, is_sick: bool) -> PublishedCard:
    troubles = []
    is_drained = any(report.get(key) is not None for key in ("drain_left_ms", "card_drain_left_ms"))
    if is_drained:
        troubles.append(Trouble.DRAINED)
    if is_sick or flags & InventoryFlag.DEGRADED:
        troubles.append(Trouble.SICK)
    if report["fenced_bytes"] >= report["capacity_bytes"]:
        troubles.append(Trouble.FENCED)
    # The inventory reports no free bytes for a drained card. Publish the full size, because the taint shows the drain.
    free = report["capacity_bytes"] if is_drained else report["available_bytes"] + leased_bytes.get(report["uuid"], 0)
    return PublishedCard(
        report["uuid"], report["name"], report["driver"], min(free, int(report["capacity_bytes"])), tuple(troubles)
    )
