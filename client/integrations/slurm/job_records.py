"""A node's records of its jobs' leases: one file per job, which each script locks while it changes it."""

import fcntl
import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final

from gpulease.client.console.exit_status import CannotStart
from gpulease.client.integrations.file_replacement import replace_file

LOCKS: Final = "locks"
"""The file with the jobs' locks: the byte at a job's number is locked for that job."""

_SUFFIX: Final = ".json"


@dataclass(frozen=True, slots=True)
class JobRecord:
    """A job's lease, or why it has none.

    Attributes:
        user: The id of the job's user, who is the lease's tenant.
        restarts: How often Slurm had requeued the job by then.
        address: The daemon's address.
        lease_id: The lease, in hex digits; "" for a job that was refused.
        is_ready: Whether the lease was extended to its full time.
        refusal: Why the job has no lease; "" if it has one.
    """

    user: int
    restarts: int
    address: str
    lease_id: str = ""
    is_ready: bool = False
    refusal: str = ""


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
        """Lock a job's record until the block ends. Yields False if another process has it and `waits` is false."""
        # Lock a byte of one shared file: a separate file per job could not be removed while others wait for its lock.
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
        """Return a job's record; None if it has none. Raises CannotStart if the file is not a record."""
        path = self._path(job)
        try:
            record = JobRecord(**json.loads(path.read_text()))
            # Check types, too: the user's id and the address are used as root.
            for name, kind in JobRecord.__annotations__.items():
                if type(getattr(record, name)) is not kind:
                    raise ValueError(f"{name} is {getattr(record, name)!r}")
            return record
        except FileNotFoundError:
            return None
        except (ValueError, TypeError) as error:
            raise CannotStart(f"{path} must be a job's record: {error}. Was it changed?") from None

    def write(self, job: str, record: JobRecord) -> None:
        """Replace a job's record. It is on the disk when this returns."""
        replace_file(self._path(job), json.dumps(asdict(record)).encode(), 0o644, is_synced=True)

    def forget(self, job: str) -> None:
        """Remove a job's record. Has no effect if there is none."""
        self._path(job).unlink(missing_ok=True)

    def _path(self, job: str) -> Path:
        return self._folder / f"{job}{_SUFFIX}"
