"""Adds up the usage of a job's leases on one node, for Slurm's accounting."""

from dataclasses import dataclass
from typing import Final

from gpulease.client.console.reports import Report
from gpulease.protocol.time_units import MS_PER_S

GIB: Final = 1 << 30


@dataclass(frozen=True, slots=True)
class JobUsage:
    """The sum over a job's leases, and over its starts if Slurm requeued it.

    Attributes:
        byte_seconds: For each lease, its bytes times the seconds from its grant until its memory was proved free.
        gpu_seconds: The cards' busy seconds, as the daemon counts them.
    """

    byte_seconds: float = 0.0
    gpu_seconds: float = 0.0

    def plus(self, report: Report) -> "JobUsage":
        """Return the sum with the usage in the report of a lease that has just ended.

        A lease that the daemon has forgotten adds nothing.
        """
        age_s = report.get("age_ms", 0) / MS_PER_S
        return JobUsage(
            self.byte_seconds + report.get("size_bytes", 0) * age_s,
            self.gpu_seconds + (report.get("gpu_seconds") or 0.0),
        )
