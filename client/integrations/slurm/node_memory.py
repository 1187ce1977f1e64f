"""Compares a node's memory as Slurm counts it, in one sum, with the memory that the daemon grants on each card."""

from collections import Counter
from collections.abc import Container, Iterable, Sequence
from typing import Final

from gpulease.client.console.exit_status import MissingPrerequisite
from gpulease.client.console.reports import Report
from gpulease.client.integrations.slurm.slurm_jobs import MIB, JobRequest

FENCED: Final = "fenced"
"""The state of a lease whose memory could not be proved free. The card's `fenced_bytes` includes its bytes."""


def countable_mib(card: Report, jobs_per_card: int) -> int:
    """Return the MiB of an idle card that Slurm may count, if up to `jobs_per_card` jobs share the card.

    Each lease takes its size and one context from the card. An idle card's largest lease already leaves room for one
    context, so each job after the first takes one more.

    Raises MissingPrerequisite if the card is in use, or if that many contexts leave it no memory.
    """
    name = f"card {card['index']} ({card['name']})"
    # The size of a context is the capacity of an idle card minus the largest lease that it can grant.
    if card["leases"] or card["exclusive"] or card["fenced_bytes"] or not card["available_bytes"]:
        raise MissingPrerequisite(
            f"{name} must be idle, without leases, fenced memory or a drain: see `gpulease leases` and "
            "`gpulease health`"
        )
    context_bytes = card["capacity_bytes"] - card["available_bytes"]
    counted_mib = int(card["available_bytes"] - (jobs_per_card - 1) * context_bytes) // MIB
    if counted_mib <= 0:
        raise MissingPrerequisite(
            f"{name} has no memory left for jobs, because {jobs_per_card} contexts take all of it"
        )
    return counted_mib


def bytes_without_job(leases: Iterable[Report], job_leases: Container[str]) -> Counter[str]:
    """Return the bytes of leases without a job of Slurm, by the card's UUID."""
    leased_bytes: Counter[str] = Counter()
    for lease in leases:
        # A region's bytes count with its parent, and fenced bytes with the card.
        is_counted_elsewhere = lease.get("parent") or lease["state"] == FENCED
        if not is_counted_elsewhere and lease["lease_id"] not in job_leases:
            leased_bytes[lease.get("card_uuid") or ""] += int(lease["size_bytes"])
    return leased_bytes


def lacks_room_by_others(cards: Sequence[Report], without_job: Counter[str], request: JobRequest) -> bool:
    """Return whether a request lacks room only because something other than jobs' leases holds memory.

    Slurm does not count such memory: fenced memory, other programs, and leases without a job. If this returns False,
    Slurm counts more than the cards can lease, or no single card has enough free memory. The node can then run other
    jobs.

    Args:
        cards: The daemon's reports of the cards that the job may use.
        without_job: The result of `bytes_without_job` at the same moment.
        request: The request that the daemon refused.
    """
    # Enough memory is free in all, but not on one card.
    if sum(int(card["available_bytes"]) for card in cards) >= request.size_bytes * request.cards:
        return False

    def could_give_bytes(card: Report) -> int:
        # An exclusive lease holds the whole card.
        if card["exclusive"]:
            return int(card["capacity_bytes"])
        lost = sum(int(card.get(name) or 0) for name in ("fenced_bytes", "outside_bytes", "unowned_bytes"))
        return int(card["available_bytes"]) + lost + without_job[card["uuid"]]

    return sum(could_give_bytes(card) >= request.size_bytes for card in cards) >= request.cards
