"""A node's records of its jobs' leases, one file per job. A job's record is locked while a script changes it."""

import fcntl
import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final

from gpulease.client.console.exit_status import MissingPrerequisite
from gpulease.client.integrations.file_replacement import replace_file
from gpulease.client.integrations.slurm.job_usage import JobUsage

LOCKS: Final = "locks"
"""The file with the jobs' locks. The byte at the offset of a job's number is that job's lock."""

_SUFFIX: Final = ".json"
_USAGE_SUFFIX: Final = ".usage"


@dataclass(frozen=True, slots=True)
class JobRecord:
    """A job's leases, or the reason why it has none.

    Attributes:
        user: The id of the job's user, the tenant of the leases.
        restarts: How often Slurm had requeued the job before this start.
        address: The daemon's address.
        lease_ids: The leases in hex digits, each on a different card; none for a job that was refused.
        is_ready: Whether all leases were acquired and extended to their full duration.
        refusal: Why the job has no lease; "" if it has leases.
        node: This node's name in Slurm; "" in a record of an earlier version.
    """

    user: int
    restarts: int
    address: str
    lease_ids: tuple[str, ...] = ()
    is_ready: bool = False
    refusal: str = ""
    node: str = ""


class JobRecords:
    """The records of one node.

    Args:
        folder: Their folder, which is created if it is missing. All users may read it, and only root may write.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        folder.mkdir(mode=0o755, parents=True, exist_ok=True)

    @contextmanager
    def locked(self, job: str, *, waits: bool = True) -> Iterator[bool]:
        """Lock a job's record during the block. Yields False if another process holds the lock and `waits` is false."""
        # Lock a byte of one file for all jobs. A file per job could not be removed while others wait for its lock.
        with (self._folder / LOCKS).open("ab") as file:
            try:
                fcntl.lockf(file, fcntl.LOCK_EX | (0 if waits else fcntl.LOCK_NB), 1, int(job))
            except (BlockingIOError, PermissionError):
                yield False
                return
            yield True

    def jobs(self) -> list[str]:
        """Return the numbers of all jobs with a record."""
        return [path.stem for path in sorted(self._folder.glob(f"*{_SUFFIX}"))]

    def read(self, job: str) -> JobRecord | None:
        """Return a job's record; None if it has none. Raises MissingPrerequisite if the file is not a record."""
        path = self._path(job)
        try:
            members = json.loads(path.read_text())
            # An earlier version wrote records with a single lease.
            if "lease_id" in members:
                members["lease_ids"] = [members.pop("lease_id")]
            lease_ids = members.pop("lease_ids", ())
            if not all(isinstance(lease_id, str) for lease_id in lease_ids):
                raise ValueError(f"lease_ids is {lease_ids!r}")
            record = JobRecord(**members, lease_ids=tuple(filter(None, lease_ids)))
            # Check the types, because root uses the user's id and the address.
            for name, kind in (
                ("user", int),
                ("restarts", int),
                ("address", str),
                ("is_ready", bool),
                ("refusal", str),
                ("node", str),
            ):
                if type(getattr(record, name)) is not kind:
                    raise ValueError(f"{name} is {getattr(record, name)!r}")
            return record
        except FileNotFoundError:
            return None
        except (ValueError, TypeError, AttributeError) as error:
            raise MissingPrerequisite(f"{path} must be a job's record: {error}. Was it changed?") from None

    def write(self, job: str, record: JobRecord) -> None:
        """Replace a job's record. It is on the disk when this returns."""
        replace_file(self._path(job), json.dumps(asdict(record)).encode(), 0o644, is_synced=True)

    def forget(self, job: str) -> None:
        """Remove a job's record. Has no effect if there is none."""
        self._path(job).unlink(missing_ok=True)

    def used(self) -> list[str]:
        """Return the numbers of all jobs with usage that is not yet reported to Slurm."""
        return [path.stem for path in sorted(self._folder.glob(f"*{_USAGE_SUFFIX}"))]

    def usage(self, job: str) -> JobUsage:
        """Return the usage of a job's ended leases. Raises MissingPrerequisite if the file is not a usage."""
        path = self._usage_path(job)
        try:
            members = json.loads(path.read_text())
            return JobUsage(float(members["byte_seconds"]), float(members["gpu_seconds"]))
        except FileNotFoundError:
            return JobUsage()
        except (ValueError, TypeError, LookupError) as error:
            raise MissingPrerequisite(f"{path} must be a job's usage: {error}. Was it changed?") from None

    def write_usage(self, job: str, usage: JobUsage) -> None:
        """Replace a job's usage durably."""
        replace_file(self._usage_path(job), json.dumps(asdict(usage)).encode(), 0o644, is_synced=True)

    def usage_age_s(self, job: str) -> float:
        """Return the seconds since a job's usage was written, by the host's wall clock; 0 if there is none."""
        try:
            return time.time() - self._usage_path(job).stat().st_mtime
        except FileNotFoundError:
            return 0.0

    def forget_usage(self, job: str) -> None:
        """Remove a job's usage. Has no effect if there is none."""
        self._usage_path(job).unlink(missing_ok=True)

    def _usage_path(self, job: str) -> Path:
        return self._folder / f"{job}{_USAGE_SUFFIX}"

    def _path(self, job: str) -> Path:
        return self._folder / f"{job}{_SUFFIX}"
