"""A node's memory as Slurm counts it, one sum of MiB, and as the daemon grants it, card by card."""

from collections import Counter
from collections.abc import Container, Iterable, Sequence
from typing import Final

from gpulease.client.console.exit_status import MissingPrerequisite
from gpulease.client.console.reports import Report
from gpulease.client.integrations.slurm.slurm_jobs import MIB, JobRequest

FENCED: Final = "fenced"
"""State of a lease after the proof of free memory failed; the card's `fenced_bytes` has these bytes."""


def countable_mib(card: Report, jobs_per_card: int) -> int:
    """Return the MiB of an idle card that Slurm may count, if up to `jobs_per_card` jobs share the card.

    A lease is charged its size plus one context. So each job after the first one costs the card one context that no
    job requests.

    Raises MissingPrerequisite if the card is in use, or if so many contexts leave it no memory.
    """
    name = f"card {card['index']} ({card['name']})"
    # Only an idle card shows the bytes of one context: what it has, less the largest slice that it can lease.
    if card["leases"] or card["exclusive"] or card["fenced_bytes"] or not card["available_bytes"]:
        raise MissingPrerequisite(
            f"{name} must be idle, without leases, fenced memory or a drain: see gpulease leases and gpulease health"
        )
    context_bytes = card["capacity_bytes"] - card["available_bytes"]
    counted_mib = int(card["available_bytes"] - (jobs_per_card - 1) * context_bytes) // MIB
    if counted_mib <= 0:
        raise MissingPrerequisite(f"{name} has no memory left for jobs next to {jobs_per_card} contexts")
    return counted_mib


def bytes_without_job(leases: Iterable[Report], of_jobs: Container[str]) -> Counter[str]:
    """Return the bytes on each card, by its UUID, of leases that no job of Slurm has."""
    leased_bytes: Counter[str] = Counter()
    for lease in leases:
        # A region is a part of its parent's memory, and the card's report has the fenced bytes.
        is_part = lease.get("parent") or lease["state"] == FENCED
        if not is_part and lease["lease_id"] not in of_jobs:
            leased_bytes[lease.get("card_uuid") or ""] += int(lease["size_bytes"])
    return leased_bytes


def lacks_room_by_others(cards: Sequence[Report], without_job: Counter[str], request: JobRequest) -> bool:
    """Return whether a request has no room only because memory is held by something other than jobs' leases.

    That is memory which Slurm can't count: fenced memory, other programs, leases that no job has. Without them, Slurm
    counts more than the cards can lease, or the free memory is in pieces; the node is then safe for other jobs.

    Args:
        cards: The daemon's reports of the cards that the job may use.
        without_job: `bytes_without_job` of the same moment.
        request: What the daemon refused.
    """
    # As much as the job wants is free, but in pieces on several cards.
    if sum(int(card["available_bytes"]) for card in cards) >= request.size_bytes * request.cards:
        return False

    def could_give_bytes(card: Report) -> int:
        # A lease without a job that excludes all others withholds the whole card.
        if card["exclusive"]:
            return int(card["capacity_bytes"])
        lost = sum(int(card.get(name) or 0) for name in ("fenced_bytes", "outside_bytes", "unowned_bytes"))
        return int(card["available_bytes"]) + lost + without_job[card["uuid"]]

    return sum(could_give_bytes(card) >= request.size_bytes for card in cards) >= request.cards
